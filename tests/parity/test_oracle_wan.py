"""Engine against ``diffusers.WanPipeline`` on the same weights: latents to the bit, frames within 1e-4.

Random folders of several shapes and flow shifts, and the bundled model, which must be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

from cards.card import ModelCard
from cards.source import BUNDLED
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request

FOLDERS: dict[str, dict[str, Any]] = {
    "unipc-shift3": {},
    "euler-shift5": {
        "heads": 3,
        "head_dim": 12,
        "z_dim": 8,
        "flow_shift": 5.0,
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "seed": 1,
    },
    "unipc-shift1": {"heads": 1, "head_dim": 32, "layers": 1, "z_dim": 3, "flow_shift": 1.0, "seed": 2},
    "euler-shift8": {
        "heads": 4,
        "head_dim": 24,
        "flow_shift": 8.0,
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "seed": 3,
    },
}
BUNDLED_CARD = "wan21"
SIZES = ((5, 16, 32), (9, 32, 16), (1, 16, 16))
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@dataclass
class Pair:
    """The two sides: the library's pipeline and our instance, from the same files."""

    pipeline: WanPipeline
    instance: ModelInstance
    shift: float


@pytest.fixture(scope="module")
def pair_of(make_wan_folder: Callable[..., Path]) -> Iterator[Callable[[str], Pair]]:
    pairs: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in pairs:
            if name == BUNDLED_CARD:
                folder, card = BUNDLED / "wan21" / "weights" / "tiny", card_of(BUNDLED_CARD)
            else:
                folder = make_wan_folder(**FOLDERS[name])
                card = card_of(folder)
            pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
            pipeline.set_progress_bar_config(disable=True)
            pairs[name] = Pair(pipeline, Engine().load(card), card.loops["denoise"].schedule.shift)
        return pairs[name]

    yield get
    pairs.clear()


def theirs(pipeline: WanPipeline, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """Final latents (C, T, H, W) and frames (F, 3, H, W) in [0, 1] of the library's own call."""
    last: list[torch.Tensor] = []

    def keep(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last[:] = [tensors["latents"]]
        return {}

    assert request.seed is not None
    frames = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        num_frames=request.frames,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="pt",
        callback_on_step_end=keep,
    ).frames[0]
    return last[0][0], frames


def scheduler(name: str, shift: float) -> Any:
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift)
    return UniPCMultistepScheduler(flow_shift=shift, **FLOW)


def frames_of(video_CFHW: torch.Tensor) -> torch.Tensor:
    """(F, 3, H, W) in [0, 1]."""
    return (video_CFHW * 0.5 + 0.5).clamp(0, 1).permute(1, 0, 2, 3)


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("name", [*FOLDERS, BUNDLED_CARD])
def test_a_folder_samples_as_its_own_pipeline(pair_of: Callable[[str], Pair], name: str, guidance: float) -> None:
    """With the scheduler that the folder stores, whatever it is."""
    pair = pair_of(name)
    frames, height, width = SIZES[0] if name == BUNDLED_CARD else SIZES[(list(FOLDERS).index(name)) % len(SIZES)]
    request = Request(
        prompt="a red circle  moves &amp; left",
        negative_prompt="blue square" if guidance > 1 else None,
        seed=7,
        steps=4,
        guidance=guidance,
        frames=frames,
        height=height,
        width=width,
    )
    latents, pixels = theirs(pair.pipeline, request)
    ours = Engine().run(request, pair.instance)
    assert torch.equal(ours.latents, latents)
    assert ours.video is not None
    difference = (frames_of(ours.video) - pixels).abs().max().item()
    print(f"{name}, guidance {guidance}: frames differ by {difference:.1e}")
    assert difference <= 1e-4


@pytest.mark.parametrize("solver", ["unipc", "euler"])
@pytest.mark.parametrize("name", ["unipc-shift3", "euler-shift5", BUNDLED_CARD])
def test_every_solver_samples_as_the_pipeline_with_that_scheduler(
    pair_of: Callable[[str], Pair], name: str, solver: str
) -> None:
    """Guided; sequential to the bit, batched within 1e-4."""
    pair = pair_of(name)
    request = Request(
        prompt="two blue squares",
        negative_prompt="",
        seed=8,
        steps=5,
        guidance=5.0,
        frames=5,
        height=16,
        width=16,
        solver=solver,
    )
    own = pair.pipeline.scheduler
    options = (
        {"scheduler": own}
        if pair.instance.card.loops["denoise"].solver == solver
        else {"scheduler": scheduler(solver, pair.shift)}
    )
    pipeline = WanPipeline(**{**pair.pipeline.components, **options})
    pipeline.set_progress_bar_config(disable=True)
    latents, _ = theirs(pipeline, request)
    assert torch.equal(Engine().run(request, pair.instance).latents, latents)
    batched = Engine().run(Request(**{**request.__dict__, "guidance_policy": "batched"}), pair.instance).latents
    difference = (batched - latents).abs().max().item()
    print(f"{name}, {solver}: batched guidance differs by {difference:.1e}")
    assert difference <= 1e-4


def test_guidance_of_one_and_less_is_conditional_only_as_in_the_library(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("unipc-shift3")
    request = Request(prompt="a", seed=1, steps=2, guidance=0.0, frames=1, height=16, width=16, output="latents")
    latents, _ = theirs(pair.pipeline, request)
    assert torch.equal(Engine().run(request, pair.instance).latents, latents)


def test_bfloat16_samples_as_the_library_in_bfloat16(make_wan_folder: Callable[..., Path]) -> None:
    """The library keeps some of the transformer's parameters in float32 then; the inputs are bfloat16 all the same."""
    folder = make_wan_folder(seed=4)
    card: ModelCard = card_of(folder)
    components = {
        cid: c.model_copy(update={"dtype": "bfloat16" if c.kind in ("transformer", "text_encoder") else "float32"})
        for cid, c in card.components.items()
    }
    instance = Engine().load(card.model_copy(update={"components": components}))
    assert instance.dtype("transformer") is torch.bfloat16
    pipeline = WanPipeline.from_pretrained(
        folder, dtype={"transformer": torch.bfloat16, "text_encoder": torch.bfloat16, "default": torch.float32}
    )
    pipeline.set_progress_bar_config(disable=True)
    request = Request(prompt="a red circle", seed=2, steps=3, guidance=5.0, frames=5, height=16, width=16)
    latents, _ = theirs(pipeline, request)
    assert torch.equal(Engine().run(request, instance).latents, latents)
