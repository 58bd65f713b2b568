"""One video without a server: ``python -m fastvideo_train.generate ckpt=... prompt="..." out=x.mp4``.

Everything that can be wrong with the command is found before a weight loads. Knows the engine and the files that it
writes; knows no training method.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from cards.errors import UserError
from fastvideo_train.cli import EXIT_OK, Int64, Options, check_place, parse_options, pick_device, run_program, usage

if TYPE_CHECKING:
    from torch import Tensor

    from inference.artifact import Artifact
    from inference.engine import Engine
    from inference.instance import ModelInstance
    from inference.request import Request
    from inference.running import StepListener

LATENTS_SUFFIX = ".safetensors"
LATENTS_KEY = "latents"
SUFFIXES = (".mp4", ".webm", ".gif", ".png", LATENTS_SUFFIX)


class GenerateOptions(Options):
    """Options left out take the card's defaults."""

    prompt: str = Field(description="what to show")
    out: str = Field(
        description="file to write, by suffix: mp4, webm, gif, png (frames side by side), safetensors (latents)"
    )
    ckpt: str = Field("wan21", description="export, run folder, plain diffusers folder or card name")
    negative_prompt: str | None = Field(None, description="what to avoid, when guidance > 1")
    seed: Int64 | None = Field(None, description="of the noise; left out: a fresh random one, printed")
    steps: Int64 | None = Field(None, description="solver steps")
    guidance: float | None = Field(None, description="classifier-free guidance, 1 = conditional only")
    image: str | None = Field(None, description="picture to start from, for a card that takes one")
    then: str | None = Field(None, description="card, as for ckpt, that makes the video of a picture that ckpt makes")
    frames: Int64 | None = Field(None, description="length in frames")
    height: Int64 | None = Field(None, description="in pixels")
    width: Int64 | None = Field(None, description="in pixels")
    solver: str | None = Field(None, description="unipc, euler or dpm2")
    guidance_policy: str | None = Field(None, description="sequential (equal to diffusers bit for bit) or batched")
    shift: float | None = Field(None, description="flow shift")
    refine: bool | None = Field(None, description="false gives a card that rewrites prompts this one as it is")
    temperature: float | None = Field(None, description="of the rewriting; 0 takes the most likely words")
    max_tokens: Int64 | None = Field(None, description="length of the rewritten prompt, at most")
    fps: float | None = Field(None, gt=0, le=240, allow_inf_nan=False, description="frames a second of the file")
    scale: int = Field(1, ge=1, le=64, description="enlarge each pixel by this whole factor, nearest neighbour")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:<index>")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after one message for a mistake in the command."""
    return run_program(_generate, _usage, argv)


def _usage() -> str:
    return usage(
        GenerateOptions,
        "python -m fastvideo_train.generate",
        "Generate one video.",
        'python -m fastvideo_train.generate ckpt=outputs/demo/export prompt="a red circle moves left" seed=1 out=x.mp4',
    )


def _generate(argv: Sequence[str]) -> int:
    options = parse_options(GenerateOptions, argv)
    out = check_out(options.out)

    from inference.engine import Engine  # loads torch: after the checks that need none
    from inference.image_video import film_requests
    from inference.load import card_of
    from inference.plain_request import plain_task
    from inference.request import Request
    from inference.resolve import resolve

    if options.then is not None and options.image is not None:
        raise UserError(f"image: got {options.image!r} beside then, whose picture ckpt makes; leave one of them out")
    card = card_of(options.ckpt)
    videos = card if options.then is None else card_of(options.then)
    request = Request(
        prompt=options.prompt,
        task=plain_task(videos),
        inputs=None if options.image is None else {"image": read_picture(options.image)},
        negative_prompt=options.negative_prompt,
        seed=options.seed,
        frames=options.frames,
        height=options.height,
        width=options.width,
        steps=options.steps,
        guidance=options.guidance,
        guidance_policy=options.guidance_policy,
        solver=options.solver,
        shift=options.shift,
        refine=options.refine,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        output="latents" if out.suffix.lower() == LATENTS_SUFFIX else "video",
    )
    chained = options.then is not None
    requests = film_requests(request, card, videos) if chained else (resolve(request, card).request,)
    engine = Engine(pick_device(options.device))
    started = time.monotonic()
    instances = [engine.load(each) for each in ((card, videos) if chained else (card,))]
    loaded = time.monotonic()
    with _progress() as listener:
        artifact = _made(engine, requests, instances, listener)
    done = time.monotonic()
    what = _write(out, artifact, fps=artifact.fps if options.fps is None else options.fps, scale=options.scale)
    if artifact.refined is not None:
        print(f"refined prompt: {artifact.refined}")
    print(
        f"wrote {out}: {what}, seed {artifact.provenance.params.seed}, "
        f"{done - loaded:.1f} s ({loaded - started:.1f} s to load "
        f"{' and '.join(instance.card.name for instance in instances)})"
    )
    return EXIT_OK


