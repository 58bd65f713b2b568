"""A folder of videos with captions: ``metadata.jsonl`` in the Hugging Face videofolder convention.

Knows the folder's rules and how a file becomes a clip of fixed geometry. Knows nothing about models, caches or batches:
the VAE's compression factors come from the caller. Source of the convention:
https://huggingface.co/docs/datasets/video_load#videofolder

Shape legend: T frames, H height in pixels, W width in pixels, C = 3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cards.errors import UserError
from inference.media import READABLE_SUFFIXES, MediaError, probe_video, read_video

METADATA = "metadata.jsonl"
_CAPTION_KEYS = ("caption", "text")
_SHOWN = 20  # problems listed in one message


class DataError(UserError):
    """A data set that cannot be used as it is."""


@dataclass(frozen=True)
class Geometry:
    """The size every clip is brought to."""

    num_frames: int  # frames; of the form temporal_factor * k + 1
    height: int  # pixels; a multiple of the VAE's spatial factor
    width: int  # pixels; likewise

    def check(self, *, temporal_factor: int, spatial_factor: int) -> None:
        """Raise ``DataError`` unless a VAE with these compression factors can encode this geometry."""
        problems = []
        frames = self.num_frames
        if frames < 1 or (frames - 1) % temporal_factor:
            below = max(0, (frames - 1) // temporal_factor) * temporal_factor + 1
            problems.append(
                f"num_frames: got {frames}, expected {temporal_factor}k+1 (the VAE compresses time by "
                f"{temporal_factor}); use {below} or {below + temporal_factor}"
            )
        for name, pixels in (("height", self.height), ("width", self.width)):
            if pixels < 1 or pixels % spatial_factor:
                below = max(spatial_factor, pixels // spatial_factor * spatial_factor)
                problems.append(f"{name}: got {pixels} pixels, expected a multiple of {spatial_factor}; use {below}")
        if problems:
            raise DataError("\n".join(problems))


@dataclass(frozen=True)
class Row:
    """One valid line of metadata.jsonl."""

    line: int  # 1-based line number
    file_name: str  # relative to the folder, as written in the file
    path: Path  # where the video is
    caption: str  # not empty
    actions: tuple[str, ...] = ()  # one a chunk of the whole video, for a card with actions; () where it names none


@dataclass(frozen=True)
class Clip:
    """A row whose file is whole and long enough."""

    row: Row
    sha256: str  # of the file's bytes: the identity of the clip wherever it lies


@dataclass(frozen=True)
class Skipped:
    """A row that is left out, and why."""

    line: int  # of metadata.jsonl
    file_name: str  # as written there
    reason: str  # one sentence


@dataclass(frozen=True)
class FolderScan:
    """What a folder holds for one geometry."""

    folder: Path
    clips: tuple[Clip, ...]  # in the order of metadata.jsonl; never empty
    skipped: tuple[Skipped, ...]


def read_metadata(folder: str | Path) -> list[Row]:
    """The rows of ``folder/metadata.jsonl``: ``{"file_name": ..., "caption" | "text": ...}``, blank lines allowed.

    Raises:
        DataError: no folder, no metadata, bad JSON, a row without caption or with a missing file, or no rows at all;
            all problems in one message, each with file and line number.
    """
    folder = Path(folder)
    source = folder / METADATA
    if not source.is_file():
        missing = "has no metadata.jsonl" if folder.is_dir() else "does not exist"
        raise DataError(
            f"data folder {folder} {missing}; expected a folder of videos with a {METADATA} of lines like "
            '{"file_name": "0001.mp4", "caption": "a red circle moves left"}'
        )
    rows: list[Row] = []
    problems: list[str] = []
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 text ({error}); save it as UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse(folder, number, line))
        except ValueError as error:
            problems.append(f"{source}:{number}: {error}")
    if problems:
        raise DataError(summary(f"{source}: {len(problems)} bad row(s); nothing was read", problems))
    if not rows:
        raise DataError(f"{source}: holds no rows; expected at least one video with a caption")
    return rows


def _parse(folder: Path, number: int, line: str) -> Row:
    """One row; a ``ValueError`` says what is wrong with it."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"got a JSON {type(record).__name__}, expected an object with file_name and caption")
    file_name = record.get("file_name")
    if not isinstance(file_name, str) or not file_name:
        raise ValueError(f"no file_name; the row has the keys: {', '.join(sorted(record)) or '(none)'}")
    caption = next((record[key] for key in _CAPTION_KEYS if key in record), None)
    if not isinstance(caption, str) or not caption.strip():
        raise ValueError(f"{file_name}: no caption; expected a text under one of: {', '.join(_CAPTION_KEYS)}")
    path = folder / file_name
    if not path.is_file():
        raise ValueError(f"{file_name}: no such file in {folder}")
    if path.suffix.lower() not in READABLE_SUFFIXES:
        raise ValueError(f"{file_name}: unknown suffix; expected one of: {', '.join(READABLE_SUFFIXES)}")
    actions = record.get("actions", [])
    if not isinstance(actions, list) or not all(isinstance(name, str) for name in actions):
        raise ValueError(f"{file_name}: got actions {actions!r}, expected a list of names, one a chunk")
    return Row(line=number, file_name=file_name, path=path, caption=caption.strip(), actions=tuple(actions))


