"""The gates: a sound model passes each, and each breaks on the fault that it is there for."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cards.card import CARD_FILE, ModelCard, Parity, Schedule, Source
from cards.errors import UserError
from cards.wan21.card import with_vae_tiles
from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.parity.__main__ import main
from inference.parity.behaviour import behaviour_gate
from inference.parity.interleave import GateReport, interleave_gate, tensor_difference, worst
from inference.parity.ladder import loop_level, run_ladder
from inference.parity.library import WanLibrary
from inference.request import Request

SMALL = {"frames": 5, "height": 16, "width": 16, "steps": 6, "max_sequence_length": 16}


def small_card(folder: Path, **changes: Any) -> ModelCard:
    card = card_of(folder)
    return card.derive(sampling=card.sampling.model_copy(update=SMALL), **changes)


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return Engine().load(small_card(wan_folder))


def view_with_hook(instance: ModelInstance, hook: Any) -> ModelInstance:
    """The instance with a transformer of its own whose output goes through ``hook``."""
    module = copy.deepcopy(instance.module("transformer"))
    module.register_forward_hook(hook)
    return instance.view({"transformer": Resident(module)})


def export(folder: Path, target: Path, **changes: Any) -> Path:
    """A folder with its card beside its weights."""
    shutil.copytree(folder, target)
    card = small_card(folder, source=Source(kind="folder", location="."), **changes)
    (target / CARD_FILE).write_text(card.to_json())
    return target


# -- differences


def test_a_difference_is_the_largest_and_a_nan_is_never_lost() -> None:
    a = torch.tensor([1.0, 2.0])
    assert tensor_difference(a, a.clone()) == 0
    assert tensor_difference(a, torch.tensor([1.5, 1.75])) == 0.5
    assert tensor_difference(a, torch.ones(3)) == math.inf
    assert math.isnan(tensor_difference(a, torch.tensor([1.0, math.nan])))
    assert math.isnan(worst([0.0, math.nan, 1.0]))
    assert math.isnan(worst([math.nan, 0.0]))
    assert worst([0.25, 2.0, 1.0]) == 2.0
    assert not GateReport("C1", "x", math.nan, math.inf).passed


# -- behaviour


@pytest.mark.parametrize("solver", [None, "euler", "unipc", "dpm2"])
def test_a_sound_model_passes_the_behaviour_gate(instance: ModelInstance, solver: str | None) -> None:
    report = behaviour_gate(instance, prompt="a red circle", seed=3, solver=solver)
    assert (report.level, report.difference, report.passed) == ("C2", 0.0, True)


def test_the_behaviour_gate_works_on_a_role_that_is_in_training(instance: ModelInstance) -> None:
    module = copy.deepcopy(instance.module("transformer")).train().requires_grad_(True)
    report = behaviour_gate(instance.view({"transformer": Resident(module)}), prompt="a", seed=3)
    assert report.passed
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")  # peft: two adapters is what we want
def test_the_behaviour_gate_works_on_lora_roles(instance: ModelInstance) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    module = copy.deepcopy(instance.module("transformer"))
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    for name in ("student", "old"):
        inject_adapter_in_model(config, module, adapter_name=name)
    samples = {}
    for adapter in ("student", "old", ""):
        role = instance.view({"transformer": Resident(module, adapter=adapter)})
        assert behaviour_gate(role, prompt="a", seed=3).passed, adapter
        samples[adapter] = Engine().run(Request(prompt="a", seed=3, steps=2, guidance=1.0, output="latents"), role)
    assert not torch.equal(samples["student"].latents, samples["old"].latents)
    base = Engine().run(Request(prompt="a", seed=3, steps=2, guidance=1.0, output="latents"), instance)
    assert torch.equal(samples[""].latents, base.latents)


def test_the_behaviour_gate_breaks_when_training_evaluates_something_else(instance: ModelInstance) -> None:
    """Such as a dropout, or a kernel that is chosen when a gradient is needed."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] + 1e-3,) if torch.is_grad_enabled() else output

    report = behaviour_gate(view_with_hook(instance, hook), prompt="a", seed=3)
    assert report.difference == pytest.approx(1e-3, rel=1e-2)
    assert not report.passed
    assert behaviour_gate(view_with_hook(instance, hook), prompt="a", seed=3, tolerance=2e-3).passed


def test_the_behaviour_gate_breaks_when_a_sample_does_not_repeat(instance: ModelInstance) -> None:
    generator = torch.Generator().manual_seed(0)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] + 1e-3 * torch.randn(output[0].shape, generator=generator),)

    assert not behaviour_gate(view_with_hook(instance, hook), prompt="a", seed=3, tolerance=1e-4).passed


def test_the_behaviour_gate_breaks_when_training_gets_no_gradient(instance: ModelInstance) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0].detach(),)

    report = behaviour_gate(view_with_hook(instance, hook), prompt="a", seed=3, tolerance=1e6)
    assert report.difference == math.inf
    assert not report.passed


def test_the_behaviour_gate_breaks_on_nan(instance: ModelInstance) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * math.nan,)

    assert not behaviour_gate(view_with_hook(instance, hook), prompt="a", seed=3, tolerance=1e6).passed


