"""Clips encoded once and kept on disk as safetensors shards.

Knows files, checksums and locks. Knows nothing about the VAE: ``encode`` is an argument, and ``vae_digest`` is whatever
string changes when its latents would change. Captions live in the index, never in a shard, so editing one encodes
nothing again.

On disk, under ``cache_dir/<digest of the VAE>-<frames>x<height>x<width>/``:
    shard-000000.safetensors   latents_CTHW float32, one tensor a clip, named by the sha256 of the clip's file; what
                               else ``encode`` gives of a clip is beside it as <sha256>.<name>
    shard-000000.json          written after its shard: the shard's own sha256 and its keys; without it a shard is void
    index-<folder>.json        one a data folder: its rows (caption, key, shard) and the files that were left out
    skipped-<folder>.jsonl     the same left-out files, one a line, for people
    lock                       held (flock) by the one process that verifies and encodes; the kernel drops it on a crash

Shape legend: B batch, C channels, T frames, H height, W width (pixels for videos, cells for latents).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from fastvideo_train.callbacks.progress import Progress
from fastvideo_train.data.video_folder import (
    Clip,
    DataError,
    FolderScan,
    Geometry,
    Skipped,
    nothing_left,
    read_clip,
)
from inference.media import MediaError, write_bytes_atomic

LATENTS = "latents"
Encode = Callable[[torch.Tensor], torch.Tensor | dict[str, torch.Tensor]]
"""video_BCTHW float32 in [-1, 1] -> latents_BCTHW, normalised; or these as ``LATENTS`` among others of a leading B."""

_log = logging.getLogger(__name__)


class DataWarning(UserWarning):
    """Something in a data set or cache was left out or done again; the message lists what."""


@dataclass(frozen=True)
class LatentRow:
    """One training example: where its latents lie and what it shows."""

    index: int  # position among the usable rows of the folder
    file_name: str  # as written in metadata.jsonl
    caption: str
    key: str  # sha256 of the video file; the tensor's name in its shard
    shard: str  # file name of the shard
    actions: tuple[str, ...] = ()  # as written in metadata.jsonl, one a chunk


@dataclass(frozen=True)
class LatentIndex:
    """What the cache holds for one data folder."""

    root: Path  # the folder of the shards
    rows: tuple[LatentRow, ...]  # in the order of metadata.jsonl; never empty
    skipped: tuple[Skipped, ...]  # rows of metadata.jsonl that were left out
    report: Path  # the same, as a .jsonl file


def cache_root(cache_dir: str | Path, *, vae_digest: str, geometry: Geometry) -> Path:
    """The folder of the shards of one VAE and one geometry; data folders share it."""
    digest = hashlib.sha256(vae_digest.encode()).hexdigest()[:16]
    return Path(cache_dir) / f"{digest}-{geometry.num_frames}x{geometry.height}x{geometry.width}"


def build_latent_cache(
    scan: FolderScan,
    *,
    cache_dir: str | Path,
    vae_digest: str,
    geometry: Geometry,
    encode: Encode,
    batch_size: int = 8,
    shard_clips: int = 64,
) -> LatentIndex:
    """Bring the cache up to date with the folder: verify every shard, encode what is missing, write the index.

    Safe to kill at any moment and to call from several processes at once: one works, the others wait and then find
    the work done. A resumed build forms the same encode batches as an uninterrupted one.

    Args:
        scan: the checked folder.
        encode: see ``Encode``; called under ``torch.no_grad`` and not at all when nothing is missing.
        batch_size: clips an encode call.
        shard_clips: clips a shard, rounded up to whole batches; a crash loses at most this much work.

    Raises:
        DataError: latents that are not finite or not one a clip; no clip left after decoding.
    """
    root = cache_root(cache_dir, vae_digest=vae_digest, geometry=geometry)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / "lock"):
        stored = _verified_keys(root)
        pending = list({clip.sha256: clip for clip in scan.clips if clip.sha256 not in stored}.values())
        failed: dict[str, str] = {}
        if pending:
            whole_batches = -(-shard_clips // batch_size) * batch_size
            added, failed = _encode_pending(root, pending, geometry, encode, batch_size, whole_batches)
            stored.update(added)
        index = _index_of(scan, root, stored, failed)
        _write_index(index, scan.folder)
    return index


def read_index(folder: str | Path, *, cache_dir: str | Path, vae_digest: str, geometry: Geometry) -> LatentIndex:
    """The index that ``build_latent_cache`` wrote for this data folder."""
    root = cache_root(cache_dir, vae_digest=vae_digest, geometry=geometry)
    source, report = _index_paths(root, Path(folder))
    if not source.is_file():
        raise DataError(f"no latent cache for {folder} in {root}; expected {source.name}: build the cache first")
    record = json.loads(source.read_text(encoding="utf-8"))
    return LatentIndex(
        root=root,
        rows=tuple(LatentRow(**{**row, "actions": tuple(row.get("actions", ()))}) for row in record["rows"]),
        skipped=tuple(Skipped(**item) for item in record["skipped"]),
        report=report,
    )


class LatentReader:
    """Reads single latents from the shards; opens each shard once a process, also in data-loader workers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[str, Any] = {}

    def read(self, row: LatentRow) -> torch.Tensor:
        """latents_CTHW, float32."""
        if row.shard not in self._open:
            self._open[row.shard] = safe_open(self.root / row.shard, framework="pt")
        return self._open[row.shard].get_tensor(row.key)

    def read_conditions(self, row: LatentRow) -> dict[str, torch.Tensor]:
        """What else was encoded of the clip, by name."""
        self.read(row)  # opens the shard
        shard, mark = self._open[row.shard], f"{row.key}."
        names = shard.keys()
        return {name.removeprefix(mark): shard.get_tensor(name) for name in names if name.startswith(mark)}

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "_open": {}}


