"""Worst-case activations of the causal Wan's forwards, in bytes: those of ``cards.wan21.memory`` a chunk at a time.

A chunk's forward reads keys and values where they lie in the slab, which is the request's and not an activation; what
it adds to the library's forward is the copy of the keys and values that go into the slab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cards.memory import ForwardSize
from cards.wan21.memory import PEAK_BYTES as WAN21
from cards.wan21.memory import decode_bytes, velocity_bytes

PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    **{key: count for key, count in WAN21.items() if key != ("transformer", "velocity_first_block")},
    ("transformer", "velocity_chunk"): velocity_bytes,
    ("vae", "decode_chunk"): decode_bytes,
}
"""(component kind, operation) -> bytes."""
