"""Chunks of a clip that is made one after the other: how many there are and which of them attention sees.

A chunk is a fixed number of latent frames. Pure numbers; knows nothing about tensors.
"""

from __future__ import annotations

from cards.errors import UserError
from cards.geometry import Geometry


def visible_chunks(chunks: int, window: int, sinks: int = 0) -> list[int]:
    """What the last of ``chunks`` chunks sees, itself among them: the first ``sinks`` and the last ``window``."""
    return [*range(min(sinks, chunks)), *range(max(sinks, chunks - window), chunks)]


def settled_window(chunks: int, window: int | None, sinks: int) -> tuple[int, int]:
    """(window, sinks) of a rollout of ``chunks``; where nothing ever leaves the window it is the whole rollout."""
    return (chunks, 0) if window is None or window + sinks >= chunks else (window, sinks)


def chunk_count(frames: int, chunk: int, geometry: Geometry) -> int:
    """Chunks of ``chunk`` latent frames in a clip of ``frames`` frames; ``UserError`` where they leave a rest."""
    latent = (frames - 1) // geometry.temporal + 1
    if latent % chunk:
        near = max(1, latent // chunk) * chunk
        first, second = ((n - 1) * geometry.temporal + 1 for n in (near, near + chunk))
        raise UserError(
            f"frames: got {frames}, which are {latent} latent frames; expected a multiple of {chunk} of them "
            f"(chunks of {chunk}): use {first} or {second}"
        )
    return latent // chunk
