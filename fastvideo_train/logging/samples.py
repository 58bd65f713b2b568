"""Sample clips of a run: ``samples/<phase>/000.mp4 ...`` and, beside them, ``samples.json`` that says what they are.

Knows files. Where the clips come from and what a verdict means is the caller's business. A small clip is enlarged by a
whole even factor, each pixel a block: every player shows it then, and H.264 keeps its colour edges; ``load_samples``
takes the blocks back to pixels.

Legend: F frames, H, W pixels, C = 3 (RGB), uint8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cards.errors import UserError
from inference.media import encode_video_bytes, read_video, write_bytes_atomic

INDEX_FILE = "samples.json"
LEAST_SIDE = 160  # pixels; a clip with a shorter side is enlarged to at least this


@dataclass(frozen=True)
class Sample:
    """One clip on disk."""

    path: Path
    prompt: str
    seed: int  # of the request's noise
    scale: int  # file pixels for one pixel of the clip
    verdict: dict[str, Any] = field(default_factory=dict)  # what the reward said; {} = not judged


def save_samples(
    run_dir: str | Path,
    phase: str,
    clips_FHWC: Sequence[np.ndarray],
    prompts: Sequence[str],
    seeds: Sequence[int],
    verdicts: Sequence[Mapping[str, Any]],
    fps: float,
) -> Path:
    """Write ``samples/<phase>``, replacing what an earlier call left there; returns the folder.

    Args:
        phase: ``before``, ``after`` or ``step-000040``.
        verdicts: one mapping a clip, each value a number, truth, text or None; ``{}`` for a clip that nobody judged.
        fps: frames a second.
    """
    sizes = (len(clips_FHWC), len(prompts), len(seeds), len(verdicts))
    if len(set(sizes)) != 1:
        raise ValueError(f"got {sizes[0]} clips, {sizes[1]} prompts, {sizes[2]} seeds, {sizes[3]} verdicts; one each")
    folder = Path(run_dir) / "samples" / phase
    entries: list[dict[str, Any]] = []
    for i, clip_FHWC in enumerate(clips_FHWC):
        scale, name = _scale(clip_FHWC), f"{i:03d}.mp4"
        write_bytes_atomic(folder / name, encode_video_bytes(np.asarray(clip_FHWC), fps, scale=scale))
        verdict = {key: _plain(value) for key, value in verdicts[i].items()}
        entries.append({"file": name, "prompt": prompts[i], "seed": int(seeds[i]), "scale": scale, "verdict": verdict})
    text = json.dumps({"phase": phase, "fps": fps, "samples": entries}, indent=1, allow_nan=False, ensure_ascii=False)
    write_bytes_atomic(folder / INDEX_FILE, (text + "\n").encode())
    listed = {entry["file"] for entry in entries}
    for stale in folder.glob("*.mp4"):
        if stale.name not in listed:
            stale.unlink()
    return folder


def read_samples(run_dir: str | Path, phase: str) -> list[Sample]:
    """What ``save_samples`` wrote for a phase, whose files still exist; a phase that was never saved has none."""
    index = Path(run_dir) / "samples" / phase / INDEX_FILE
    if not index.is_file():
        return []
    try:
        samples = [
            Sample(
                path=index.parent / entry["file"],
                prompt=entry["prompt"],
                seed=entry["seed"],
                scale=entry["scale"],
                verdict=entry["verdict"],
            )
            for entry in json.loads(index.read_text())["samples"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: not a samples file ({error!r}); delete the folder {index.parent}") from error
    return [sample for sample in samples if sample.path.is_file()]


def load_samples(run_dir: str | Path, phase: str) -> list[tuple[str, np.ndarray]]:
    """``(prompt, frames_FHWC)`` of a phase's clips, at the size they were generated in."""
    return [(s.prompt, read_video(s.path)[0][:, :: s.scale, :: s.scale]) for s in read_samples(run_dir, phase)]


def phases(run_dir: str | Path) -> list[str]:
    """Saved phases in the order of the run: before, step-..., after."""
    found = {index.parent.name for index in (Path(run_dir) / "samples").glob(f"*/{INDEX_FILE}")}
    order = {"before": 0, "after": 2}
    return sorted(found, key=lambda phase: (order.get(phase, 1), phase))


def _scale(clip_FHWC: np.ndarray) -> int:
    """1, or the least even factor that brings the shorter side to ``LEAST_SIDE``."""
    side = min(clip_FHWC.shape[1:3])
    return 1 if side >= LEAST_SIDE else 2 * math.ceil(LEAST_SIDE / side / 2)


def _plain(value: Any) -> Any:
    """A verdict's value as JSON has it; NaN is None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    number = float(value)
    return number if math.isfinite(number) else None
