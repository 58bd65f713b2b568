"""Workflows: chains, fan-outs and nested ones on one engine, interleaved like any requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.errors import UserError
from inference.artifact import Artifact
from inference.engine import Engine
from inference.extend.observer import Forward, Observer
from inference.image_video import first_frame
from inference.instance import ModelInstance
from inference.parity.interleave import artifact_difference
from inference.plain_request import plain_task
from inference.request import Request
from inference.workflow import Ask, Workflow, chain
from tests.support.tiny_i2v import write_i2v_folder

PROMPTS = ("a red circle", "the blue square moves left", "a green triangle", "the red square")
PICTURE = Request(prompt="", frames=1, height=16, width=16, guidance=1.0)
CLIP = Request(prompt="", frames=5, height=16, width=16, guidance=1.0)


@pytest.fixture(scope="module")
def images(wan_folder: Path) -> ModelInstance:
    return Engine().load(wan_folder)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    return Engine().load(write_i2v_folder(tmp_path_factory.mktemp("i2v")))


def picture_of(n: int, **changes: Any) -> Request:
    return replace(PICTURE, prompt=PROMPTS[n], **{"seed": n, "steps": 2 + n, **changes})


def clip_of(n: int, picture: Artifact, videos: ModelInstance, **changes: Any) -> Request:
    inputs = {"image": first_frame(picture)}
    asked = replace(CLIP, prompt=PROMPTS[n], seed=10 + n, task=plain_task(videos.card), inputs=inputs)
    return replace(asked, **{"steps": 5 - n, **changes})


def film(n: int, images: ModelInstance, videos: ModelInstance, **changes: Any) -> Workflow[list[Artifact]]:
    return chain(
        lambda made: Ask(picture_of(n), images),
        lambda made: Ask(clip_of(n, made[0], videos, **changes), videos),
    )


def films(images: ModelInstance, videos: ModelInstance) -> list[Workflow[list[Artifact]]]:
    return [film(n, images, videos) for n in range(len(PROMPTS))]


def furthest(ours: Sequence[Sequence[Artifact]], theirs: Sequence[Sequence[Artifact]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return max(artifact_difference(a, b) for a, b in pairs)


class Watch(Observer):
    """Keeps the rows of every forward of a denoiser."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def on_forward(self, forward: Forward) -> None:
        if forward.method == "velocity":
            self.rows.append(forward.rows)


def test_chains_interleaved_are_chains_in_turn_to_the_bit(images: ModelInstance, videos: ModelInstance) -> None:
    """Of different lengths, so that some are at their second request while others are at their first; and what they
    give is what the two requests give by themselves."""
    together = Engine().run_workflows(films(images, videos))
    assert furthest(together, Engine().run_workflows(films(images, videos), serial=True)) == 0.0
    by_hand = []
    for n in range(len(PROMPTS)):
        picture = Engine().run(picture_of(n), images)
        by_hand.append([picture, Engine().run(clip_of(n, picture, videos), videos)])
    assert furthest(together, by_hand) == 0.0
    assert [made[1].latents.shape[1] for made in together] == [2] * len(PROMPTS)
    assert not torch.equal(together[0][1].latents, together[1][1].latents)


def test_steps_of_different_workflows_share_forwards(images: ModelInstance, videos: ModelInstance) -> None:
    watch = Watch()
    batched = Engine(batching="shape", observers=[watch]).run_workflows(films(images, videos))
    assert max(watch.rows) == len(PROMPTS)
    alone = Engine().run_workflows(films(images, videos))
    assert (
        max(torch.max((a[1].latents - b[1].latents).abs()).item() for a, b in zip(batched, alone, strict=True)) < 1e-3
    )


def brightest(n: int, images: ModelInstance) -> Workflow[Artifact]:
    """The best of three by a rule."""
    made = yield [Ask(picture_of(n, seed=seed), images) for seed in range(3)]
    return max(made, key=lambda artifact: artifact.frames_FHWC().sum())


def test_a_fan_out_inside_a_chain(images: ModelInstance, videos: ModelInstance) -> None:
    def run(n: int) -> Workflow[Artifact]:
        picture = yield from brightest(n, images)
        (clip,) = yield [Ask(clip_of(n, picture, videos), videos)]
        return clip

    (clip, other) = Engine().run_workflows([run(0), run(1)])
    made = Engine().run_serial([picture_of(0, seed=seed) for seed in range(3)], images)
    best = max(made, key=lambda artifact: artifact.frames_FHWC().sum())
    assert artifact_difference(clip, Engine().run(clip_of(0, best, videos), videos)) == 0.0
    assert artifact_difference(clip, other) > 0


def test_what_fails_is_told_where_it_was_asked_and_takes_no_other_along(
    images: ModelInstance, videos: ModelInstance
) -> None:
    done: list[int] = []

    def forgiving(n: int) -> Workflow[list[Artifact]]:
        """Asks for what no model can make, then for less."""
        try:
            yield [Ask(picture_of(n, steps=0), images)]
        except UserError as error:
            assert "steps" in str(error)
        made = yield [Ask(picture_of(n), images)]
        done.append(n)
        return made

    engine = Engine()
    ((picture,),) = engine.run_workflows([forgiving(2)])
    assert artifact_difference(picture, Engine().run(picture_of(2), images)) == 0.0
    with pytest.raises(UserError, match="height"):
        engine.run_workflows([film(0, images, videos, height=15), forgiving(1)])
    assert done == [2, 1]
    assert engine.in_flight() == []


def test_a_workflow_that_asks_nothing_has_its_result(images: ModelInstance) -> None:
    def nothing() -> Workflow[str]:
        if False:
            yield []
        return "said"

    assert Engine().run_workflows([nothing(), nothing()]) == ["said", "said"]
    assert Engine().run_workflows([]) == []
