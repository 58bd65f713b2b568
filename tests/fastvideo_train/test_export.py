"""Exports against plain diffusers: the trained role leaves whole, says what it is, and is checked before it appears."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from cards.card import ModelCard
from fastvideo_train.checkpoint import gather_roles
from fastvideo_train.export import LORA_TOLERANCE, Exported, ExportError, export_model
from fastvideo_train.trained_weights import weights_digest
from inference.engine import Engine
from inference.request import Request
from methods.finetune import Finetune
from methods.roles import EMA, STUDENT, LoRA

REQUESTS = (
    Request(prompt="a red circle moves left", seed=1, steps=4, guidance=1.0, output="latents"),
    Request(prompt="the blue square", seed=2, steps=3, guidance=3.0, output="latents"),
)
METRICS = {"before_all_correct": 0.25, "after_all_correct": 0.5}


@dataclass(frozen=True)
class Trained:
    """A trained module's role, as an export takes it, and the trainer's own latents for ``REQUESTS``."""

    card: ModelCard
    role: str
    lora: LoRA | None
    state: dict[str, Tensor]
    latents: list[Tensor]

    def export(self, out: Path, **changes: Any) -> Exported:
        settings: dict[str, Any] = {
            "card": self.card,
            "out": out,
            "state": self.state,
            "role": self.role,
            "lora": self.lora,
            "method": "finetune",
            "guidance": 1.0,
            "data": "ShapeWorld",
            "metrics": METRICS,
            "reference_latents": self.latents[0],
            "reference_request": REQUESTS[0],
            "samples": [("a red circle", np.zeros((9, 32, 32, 3), dtype=np.uint8))],
        }
        return export_model(**(settings | changes))


def train(training: Any, **options: Any) -> Trained:
    method = Finetune(lr=2e-2, steps=2, batch_size=4, **options)
    module = training.module(method)
    kept: list[Trained] = []

    def keep() -> None:
        role = module.best_role
        instance = module.roles.instance(role)
        latents = [Engine("cpu").run(request, instance).latents for request in REQUESTS]
        state = gather_roles(module)[STUDENT if method.lora is not None else role]
        kept.append(Trained(module.card, role, method.lora, state, latents))

    module.on_end = keep
    batch = {"latents": torch.randn(4, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0)), "prompt": ["a red"] * 4}
    training.fit(module, [batch] * 2)
    return kept[0]


@pytest.fixture(scope="module")
def full(training: Any) -> Trained:
    return train(training, ema=0.7)


@pytest.fixture(scope="module")
def lora(training: Any) -> Trained:
    return train(training, lora={"rank": 4, "alpha": 12})


@pytest.fixture(scope="module")
def exported(full: Trained, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return full.export(tmp_path_factory.mktemp("full") / "export")


@pytest.fixture(scope="module")
def exported_lora(lora: Trained, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return lora.export(tmp_path_factory.mktemp("lora") / "export")


def sample(pipe: WanPipeline, request: Request) -> Tensor:
    """Latents (C, T, H, W) of the library's own pipeline."""
    pipe.set_progress_bar_config(disable=True)
    assert request.seed is not None
    return pipe(
        request.prompt,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance,
        max_sequence_length=12,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="latent",
    ).frames[0]


def test_plain_diffusers_gives_the_trainers_latents_bit_for_bit(
    training: Any, full: Trained, exported: Exported
) -> None:
    pipe = WanPipeline.from_pretrained(exported.folder, dtype=torch.float32)
    base = WanPipeline.from_pretrained(training.folder, dtype=torch.float32)
    for request, latents in zip(REQUESTS, full.latents, strict=True):
        assert torch.equal(sample(pipe, request), latents)
        assert not torch.allclose(sample(base, request), latents, atol=1e-3)


def test_the_export_serves_itself_bit_for_bit(full: Trained, exported: Exported) -> None:
    assert exported.latents_difference == 0.0
    engine = Engine("cpu")
    instance = engine.load(exported.folder)
    for request, latents in zip(REQUESTS, full.latents, strict=True):
        assert torch.equal(engine.run(request, instance).latents, latents)


def test_the_average_is_what_leaves_when_there_is_one(full: Trained, training: Any) -> None:
    assert full.role == EMA
    student = train(training)
    assert student.role == STUDENT
    assert not torch.equal(student.latents[0], full.latents[0])


def test_the_card_says_where_the_weights_come_from(full: Trained, exported: Exported) -> None:
    card = ModelCard.load(exported.folder)
    assert card.digest == exported.card.digest != full.card.digest
    card.validate()
    assert card.recipe.method == "finetune"
    assert card.recipe.parents == (full.card.digest,)
    assert card.recipe.metrics == METRICS and card.recipe.data == "ShapeWorld"
    guidance = card.loops["denoise"].guidance
    assert guidance.scale == 1.0 and guidance.convention == "standard"
    weights = exported.folder / "transformer" / "diffusion_pytorch_model.safetensors"
    assert card.recipe.weights == {"transformer": hashlib.sha256(weights.read_bytes()).hexdigest()}
    assert card.name == f"{full.card.name}-finetune"


def test_the_cards_guidance_is_the_default_of_a_request(full: Trained, exported: Exported) -> None:
    engine = Engine("cpu")
    latents = engine.run(replace(REQUESTS[0], guidance=None), engine.load(exported.folder)).latents
    assert torch.equal(latents, full.latents[0])


