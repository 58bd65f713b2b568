"""Worst-case bytes of a unified card: those of Wan2.1 and of the language model, and of its rollouts' log-probs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cards.memory import ForwardSize
from cards.qwen3 import memory as qwen3
from cards.wan21 import memory as wan21

PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    **wan21.PEAK_BYTES,
    **qwen3.PEAK_BYTES,
    ("causal_lm", "token_log_probs"): qwen3.token_log_probs_bytes,
}
"""(component kind, operation) -> bytes."""

HELD_BYTES: dict[str, Callable[[Mapping[str, Any], int], int]] = {**qwen3.HELD_BYTES}
"""Component kind -> bytes that a request of so many tokens holds from step to step."""