# ---------------------------------------------------------------------------------------------------------- encoding


def _encode_pending(
    root: Path, pending: list[Clip], geometry: Geometry, encode: Encode, batch_size: int, shard_clips: int
) -> tuple[dict[str, str], dict[str, str]]:
    """Encode and store; returns key -> shard of the new latents and key -> reason of the clips that did not decode."""
    stored: dict[str, str] = {}
    failed: dict[str, str] = {}
    latents: dict[str, torch.Tensor] = {}
    batch: dict[str, np.ndarray] = {}
    with Progress().phase("encoding the data set", len(pending), unit="clip") as bar:
        for position, clip in enumerate(pending, start=1):
            try:
                batch[clip.sha256] = read_clip(clip.row.path, geometry)
            except MediaError as error:
                failed[clip.sha256] = str(error)
            if len(batch) == batch_size or (batch and position == len(pending)):
                latents.update(_encode_batch(batch, encode))
                batch.clear()
            clips = sum("." not in name for name in latents)
            if clips >= shard_clips or (latents and position == len(pending)):
                shard = _write_shard(root, latents)
                stored.update(dict.fromkeys(latents, shard))
                latents.clear()
            bar.advance()
    return stored, failed


def _encode_batch(clips_THWC: Mapping[str, np.ndarray], encode: Encode) -> dict[str, torch.Tensor]:
    video_BTHWC = torch.from_numpy(np.stack(list(clips_THWC.values())))
    video_BCTHW = video_BTHWC.permute(0, 4, 1, 2, 3).to(torch.float32).div(127.5).sub(1.0).contiguous()
    with torch.no_grad():
        encoded = encode(video_BCTHW)
    tensors = {LATENTS: encoded} if isinstance(encoded, torch.Tensor) else encoded
    tensors = {name: tensor.to(device="cpu", dtype=torch.float32) for name, tensor in tensors.items()}
    latents_BCTHW = tensors.pop(LATENTS)
    if latents_BCTHW.ndim != 5 or len(latents_BCTHW) != len(clips_THWC):
        raise DataError(
            f"encode returned shape {tuple(latents_BCTHW.shape)} for {len(clips_THWC)} clips; expected "
            f"({len(clips_THWC)}, channels, frames, height, width)"
        )
    sound = [tensor.flatten(1).isfinite().all(dim=1) for tensor in (latents_BCTHW, *tensors.values())]
    finite = torch.stack(sound).all(dim=0).tolist()
    if not all(finite):
        raise DataError(
            f"encode returned NaN or Inf for {finite.count(False)} of {len(finite)} clips; "
            "check the VAE's weights, or encode in float32"
        )
    rows = {key: latents_CTHW.contiguous() for key, latents_CTHW in zip(clips_THWC, latents_BCTHW, strict=True)}
    for name, tensor in tensors.items():
        rows |= {f"{key}.{name}": row.contiguous() for key, row in zip(clips_THWC, tensor, strict=True)}
    return rows