def _made(
    engine: Engine, requests: Sequence[Request], instances: Sequence[ModelInstance], listener: StepListener
) -> Artifact:
    """The clip: of one request, or of a picture and the clip that starts from it."""
    from inference.image_video import t2i_i2v
    from inference.workflow import Ask

    if len(requests) == 2:
        picture, clip = (Ask(request, instance) for request, instance in zip(requests, instances, strict=True))
        (film,) = engine.run_workflows([t2i_i2v(picture, clip)], listener)
        return film.clip
    handle = engine.submit(requests[0], listener=listener)
    while engine.tick():
        pass
    return handle.result()


def check_out(out: str) -> Path:
    """The target's path; raises ``UserError`` for a suffix that is not known or a place that cannot be written."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"out: got {out!r}, expected a file name that ends in one of: {', '.join(SUFFIXES)}")
    return check_place(out)


def read_picture(place: str) -> Tensor:
    """uint8 RGB (H, W, 3); raises ``UserError`` for a file that is no picture."""
    import numpy as np
    import torch
    from PIL import Image

    path = Path(place).expanduser()
    try:
        with Image.open(path) as picture:
            return torch.from_numpy(np.array(picture.convert("RGB")))
    except OSError as error:
        raise UserError(f"image: cannot read {place!r} ({error}); give a picture, such as a png or jpg") from None


def _write(out: Path, artifact: Artifact, *, fps: float, scale: int) -> str:
    """Writes the file, all or nothing; says what is in it. Missing parent folders are made."""
    from inference.media import write_bytes_atomic, write_video

    if out.suffix.lower() == LATENTS_SUFFIX:
        from safetensors.torch import save

        latents_1CTHW = artifact.latents.detach().float().cpu().unsqueeze(0).contiguous()
        provenance = artifact.provenance
        metadata = {
            "card_digest": provenance.card_digest,
            "prompt": provenance.prompt,
            "negative_prompt": provenance.negative_prompt,
            "seed": str(provenance.params.seed),
            **({} if artifact.refined is None else {"refined_prompt": artifact.refined}),
        }
        write_bytes_atomic(out, save({LATENTS_KEY: latents_1CTHW}, metadata=metadata))
        return f"latents {list(latents_1CTHW.shape)}"
    frames_FHWC = artifact.frames_FHWC().repeat(scale, axis=1).repeat(scale, axis=2)
    write_video(out, frames_FHWC, fps)
    count, height, width, _ = frames_FHWC.shape
    return f"{count} frames of {width}x{height} at {fps:g} fps"


@contextmanager
def _progress() -> Iterator[StepListener]:
    """A bar on stderr with rate and time left; nothing when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("start", total=None, rate="")
        started = time.monotonic()

        def listener(label: str, done: int, total: int) -> None:
            rate = f"{done / (time.monotonic() - started):.1f} steps/s"
            bar.update(task, description=label, completed=done, total=total, rate=rate)

        yield listener


if __name__ == "__main__":
    sys.exit(main())
