"""Pictures that become clips: one model makes a picture of a prompt, another a clip that starts from it.

Knows how the two fit together, on their cards alone and as a workflow. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError
from inference.artifact import Artifact
from inference.plain_request import plain_inputs, plain_task
from inference.request import Request
from inference.resolve import resolve
from inference.workflow import Ask, Workflow

IMAGE = "image"
"""Input of a card that starts from a first frame."""


@dataclass(frozen=True)
class Film:
    """What became of one prompt."""

    picture: Artifact
    clip: Artifact


def t2i_i2v(picture: Ask, clip: Ask) -> Workflow[Film]:
    """A picture, then the clip that starts from it; ``clip`` lacks its first frame."""
    (made,) = yield [picture]
    (shown,) = yield [replace(clip, request=replace(clip.request, inputs={IMAGE: first_frame(made)}))]
    return Film(made, shown)


def first_frame(artifact: Artifact) -> Tensor:
    """uint8 RGB (H, W, 3) of a clip's first frame, as a card that starts from a picture takes it."""
    return torch.from_numpy(artifact.frames_FHWC()[0].copy())


def film_requests(request: Request, images: ModelCard, videos: ModelCard) -> tuple[Request, Request]:
    """The requests for a picture and for a clip, which lacks its first frame, of one that describes the clip: prompts,
    seed, steps, guidance, solver and shift are of both. Raises ``UserError`` where the cards or values do not fit."""
    problems = pair_problems(images, videos)
    if problems:
        raise UserError("; ".join(problems))
    clip = resolve(replace(request, task=plain_task(videos), inputs=plain_inputs(videos)), videos)
    picture = replace(
        clip.request,
        task=plain_task(images),
        frames=1,
        height=clip.params.height,
        width=clip.params.width,
        inputs=None,
        output="video",
    )
    return resolve(picture, images).request, replace(clip.request, inputs=None)


def image_card(card: ModelCard, videos: ModelCard) -> ModelCard:
    """``card`` as it makes first frames for ``videos``: one frame of their size."""
    size = {"frames": 1, "height": videos.sampling.height, "width": videos.sampling.width}
    return card.model_copy(update={"sampling": card.sampling.model_copy(update=size)})


def pair_problems(images: ModelCard, videos: ModelCard) -> list[str]:
    """What keeps pictures of one card from becoming the other's clips, before weights load."""
    found = []
    brought = sorted(declared.name for declared in images.programs[plain_task(images)].inputs)
    if brought:
        found.append(
            f"card {images.name!r} takes {', '.join(brought)} with every request, expected one that makes a picture of "
            "a prompt alone"
        )
    taken = sorted(declared.name for declared in videos.programs[plain_task(videos)].inputs)
    if taken != [IMAGE]:
        takes = ", ".join(taken) if taken else "no first frame"
        found.append(f"card {videos.name!r} takes {takes}, expected a card that takes an {IMAGE}, such as wan21_i2v")
    if not found:
        try:
            resolve(Request(prompt="", task=plain_task(images)), image_card(images, videos))
        except UserError as error:
            s = videos.sampling
            found.append(
                f"card {images.name!r} cannot make the first frame of the {s.height}x{s.width} clips of card "
                f"{videos.name!r}: {error}"
            )
    return found