# ------------------------------------------------------------------------------------------------------------ shards


def _write_shard(root: Path, latents: Mapping[str, torch.Tensor]) -> str:
    numbers = [int(path.stem.removeprefix("shard-")) for path in root.glob("shard-*.safetensors")]
    shard = root / f"shard-{max(numbers, default=-1) + 1:06d}.safetensors"
    payload = save(dict(latents))
    write_bytes_atomic(shard, payload)
    sidecar = {"sha256": hashlib.sha256(payload).hexdigest(), "keys": list(latents)}
    write_bytes_atomic(shard.with_suffix(".json"), json.dumps(sidecar).encode())
    return shard.name


def _verified_keys(root: Path) -> dict[str, str]:
    """key -> shard of every whole shard; damaged ones are named in a warning and removed, to be encoded again."""
    for leftover in [*root.glob(".*.tmp"), *_without_partner(root)]:
        leftover.unlink()  # a write that was cut short
    stored: dict[str, str] = {}
    damaged: list[str] = []
    for sidecar in sorted(root.glob("shard-*.json")):
        shard = sidecar.with_suffix(".safetensors")
        keys = _sound_keys(shard, sidecar)
        if keys is None:
            damaged.append(shard.name)
            shard.unlink()
            sidecar.unlink()
        else:
            stored.update(dict.fromkeys(keys, shard.name))
    if damaged:
        warnings.warn(
            f"latent cache {root}: {len(damaged)} corrupt shard(s), encoded again: {', '.join(damaged)}",
            DataWarning,
            stacklevel=3,
        )
    return stored


def _without_partner(root: Path) -> list[Path]:
    shards = {path.stem: path for path in root.glob("shard-*.safetensors")}
    sidecars = {path.stem: path for path in root.glob("shard-*.json")}
    return [(shards | sidecars)[stem] for stem in sorted(shards.keys() ^ sidecars.keys())]


def _sound_keys(shard: Path, sidecar: Path) -> list[str] | None:
    """The keys of a shard whose bytes match its sidecar; None when they do not or the sidecar cannot be read."""
    try:
        record = json.loads(sidecar.read_text(encoding="utf-8"))
        expected, keys = record["sha256"], record["keys"]
    except (ValueError, KeyError, TypeError):
        return None
    with shard.open("rb") as file:
        return keys if hashlib.file_digest(file, "sha256").hexdigest() == expected else None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; waits while another process holds it, and says so once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ------------------------------------------------------------------------------------------------------------- index


def _index_paths(root: Path, folder: Path) -> tuple[Path, Path]:
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return root / f"index-{name}.json", root / f"skipped-{name}.jsonl"


def _index_of(scan: FolderScan, root: Path, stored: Mapping[str, str], failed: Mapping[str, str]) -> LatentIndex:
    usable = [clip for clip in scan.clips if clip.sha256 not in failed]
    undecodable = [
        Skipped(line=clip.row.line, file_name=clip.row.file_name, reason=failed[clip.sha256])
        for clip in scan.clips
        if clip.sha256 in failed
    ]
    skipped = sorted([*scan.skipped, *undecodable], key=lambda item: item.line)
    if not usable:
        raise nothing_left(scan.folder, skipped)
    rows = tuple(
        LatentRow(
            index=position,
            file_name=clip.row.file_name,
            caption=clip.row.caption,
            key=clip.sha256,
            shard=stored[clip.sha256],
            actions=tuple(clip.row.actions),
        )
        for position, clip in enumerate(usable)
    )
    return LatentIndex(root=root, rows=rows, skipped=tuple(skipped), report=_index_paths(root, scan.folder)[1])


def _write_index(index: LatentIndex, folder: Path) -> None:
    path, report = _index_paths(index.root, folder)
    write_bytes_atomic(report, _json_lines(asdict(item) for item in index.skipped))
    record = {
        "folder": str(folder.resolve()),
        "rows": [asdict(row) for row in index.rows],
        "skipped": [asdict(item) for item in index.skipped],
    }
    write_bytes_atomic(path, json.dumps(record, ensure_ascii=False, indent=1).encode())


def _json_lines(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
