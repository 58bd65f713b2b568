"""What a unified card's components compute: Wan2.1's operations and those of the language model, as they are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cards.qwen3 import components as qwen3
from cards.wan21 import components as wan21


def tokenize_text(tokenizer: Any, prompt: Any, context: int) -> dict[str, Tensor]:
    """``ids`` (1, L) of the refiner's chat, whose template is told that the model is not to think aloud."""
    return qwen3.tokenize(tokenizer, prompt, context, enable_thinking=False)


OPERATIONS: dict[tuple[str, str], Callable[[Any, Mapping[str, Tensor], Mapping[str, Any]], Tensor]] = {
    **wan21.OPERATIONS,
    **qwen3.OPERATIONS,
}

PREPARE: dict[str, Callable[..., dict[str, Tensor]]] = {**wan21.PREPARE, "tokenize_text": tokenize_text}
