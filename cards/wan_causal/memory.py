"""Worst-case activations of the causal Wan's forwards, in bytes: those of ``cards.wan21.memory`` a chunk at a time.

A chunk's forward reads keys and values where they lie in the slab, which is the request's and not an activation; what
it adds to the library's forward is less than the library's own float32 copies. A chunk's decode holds the features of
the frames before it until those of its own are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cards.memory import ForwardSize
from cards.wan21.memory import PEAK_BYTES as WAN21
from cards.wan21.memory import decode_bytes, decoder_kept_bytes, velocity_bytes


def decode_chunk_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """A chunk's decode, with the features that it was given and those that it gives."""
    return decode_bytes(config, size) + decoder_kept_bytes(config, size)


PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    **{key: count for key, count in WAN21.items() if key != ("transformer", "velocity_first_block")},
    ("transformer", "velocity_chunk"): velocity_bytes,
    ("vae", "decode_chunk"): decode_chunk_bytes,
}
"""(component kind, operation) -> bytes."""
KEPT_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    ("vae", "decode_chunk"): decoder_kept_bytes,
}
"""(component kind, operation) -> bytes that a request holds between two calls of it."""