def scan_folder(folder: str | Path, geometry: Geometry) -> FolderScan:
    """Check every file without decoding it: whole, a video, and at least ``num_frames`` long; hash its bytes.

    Files that fail are left out and listed. Damage that only decoding shows is found later, by ``read_clip``.

    Raises:
        DataError: see ``read_metadata``; also when nothing is left.
    """
    clips: list[Clip] = []
    skipped: list[Skipped] = []
    for row in read_metadata(folder):
        try:
            _check_length(row.path, probe_video(row.path).frames, geometry)
        except MediaError as error:
            skipped.append(Skipped(line=row.line, file_name=row.file_name, reason=str(error)))
            continue
        with row.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        clips.append(Clip(row=row, sha256=digest))
    if not clips:
        raise nothing_left(folder, skipped)
    return FolderScan(folder=Path(folder), clips=tuple(clips), skipped=tuple(skipped))


def nothing_left(folder: str | Path, skipped: Iterable[Skipped]) -> DataError:
    """The error for a folder of which every file was left out."""
    return DataError(summary(f"{folder}: no usable video is left; every file was skipped", describe(skipped)))


def describe(skipped: Iterable[Skipped]) -> list[str]:
    """One line a file left out."""
    return [f"{METADATA}:{item.line}: {item.reason}" for item in skipped]


def summary(title: str, lines: list[str]) -> str:
    """A title and at most 20 indented lines, with the number of those not shown."""
    shown = [f"  {line}" for line in lines[:_SHOWN]]
    if len(lines) > _SHOWN:
        shown.append(f"  ... and {len(lines) - _SHOWN} more")
    return "\n".join([f"{title}:", *shown])


def read_clip(path: Path, geometry: Geometry) -> np.ndarray:
    """The first ``num_frames`` frames, scaled to cover height x width and cut to its centre: uint8 THWC.

    A longer video loses its tail; a shorter one is an error, never padded.

    Raises:
        MediaError: unreadable, damaged or too short.
    """
    frames_THWC, _ = read_video(path, max_frames=geometry.num_frames)
    _check_length(path, len(frames_THWC), geometry)
    return resize_and_crop(frames_THWC, geometry.height, geometry.width)


def _check_length(path: Path, frames: int, geometry: Geometry) -> None:
    if frames < geometry.num_frames:
        raise MediaError(f"{path}: too short: got {frames} frames, expected at least {geometry.num_frames}")


def resize_and_crop(frames_THWC: np.ndarray, height: int, width: int) -> np.ndarray:
    """Keep the aspect ratio: scale (bicubic, antialiased) until both sides cover the target, then cut the centre."""
    _, old_height, old_width, _ = frames_THWC.shape
    if (old_height, old_width) == (height, width):
        return frames_THWC
    factor = max(height / old_height, width / old_width)
    inner_height, inner_width = height / factor, width / factor  # the centre part that is kept, in source pixels
    top, left = (old_height - inner_height) / 2, (old_width - inner_width) / 2
    box = (left, top, left + inner_width, top + inner_height)
    resized = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC, box=box))
        for frame in frames_THWC
    ]
    return np.stack(resized)