def test_without_a_guidance_of_its_own_a_method_leaves_the_cards(full: Trained, tmp_path: Path) -> None:
    before = full.card.loops["denoise"].guidance.scale
    assert before != 1.0
    assert full.export(tmp_path / "export", guidance=None).card.loops["denoise"].guidance.scale == before


def test_an_export_of_an_export_names_both_parents(
    training: Any, exported: Exported, full: Trained, tmp_path: Path
) -> None:
    second = replace(full, card=exported.card).export(tmp_path / "export")
    assert second.card.recipe.parents == (exported.card.digest, full.card.digest)
    pipe = WanPipeline.from_pretrained(second.folder, dtype=torch.float32)
    assert torch.equal(sample(pipe, REQUESTS[0]), full.latents[0])


def test_an_export_may_move(full: Trained, exported: Exported, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(exported.folder, moved)
    engine = Engine("cpu")
    assert torch.equal(engine.run(REQUESTS[0], engine.load(moved)).latents, full.latents[0])


def test_the_folder_holds_what_the_readme_promises_and_nothing_of_the_parents_papers(
    full: Trained, exported: Exported
) -> None:
    names = {path.name for path in exported.folder.iterdir()}
    expected = {"model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae", "card.json"}
    assert names == expected | {"README.md", "samples"}
    readme = (exported.folder / "README.md").read_text()
    assert exported.card.digest in readme and full.card.digest[:12] in readme
    assert re.search(r"\| all_correct \| .* \| 0\.5 \|", readme)
    for image in re.findall(r"!\[\]\((.+?)\)", readme):
        assert (exported.folder / image).is_file()


def test_the_readmes_snippet_runs(exported: Exported) -> None:
    code = re.search(r"```python\n(.*?)```", (exported.folder / "README.md").read_text(), re.DOTALL)
    assert code is not None
    assert '"export"' in code[1]
    names: dict[str, Any] = {}
    exec(code[1].replace('"export"', repr(str(exported.folder))), names)
    assert names["video"].shape == (9, 32, 32, 3)
    assert names["pipe"].config["_name_or_path"] == str(exported.folder)


# -- LoRA


def test_a_merged_lora_serves_within_tolerance(lora: Trained, exported_lora: Exported) -> None:
    assert 0 <= exported_lora.latents_difference <= LORA_TOLERANCE
    pipe = WanPipeline.from_pretrained(exported_lora.folder, dtype=torch.float32)
    for request, latents in zip(REQUESTS, lora.latents, strict=True):
        torch.testing.assert_close(sample(pipe, request), latents, rtol=0, atol=1e-4)
    keys = {key for key in pipe.transformer.state_dict() if "lora" in key or "base_layer" in key}
    assert keys == set()


def test_the_adapter_loads_on_the_base_by_diffusers_at_its_own_strength(
    training: Any, lora: Trained, exported_lora: Exported
) -> None:
    """alpha is 3 times the rank: a loader that does not know it is off by that factor."""
    pipe = WanPipeline.from_pretrained(training.folder, dtype=torch.float32)
    before = sample(pipe, REQUESTS[0])
    pipe.load_lora_weights(exported_lora.folder / "lora")
    for request, latents in zip(REQUESTS, lora.latents, strict=True):
        torch.testing.assert_close(sample(pipe, request), latents, rtol=0, atol=1e-4)
    assert (before - lora.latents[0]).abs().max() > 1e-2


# -- what must not appear


def test_a_failed_check_leaves_nothing_under_the_exports_name(full: Trained, tmp_path: Path) -> None:
    out = tmp_path / "export"
    with pytest.raises(ExportError, match=r"largest difference 1\.0\d*e-03, allowed 0e\+00"):
        full.export(out, reference_latents=full.latents[0] + 1e-3)
    assert not out.exists()
    with pytest.raises(ExportError, match="nan"):
        full.export(out, reference_latents=full.latents[0] * float("nan"))
    assert not out.exists()
    full.export(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_a_failed_check_leaves_the_export_that_was_there(full: Trained, tmp_path: Path) -> None:
    out = tmp_path / "export"
    digest = full.export(out).card.digest
    with pytest.raises(ExportError):
        full.export(out, reference_latents=full.latents[1], metrics={})
    assert ModelCard.load(out).digest == digest


def test_a_lora_of_another_strength_fails_its_check(lora: Trained, tmp_path: Path) -> None:
    assert lora.lora is not None
    with pytest.raises(ExportError, match="allowed 1e-04"):
        lora.export(tmp_path / "export", lora=replace(lora.lora, alpha=13))
    assert not (tmp_path / "export").exists()


def test_a_state_with_a_missing_weight_is_refused(full: Trained, tmp_path: Path) -> None:
    state = {key: value for key, value in full.state.items() if key != "proj_out.bias"}
    with pytest.raises(RuntimeError, match=r"proj_out\.bias"):
        full.export(tmp_path / "export", state=state)
    assert not (tmp_path / "export").exists()


def test_the_weights_digest_covers_every_shard(training: Any, tmp_path: Path) -> None:
    model = training.base().module("transformer")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    (single,) = (tmp_path / "one").glob("*.safetensors")
    assert weights_digest(tmp_path / "one") == hashlib.sha256(single.read_bytes()).hexdigest()
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 1
    parts = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in shards)
    assert weights_digest(tmp_path / "many") == hashlib.sha256(parts.encode()).hexdigest()
