"""Exports of a distilled card: they say their ladder, serve it alone, and plain diffusers samples the same latents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchLCMScheduler, WanPipeline
from torch import Tensor

from cards.card import LoopMismatchError, ModelCard
from fastvideo_train.checkpoint import gather_roles
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.export import LORA_TOLERANCE, Exported, export_model, reference_request
from fastvideo_train.trained_weights import weights_digest
from inference.engine import Engine
from inference.request import Request
from methods.dmd2 import DMD2
from methods.ladder import SEMANTICS
from methods.roles import STUDENT

REQUEST = Request(prompt="the blue square", seed=2, output="latents")


def distil(training: Any, out: Path, lora: Any = None) -> tuple[Exported, Tensor]:
    """A student of two updates, exported as a run does it, and its own latents for ``REQUEST``."""
    method = DMD2(lr=2e-2, critic_lr=2e-2, steps=2, batch_size=2, ttur=1, ema=0.5, rungs=[1000, 750, 250], lora=lora)
    module = training.module(method)
    kept: list[tuple[Exported, Tensor]] = []

    def keep() -> None:
        role = module.best_role
        instance = module.roles.instance(role)
        request = reference_request(module.card, 0, method.rollout_guidance())
        exported = export_model(
            card=module.card,
            parent=training.card,
            out=out,
            state=gather_roles(module)[STUDENT if lora is not None else role],
            role=role,
            lora=method.lora,
            method=method.name,
            guidance=method.rollout_guidance(),
            data="",
            metrics={},
            reference_latents=Engine("cpu").run(request, instance).latents,
            reference_request=request,
            samples=[],
        )
        kept.append((exported, Engine("cpu").run(REQUEST, instance).latents))

    module.on_end = keep
    training.fit(module, [[Prompt("a red circle"), Prompt("the blue square")]] * 2)
    return kept[0]


@pytest.fixture(scope="module")
def distilled(training: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, Tensor]:
    return distil(training, tmp_path_factory.mktemp("distilled") / "export")


def test_the_card_holds_the_ladder_and_names_the_base_as_its_parent(training: Any, distilled: Any) -> None:
    exported, _ = distilled
    card = ModelCard.load(exported.folder)
    card.validate()
    loop = card.loops["denoise"]
    assert loop.schedule.ladder == pytest.approx((1.0, 0.9375, 0.625)) and loop.schedule.shift == 1.0
    assert (loop.solver, loop.guidance.scale, card.sampling.steps) == ("lcm", 1.0, 3)
    assert loop.semantics == card.recipe.assumes_loop == SEMANTICS
    assert card.recipe.method == "dmd2" and card.recipe.parents == (training.card.digest,)
    assert card.recipe.weights == {"transformer": weights_digest(exported.folder / "transformer")}


def test_the_export_serves_the_trainers_latents_and_no_other_grid(distilled: Any) -> None:
    exported, latents = distilled
    assert exported.latents_difference == 0.0
    engine = Engine("cpu")
    instance = engine.load(exported.folder)
    assert torch.equal(engine.run(REQUEST, instance).latents, latents)
    for fields in ({"steps": 50}, {"solver": "unipc"}, {"shift": 3.0}):
        with pytest.raises(LoopMismatchError, match="distilled for the ladder"):
            engine.run(Request("a", seed=1, output="latents", **fields), instance)


def test_plain_diffusers_samples_the_same_latents_by_the_readmes_lines(distilled: Any) -> None:
    exported, latents = distilled
    code = re.search(r"```python\n(.*?)```", (exported.folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = code[1].replace('"export"', repr(str(exported.folder)))
    script = script.replace('"a red circle moves left"', f'"{REQUEST.prompt}", max_sequence_length=12')
    script = script.replace("manual_seed(1)", "manual_seed(2)")
    script = script.replace("generator=generator).frames", 'generator=generator, output_type="latent").frames')
    names: dict[str, Any] = {}
    exec(script, names)
    assert isinstance(names["pipe"], WanPipeline) and isinstance(names["pipe"].scheduler, FlowMatchLCMScheduler)
    assert torch.equal(names["video"], latents)


def test_the_folders_own_scheduler_shifts_nothing(distilled: Any) -> None:
    exported, _ = distilled
    scheduler = WanPipeline.from_pretrained(exported.folder, dtype=torch.float32).scheduler
    scheduler.set_timesteps(sigmas=[1.0, 0.9375, 0.625])
    assert scheduler.sigmas.tolist() == [1.0, 0.9375, 0.625, 0.0]


def test_an_adapter_student_is_exported_merged(training: Any, tmp_path: Path) -> None:
    exported, latents = distil(training, tmp_path / "export", lora={"rank": 4, "alpha": 8})
    assert exported.latents_difference <= LORA_TOLERANCE
    engine = Engine("cpu")
    ours = engine.run(REQUEST, engine.load(exported.folder)).latents
    torch.testing.assert_close(ours, latents, rtol=0, atol=LORA_TOLERANCE)
    assert (exported.folder / "lora").is_dir()
