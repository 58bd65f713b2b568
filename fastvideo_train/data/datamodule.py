"""Latent batches for training: a checked folder, its latent cache, and an order that resumes exactly.

Knows Lightning's data hooks and the split. Leaves the folder's rules to ``video_folder``, the files to ``latent_cache``
and the order to ``sampler``. Life of a module, in this order:

    data = VideoDataModule(folder=..., ...)
    data.check(temporal_factor=4, spatial_factor=8)     # before any weights load; every complaint about the input
    data.use_encoder(encode, vae_digest=...)            # once the VAE is there
    trainer.fit(model, datamodule=data)                 # prepare_data on one process, setup on all

The trainer must be made with ``use_distributed_sampler=False``: the sampler shards by itself.

Shape legend: B rows a rank, C channels, T latent frames, H and W latent cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fastvideo_train.data.latent_cache import (
    DataWarning,
    Encode,
    LatentIndex,
    LatentReader,
    LatentRow,
    build_latent_cache,
    cache_root,
    read_index,
)
from fastvideo_train.data.sampler import GlobalBatchSampler
from fastvideo_train.data.video_folder import DataError, FolderScan, Geometry, describe, scan_folder, summary


class LatentBatch(TypedDict, total=False):
    """What a loader yields."""

    latents: torch.Tensor  # latents_BCTHW float32, normalised
    prompt: list[str]  # B captions
    index: torch.Tensor  # B row numbers within the folder, int64
    conditions: dict[str, torch.Tensor]  # what else was encoded of the clips, each with a leading B
    actions: list[tuple[str, ...]]  # B; absent where no clip of the batch names any


Example = tuple[torch.Tensor, str, int, dict[str, torch.Tensor], tuple[str, ...]]


class LatentDataset(Dataset[Example]):
    """Some rows of a latent index."""

    def __init__(self, reader: LatentReader, rows: Sequence[LatentRow]) -> None:
        self.reader = reader
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Example:
        row = self.rows[position]
        return self.reader.read(row), row.caption, row.index, self.reader.read_conditions(row), tuple(row.actions)


def collate(examples: list[Example]) -> LatentBatch:
    latents_CTHW, prompts, indices, conditions, actions = zip(*examples, strict=True)
    batch: LatentBatch = {
        "latents": torch.stack(latents_CTHW),
        "prompt": list(prompts),
        "index": torch.tensor(indices),
        "conditions": {name: torch.stack([row[name] for row in conditions]) for name in conditions[0]},
    }
    if any(actions):
        batch["actions"] = list(actions)
    return batch


def split_by_content(rows: Sequence[LatentRow], val_fraction: float) -> tuple[list[LatentRow], list[LatentRow]]:
    """(training, validation) rows, chosen by the hash of the file alone.

    A clip keeps its side when files are added or reordered, and copies of one clip stay on one side. Each side gets at
    least one clip when ``val_fraction`` > 0.
    """
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction: got {val_fraction}, expected a number in [0, 1)")
    if val_fraction == 0:
        return list(rows), []
    draw = {row.key: int(row.key[:13], 16) / 16**13 for row in rows}  # uniform in [0, 1); a sha256 is its own dice
    if len(draw) < 2:
        raise DataError(
            "a validation split needs at least 2 different clips, got 1; set val_fraction=0 or name a val_folder"
        )
    threshold = min(max(val_fraction, min(draw.values())), sorted(draw.values())[-2])
    held_out = {key for key, value in draw.items() if value <= threshold}
    return [row for row in rows if row.key not in held_out], [row for row in rows if row.key in held_out]


class VideoDataModule(lightning.LightningDataModule):
    """Training and validation batches of cached latents from a folder of videos with captions.

    Args:
        folder: videos and ``metadata.jsonl``.
        cache_dir: where latents are kept; shared by all folders and VAEs.
        num_frames: frames a clip, of the form 4k+1 (for a VAE that compresses time by 4); longer videos lose their
            tail, shorter ones are skipped.
        height: pixels; videos are scaled and centre-cropped.
        width: pixels.
        batch_size: rows a rank and step.
        seed: of the training order.
        val_fraction: share of the clips held out by content hash; used when there is no ``val_folder``.
        val_folder: a folder of its own for validation.
        num_workers: loader processes; 0 reads in the training process.
        encode_batch_size: clips an encode call.
        pin_memory: page-locked batches, for a GPU.
    """

    def __init__(
        self,
        *,
        folder: str | Path,
        cache_dir: str | Path,
        num_frames: int,
        height: int,
        width: int,
        batch_size: int,
        seed: int,
        val_fraction: float = 0.1,
        val_folder: str | Path | None = None,
        num_workers: int = 0,
        encode_batch_size: int = 8,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.val_folder = None if val_folder is None else Path(val_folder)
        self.cache_dir = Path(cache_dir)
        self.geometry = Geometry(num_frames=num_frames, height=height, width=width)
        self.batch_size = batch_size
        self.seed = seed
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.encode_batch_size = encode_batch_size
        self.pin_memory = pin_memory
        self.train_rows: list[LatentRow] = []  # filled by setup
        self.val_rows: list[LatentRow] = []
        self._scans: dict[Path, FolderScan] = {}
        self._encoder: tuple[Encode, str] | None = None
        self._loader: StatefulDataLoader | None = None
        self._restored: dict[str, Any] | None = None

    # ------------------------------------------------------------------------------------------------ before fitting

    def check(self, *, temporal_factor: int, spatial_factor: int) -> None:
        """Everything that can be wrong with the input, without a model: geometry, metadata, files.

        Files that cannot be used are listed in one ``DataWarning``.

        Raises:
            DataError: see ``Geometry.check``, ``read_metadata`` and ``scan_folder``.
        """
        self.geometry.check(temporal_factor=temporal_factor, spatial_factor=spatial_factor)
        for name, value in (("batch_size", self.batch_size), ("encode_batch_size", self.encode_batch_size)):
            if value < 1:
                raise DataError(f"data.{name}: got {value}, expected at least 1")
        if not 0 <= self.val_fraction < 1:
            raise DataError(f"data.val_fraction: got {self.val_fraction}, expected a number in [0, 1)")
        for folder in self._folders():
            scan = self._scans[folder] = scan_folder(folder, self.geometry)
            if scan.skipped:
                title = f"{folder}: {len(scan.skipped)} video(s) skipped, {len(scan.clips)} used"
                rank_zero_warn(summary(title, describe(scan.skipped)), category=DataWarning)

    def use_encoder(self, encode: Encode, *, vae_digest: str) -> None:
        """Name the VAE: ``encode`` maps video_BCTHW float in [-1, 1] to normalised latents_BCTHW."""
        self._encoder = (encode, vae_digest)

    def _folders(self) -> list[Path]:
        return [self.folder] if self.val_folder is None else [self.folder, self.val_folder]

    def _named_encoder(self) -> tuple[Encode, str]:
        if self._encoder is None:
            raise RuntimeError("VideoDataModule.use_encoder(encode, vae_digest=...) must be called before fitting")
        return self._encoder

    # ----------------------------------------------------------------------------------------------- Lightning hooks

    def prepare_data(self) -> None:
        """Encode what the cache lacks; Lightning calls this on one process while the others wait."""
        encode, vae_digest = self._named_encoder()
        for folder in self._folders():
            scan = self._scans[folder] if folder in self._scans else scan_folder(folder, self.geometry)
            index = build_latent_cache(
                scan,
                cache_dir=self.cache_dir,
                vae_digest=vae_digest,
                geometry=self.geometry,
                encode=encode,
                batch_size=self.encode_batch_size,
            )
            late = [item for item in index.skipped if item not in scan.skipped]
            if late:
                title = f"{folder}: {len(late)} more video(s) skipped, they do not decode ({index.report})"
                rank_zero_warn(summary(title, describe(late)), category=DataWarning)

    def setup(self, stage: str | None = None) -> None:
        """Read the index and split it; the same on every rank."""
        index = self._index(self.folder)
        if self.val_folder is None:
            self.train_rows, self.val_rows = split_by_content(index.rows, self.val_fraction)
        else:
            self.train_rows, self.val_rows = list(index.rows), list(self._index(self.val_folder).rows)

    def _index(self, folder: Path) -> LatentIndex:
        _, vae_digest = self._named_encoder()
        return read_index(folder, cache_dir=self.cache_dir, vae_digest=vae_digest, geometry=self.geometry)

    def train_dataloader(self) -> StatefulDataLoader:
        """Endless batches of this rank; continues where ``load_state_dict`` pointed."""
        rank, world_size = self._shard()
        sampler = GlobalBatchSampler(
            rows=len(self.train_rows),
            batch_size=self.batch_size,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
        )
        self._loader = StatefulDataLoader(
            self._dataset(self.train_rows),
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        if self._restored is not None:
            self._check_same_stream(self._restored)
            self._loader.load_state_dict(self._restored["loader"])
            self._restored = None
        return self._loader

    def val_dataloader(self) -> StatefulDataLoader | list[Any]:
        """All validation rows in order, on every rank alike: the mean loss needs no reduction and is the same for
        any number of ranks. Empty when nothing is held out."""
        if not self.val_rows:
            return []
        return StatefulDataLoader(
            self._dataset(self.val_rows),
            batch_size=self.batch_size,
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )

    def _dataset(self, rows: Sequence[LatentRow]) -> LatentDataset:
        _, vae_digest = self._named_encoder()
        root = cache_root(self.cache_dir, vae_digest=vae_digest, geometry=self.geometry)
        return LatentDataset(LatentReader(root), rows)

    def _shard(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size); tensor-parallel ranks share theirs, which the strategy knows."""
        shard = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        if shard is not None:
            return shard["rank"], shard["num_replicas"]
        return 0, 1

    # -------------------------------------------------------------------------------------------------------- resume

    def state_dict(self) -> dict[str, Any]:
        """Position of the training order; equal on every rank."""
        if self._loader is None:
            return {}
        return {"loader": self._loader.state_dict(), **self._stream()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a ``state_dict``; takes effect at the next ``train_dataloader``."""
        self._restored = state_dict if state_dict else None

    def _stream(self) -> dict[str, Any]:
        keys = "\n".join(row.key for row in self.train_rows)
        return {
            "seed": self.seed,
            "rows": len(self.train_rows),
            "content": hashlib.sha256(keys.encode()).hexdigest(),
            "num_workers": self.num_workers,
        }

    def _check_same_stream(self, state: dict[str, Any]) -> None:
        for name, value in self._stream().items():
            if state[name] != value:
                raise DataError(
                    f"cannot resume the data order: data.{name} was {state[name]} in the checkpoint and is {value} "
                    "now; restore the same data set and settings, or start a new run"
                )
