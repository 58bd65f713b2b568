"""Image to video against ``diffusers.WanImageToVideoPipeline`` on the same weights: latents to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from cards.errors import UserError
from cards.registry import family
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.behaviour import behaviour_gate
from inference.plain_request import plain_inputs, plain_task
from inference.request import Request
from tests.support.tiny_i2v import picture, write_i2v_folder

SCHEDULERS = {"unipc": "UniPCMultistepScheduler", "euler": "FlowMatchEulerDiscreteScheduler"}


class Pair:
    """The library's pipeline and our instance, from the same files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.pipeline = WanImageToVideoPipeline.from_pretrained(folder, dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.card = card_of(folder)
        self.instance: ModelInstance = Engine().load(self.card)

    def theirs(self, request: Request, **options: Any) -> Tensor:
        assert request.inputs is not None and request.seed is not None
        return self.pipeline(
            image=Image.fromarray(request.inputs["image"].numpy()),
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            height=request.height,
            width=request.width,
            num_frames=request.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            **options,
        ).frames[0]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    yield {
        name: Pair(write_i2v_folder(tmp_path_factory.mktemp(name), scheduler=scheduler, seed=i))
        for i, (name, scheduler) in enumerate(SCHEDULERS.items())
    }


def ask(**changes: Any) -> Request:
    settings: dict[str, Any] = {
        "prompt": "a red circle  moves &amp; left",
        "negative_prompt": "blue square",
        "task": "i2v",
        "seed": 7,
        "steps": 4,
        "guidance": 5.0,
        "frames": 5,
        "height": 16,
        "width": 32,
        "inputs": {"image": picture(40, 56)},
        "output": "latents",
    }
    return Request(**(settings | changes))


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("solver", list(SCHEDULERS))
def test_latents_are_the_librarys_to_the_bit(pairs: dict[str, Pair], solver: str, guidance: float) -> None:
    """A picture of another size than the clip's, which both sides resize."""
    pair = pairs[solver]
    assert pair.card.loops["denoise"].solver == solver
    request = ask(guidance=guidance)
    assert torch.equal(Engine().run(request, pair.instance).latents, pair.theirs(request, output_type="latent"))


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 16, 16), (9, 32, 16)])
def test_other_sizes_and_frames_too(pairs: dict[str, Pair], frames: int, height: int, width: int) -> None:
    pair = pairs["unipc"]
    request = ask(
        frames=frames, height=height, width=width, inputs={"image": picture(height, width, 3)}, output="video"
    )
    ours = Engine().run(request, pair.instance)
    assert torch.equal(ours.latents, pair.theirs(request, output_type="latent"))
    assert ours.video is not None
    pixels = (ours.video * 0.5 + 0.5).clamp(0, 1).permute(1, 0, 2, 3)
    assert (pixels - pair.theirs(request, output_type="pt")).abs().max() <= 1e-4


def test_batched_guidance_is_close_and_the_picture_matters(pairs: dict[str, Pair]) -> None:
    pair = pairs["unipc"]
    latents = Engine().run(ask(), pair.instance).latents
    batched = Engine().run(ask(guidance_policy="batched"), pair.instance).latents
    assert 0 <= (batched - latents).abs().max() <= 1e-4
    other = Engine().run(ask(inputs={"image": picture(40, 56, 1)}), pair.instance).latents
    assert not torch.equal(other, latents)


def test_interleaved_requests_equal_serial_ones(pairs: dict[str, Pair]) -> None:
    instance = pairs["unipc"].instance
    requests = [ask(seed=i, guidance=(1.0, 5.0)[i % 2], inputs={"image": picture(40, 56, i // 2)}) for i in range(4)]
    serial = [Engine(cache_bytes=0).run(request, instance).latents for request in requests]
    together = Engine().run_interleaved(requests, instance)
    assert all(torch.equal(a, b.latents) for a, b in zip(serial, together, strict=True))


def test_training_evaluates_what_the_rollout_did(pairs: dict[str, Pair]) -> None:
    instance = pairs["unipc"].instance
    report = behaviour_gate(instance, prompt="a red circle", seed=1, steps=3, solver="euler")
    assert report.passed and report.difference == 0.0


def test_a_request_without_a_picture_or_with_a_wrong_one_is_refused(pairs: dict[str, Pair]) -> None:
    instance = pairs["unipc"].instance
    for inputs, message in (
        (None, r"inputs\['image'\]: got nothing, expected uint8 \(height, width, 3\)"),
        ({"image": picture(8, 8).float()}, "got float32"),
        ({"picture": picture(8, 8)}, "unknown input 'picture'"),
    ):
        with pytest.raises(UserError, match=message):
            Engine().run(ask(inputs=inputs), instance)


def test_plain_requests_bring_what_the_program_declares(pairs: dict[str, Pair]) -> None:
    card = pairs["unipc"].card
    inputs = plain_inputs(card)
    assert plain_task(card) == "i2v" and inputs is not None
    assert inputs["image"].shape == (card.sampling.height, card.sampling.width, 3)
    wan21 = family("wan21").card("tiny")
    assert plain_task(wan21) == "t2v" and plain_inputs(wan21) is None


def test_no_weights_are_bundled_and_other_folders_are_refused(make_wan_folder: Any, pairs: dict[str, Pair]) -> None:
    with pytest.raises(UserError, match=r"no bundled weights: give card\.source"):
        family("wan21_i2v").card("tiny")
    with pytest.raises(UserError, match="got a WanPipeline folder, expected WanImageToVideoPipeline"):
        family("wan21_i2v").card("14b", str(make_wan_folder()))
    published = family("wan21_i2v").card("14b")
    published.validate()
    assert published.components["transformer"].config["in_channels"] == 36
    pairs["unipc"].card.validate()
