"""ShapeWorld as a data set on disk: real mp4 files and a metadata.jsonl, as a user's own folder would be.

Knows how to write the folder, whole or not at all. Leaves scenes, captions and pixels to ``methods.shapeworld``.

    python -m fastvideo_train.data.shapeworld_folder out=data/shapeworld n=512 seed=0
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cards.errors import UserError, unknown_name
from fastvideo_train.callbacks.progress import Progress
from fastvideo_train.data.latent_cache import locked
from fastvideo_train.data.video_folder import METADATA
from inference.media import write_video
from methods.shapeworld.heldout import training_caption, training_scene
from methods.shapeworld.render import render

FPS = 8.0  # frames a second


Draw = Callable[[np.random.Generator], tuple[np.ndarray, dict[str, Any]]]
"""A clip, uint8 (F, H, W, 3), and what its row of the metadata says."""


def plain_clip(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    """A clip of ShapeWorld and its caption."""
    scene = training_scene(rng)
    caption = training_caption(rng, scene)
    return render(scene, rng), {"caption": caption}


def write_shapeworld(folder: str | Path, n: int, seed: int, draw: Draw = plain_clip) -> Path:
    """Write ``n`` training clips and their captions; the same seed gives the same frames and metadata, byte for byte.

    The folder appears when it is complete. Clips are coded without loss of colour (see ``inference.media``).

    Raises:
        UserError: ``n`` < 1, or the folder exists.
    """
    folder = Path(folder)
    if n < 1:
        raise UserError(f"n: got {n} clips, expected at least 1")
    if folder.exists():
        raise UserError(f"{folder} exists already; name another folder or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial"))
    try:
        _write_clips(partial, n, seed, draw)
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def ensure_shapeworld(folder: str | Path, n: int, seed: int, draw: Draw = plain_clip) -> Path:
    """``write_shapeworld`` unless the folder is there; several processes may ask at once, one writes."""
    folder = Path(folder)
    with locked(folder.parent / f".{folder.name}.lock"):
        if not folder.exists():
            write_shapeworld(folder, n, seed, draw)
    return folder


def _write_clips(folder: Path, n: int, seed: int, draw: Draw) -> None:
    (folder / "videos").mkdir()
    digits = max(4, len(str(n - 1)))
    rows: list[str] = []
    with Progress().phase("writing ShapeWorld", n, unit="clip") as bar:
        for index in range(n):
            rng = np.random.default_rng([seed, index])
            name = f"videos/{index:0{digits}d}.mp4"
            clip_FHWC, row = draw(rng)
            rows.append(json.dumps({"file_name": name, **row}))
            write_video(folder / name, clip_FHWC, FPS, lossless_chroma=True)
            bar.advance()
    (folder / METADATA).write_text("\n".join(rows) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """``out=<folder> [n=512] [seed=0]``; a mistake is one message and exit code 2."""
    try:
        settings = _settings(arguments)
        folder = write_shapeworld(str(settings["out"]), int(settings["n"]), int(settings["seed"]))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{settings['n']} clips in {folder}")
    return 0


def _settings(arguments: list[str]) -> dict[str, str | int]:
    settings: dict[str, str | int] = {"n": 512, "seed": 0}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or not value:
            raise UserError(f"argument {argument!r}: expected name=value, for example out=data/shapeworld")
        if name not in ("out", "n", "seed"):
            raise unknown_name("argument", name, ("out", "n", "seed"))
        if name != "out" and not value.isdecimal():
            raise UserError(f"{name}: got {value!r}, expected a whole number of at least 0")
        settings[name] = value if name == "out" else int(value)
    if "out" not in settings:
        raise UserError("out=<folder> is missing; for example: out=data/shapeworld n=512 seed=0")
    return settings


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
