"""The data set that needs no download: a ShapeWorld folder, written on first use, then read like any other."""

from __future__ import annotations

from pathlib import Path

from fastvideo_train.data.datamodule import VideoDataModule
from fastvideo_train.data.shapeworld_folder import ensure_shapeworld


class ShapeWorldDataModule(VideoDataModule):
    """``VideoDataModule`` over ``root/shapeworld-<clips>-<world_seed>``.

    Args:
        root: parent of the generated folder.
        clips: videos in it.
        world_seed: which videos; apart from ``seed``, so that runs with other seeds share one folder and cache.
        others: as in ``VideoDataModule``.
    """

    def __init__(
        self,
        *,
        root: str | Path,
        clips: int,
        world_seed: int,
        cache_dir: str | Path,
        num_frames: int,
        height: int,
        width: int,
        batch_size: int,
        seed: int,
        val_fraction: float = 0.1,
        num_workers: int = 0,
        encode_batch_size: int = 8,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(
            folder=Path(root) / f"shapeworld-{clips}-{world_seed}",
            cache_dir=cache_dir,
            num_frames=num_frames,
            height=height,
            width=width,
            batch_size=batch_size,
            seed=seed,
            val_fraction=val_fraction,
            num_workers=num_workers,
            encode_batch_size=encode_batch_size,
            pin_memory=pin_memory,
        )
        self.clips = clips
        self.world_seed = world_seed

    def check(self, *, temporal_factor: int, spatial_factor: int) -> None:
        """Also writes the folder when it is missing (a minute or less; no model is involved)."""
        self.geometry.check(temporal_factor=temporal_factor, spatial_factor=spatial_factor)
        ensure_shapeworld(self.folder, self.clips, self.world_seed)
        super().check(temporal_factor=temporal_factor, spatial_factor=spatial_factor)
