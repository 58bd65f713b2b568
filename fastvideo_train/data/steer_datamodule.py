"""Clips of the steerable ShapeWorld, with an action a chunk: written on first use, then read like any other folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cards.errors import UserError
from fastvideo_train.data.datamodule import VideoDataModule
from fastvideo_train.data.shapeworld_folder import ensure_shapeworld
from methods.shapeworld.steer import caption_of, frames_of, sample_actions, sample_thing, steer_clip


class SteerDataModule(VideoDataModule):
    """``VideoDataModule`` over ``root/steer-<clips>-<world_seed>-<chunks>x<chunk>``.

    Args:
        root: parent of the generated folder.
        clips: videos in it.
        world_seed: which videos; apart from ``seed``, so that runs with other seeds share one folder and cache.
        chunks: chunks a clip, each with an action.
        chunk: latent frames a chunk, as the card has it.
        others: as in ``VideoDataModule``.
    """

    def __init__(
        self, *, root: str | Path, clips: int, world_seed: int, chunks: int, chunk: int = 1, **others: Any
    ) -> None:
        if chunks < 2 or chunk < 1:
            raise UserError(f"data: got chunks={chunks}, chunk={chunk}; expected at least 2 chunks of at least 1")
        folder = Path(root) / f"steer-{clips}-{world_seed}-{chunks}x{chunk}"
        super().__init__(folder=folder, num_frames=frames_of(chunks, chunk), **others)
        self.clips = clips
        self.world_seed = world_seed
        self.chunks = chunks
        self.chunk = chunk

    def check(self, *, temporal_factor: int, spatial_factor: int) -> None:
        """Also writes the folder when it is missing; no model is involved."""
        self.geometry.check(temporal_factor=temporal_factor, spatial_factor=spatial_factor)
        ensure_shapeworld(self.folder, self.clips, self.world_seed, self._draw)
        super().check(temporal_factor=temporal_factor, spatial_factor=spatial_factor)

    def _draw(self, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
        thing, actions = sample_thing(rng), sample_actions(rng, self.chunks)
        clip_FHWC = steer_clip(thing, actions, rng, chunk=self.chunk)
        return clip_FHWC, {"caption": caption_of(thing), "actions": list(actions)}