def test_the_behaviour_gate_of_a_distilled_card_runs_its_ladder(instance: ModelInstance) -> None:
    card = instance.card
    for solver in ("euler", "unipc"):
        loop = card.loops["denoise"].model_copy(
            update={"solver": solver, "schedule": Schedule(shift=5.0, ladder=(1.0, 0.9375, 0.625))}
        )
        report = behaviour_gate(instance.view({}, card.derive(loops={"denoise": loop})), prompt="a", seed=3)
        assert report.passed
        assert "3 rollout velocities" in report.what


def test_the_behaviour_gate_has_as_many_steps_as_asked(instance: ModelInstance) -> None:
    assert "2 rollout velocities" in behaviour_gate(instance, prompt="a", seed=3, steps=2).what


# -- interleaving


def test_the_interleave_gate_passes_a_sound_model(instance: ModelInstance) -> None:
    assert interleave_gate(instance).passed
    report = interleave_gate(instance, batching="shape")
    assert report.level == "C3"
    assert report.passed


def test_the_interleave_gate_breaks_on_state_that_requests_share(instance: ModelInstance) -> None:
    """The classic fault: something on the module remembers the last call."""
    last: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        previous, last[:] = list(last), [output[0]]
        same = previous and previous[0].shape == output[0].shape
        return (output[0] + 1e-3 * previous[0],) if same else output

    report = interleave_gate(view_with_hook(instance, hook))
    assert report.difference > 0
    assert not report.passed


def test_the_interleave_gate_breaks_on_nan(instance: ModelInstance) -> None:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] * math.nan,)

    assert not interleave_gate(view_with_hook(instance, hook)).passed


# -- the ladder and its command


@pytest.mark.slow
def test_every_row_of_a_sound_folder_holds(wan_folder: Path) -> None:
    reports = list(run_ladder(small_card(wan_folder)))
    assert [report for report in reports if not report.passed] == []
    assert list(dict.fromkeys(r.level for r in reports)) == ["C0", "C1", "C2", "C3", "interleave"]
    exact = [r for r in reports if r.level in ("C1", "C2", "interleave") and "frames" not in r.what]
    assert len(exact) == 4 * 2 + 2 + 1
    assert all(r.difference == 0 for r in exact)


def test_a_card_that_decodes_by_tiles_is_held_against_a_library_that_does(wan_folder: Path) -> None:
    tiled = with_vae_tiles(small_card(wan_folder, parity=Parity(levels=("C0", "C1"))), tile=(12, 12), stride=(8, 8))
    reports = list(run_ladder(tiled))
    assert [report for report in reports if not report.passed] == []
    assert sum("frames" in r.what for r in reports) == 1
    library = WanLibrary(tiled, torch.device("cpu"))
    instance = Engine().load(with_vae_tiles(small_card(wan_folder), tile=(12, 12), stride=(4, 4)))
    broken = [r.what for r in loop_level(instance, library, seed=0) if not r.passed]
    assert broken == ["decoded frames == the library's, all of the above"]


@pytest.mark.parametrize("solver", ["euler", "lcm"])
def test_a_distilled_card_is_held_against_the_librarys_pipeline_on_its_ladder(wan_folder: Path, solver: str) -> None:
    card = small_card(wan_folder)
    loop = card.loops["denoise"].model_copy(
        update={"solver": solver, "schedule": Schedule(shift=5.0, ladder=(1.0, 0.9375, 0.625))}
    )
    distilled = card.derive(loops={"denoise": loop}, parity=Parity(levels=("C1", "C2"), interleave_required=False))
    reports = list(run_ladder(distilled))
    assert [r.level for r in reports] == ["C1"] * 5 + ["C2"]
    assert sum("WanPipeline" in r.what for r in reports) == 2
    assert all(r.passed for r in reports)


def test_the_command_prints_a_table_and_exits_with_0(
    wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(wan_folder, tmp_path / "export", parity=Parity(levels=("C2",)))
    assert main([f"card={folder}"]) == 0
    out = capsys.readouterr().out
    assert "C2" in out
    assert "interleave" in out
    assert "3 of 3 rows hold" in out


def test_a_broken_row_exits_with_1(wan_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No difference is below zero, so this card promises what nothing can keep."""
    parity = Parity(levels=("C3",), tolerances={"C3": -1.0}, interleave_required=False)
    folder = export(wan_folder, tmp_path / "export", parity=parity)
    assert main([f"card={folder}"]) == 1
    assert "0 of 1 rows hold" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "card= is missing"),
        (["card"], "key=value"),
        (["crad=wan21"], "Did you mean 'card'"),
        (["card=wan21", "seed=-1"], "seed: got '-1'"),
        (["card=wan21", "seed=x"], "seed: got 'x'"),
        (["card=wan21", "device=tpu"], "device: got 'tpu'"),
        (["card=/nowhere/at/all"], "no such folder"),
    ],
)
def test_a_user_error_is_one_message_and_exit_code_2(
    arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert word in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_family_without_a_library_says_so(wan_folder: Path) -> None:
    from inference.parity.library import library_of

    with pytest.raises(UserError, match=r"'flux'.*wan21"):
        library_of(small_card(wan_folder).model_copy(update={"family": "flux"}), torch.device("cpu"))
