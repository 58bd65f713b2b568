"""Worst-case activations of a CLIP's forwards, in bytes, from the model's config and the size of its input.

Counts what lives at once at the widest point of a forward without gradient, in float32. Fitted to counted allocations
of small configs (``tests/cards/test_memory.py``); scratch memory inside a kernel is not part of it. An attention that
keeps its whole score matrix would need more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cards.memory import ForwardSize

FLOAT_BYTES = 4


def encode_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The text tower's forward over padded prompts, with their mask."""
    return FLOAT_BYTES * size.rows * _tower(config["text_config"], size.text_tokens, masked=True)


def score_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The image tower's forward; a row is a frame, with a copy of its pixels as merging rows makes it."""
    vision = config["vision_config"]
    side, patch = vision["image_size"], vision["patch_size"]
    pixels = vision["num_channels"] * side * side
    return FLOAT_BYTES * size.rows * (_tower(vision, (side // patch) ** 2 + 1, masked=False) + pixels)


def _tower(config: Mapping[str, Any], tokens: int, *, masked: bool) -> int:
    """Floats of one row of a tower's widest block."""
    d, f = config["hidden_size"], config["intermediate_size"]
    scores = tokens if masked else 0
    return tokens * (max(8 * d + 5 * scores // 4, 4 * d + 3 * f) + scores // 4 + 4)


PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    ("scorer", "encode"): encode_bytes,
    ("scorer", "score"): score_bytes,
}
"""(component kind, operation) -> bytes."""
