"""The ways to run rollouts: settings and what cannot work; and the planned bytes of a record against real records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from torch import Tensor

from cards.errors import UserError
from fastvideo_train.app import run_job
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.memory_plan import Clip, plan_memory
from fastvideo_train.parallel.plan import Single
from fastvideo_train.paths import conf_dir
from fastvideo_train.rollout_record import plan_record
from fastvideo_train.rollouts import AsyncRollouts, InProcessRollouts, ProcessRollouts, make_settings
from inference.artifact import Artifact
from inference.engine import Engine
from inference.remote.process import EngineProcess
from loops.loop import BehaviourRecord
from methods.diffusion_nft import DiffusionNFT
from methods.finetune import Finetune
from methods.flow_grpo import FlowGRPO
from methods.method import Method
from methods.rollout import InProcess, RolloutPlan
from methods.rollout_process import BEHAVIOUR, Asynchronous, SeparateProcess
from methods.world import World

COMMON: dict[str, Any] = {"lr": 1e-3, "steps": 2, "batch_size": 2}


def nft(**options: Any) -> DiffusionNFT:
    return DiffusionNFT(**{**COMMON, "samples": 2, "rollout_steps": 3, "timesteps": 2, "updates": 1, **options})


class Capturing(DiffusionNFT):
    """Asks for the opt-in fields too."""

    def rollout_plan(self, batch: Sequence[Any], step: int, *, seed: int, world: World) -> RolloutPlan:
        plan = super().rollout_plan(batch, step, seed=seed, world=world)
        kept = tuple(replace(request, capture=("trajectory", "velocities")) for request in plan.requests)
        return RolloutPlan(plan.role, kept)


class NoPlan(DiffusionNFT):
    """Cannot say a step ahead what it rolls out."""

    rollout_plan = Method.rollout_plan  # type: ignore[assignment]


# -- settings


def test_each_way_is_its_class_and_makes_its_runner(training: Any) -> None:
    ctx = training.context(nft())
    made = [make_settings({"name": name}).make(ctx.engine, ctx.roles, 7) for name in ("in_process", "process", "async")]
    assert [type(runner) for runner in made] == [InProcess, SeparateProcess, Asynchronous]
    settings = make_settings({"name": "process", "threads": 3, "chunk_mib": 2, "restarts": 0, "device": "cpu"})
    runner = settings.make(ctx.engine, ctx.roles, 7)
    assert isinstance(runner, SeparateProcess) and isinstance(runner.process, EngineProcess)
    process = runner.process
    assert (process.threads, process.chunk, process.max_rows, process.batching) == (3, 2**21, 7, "shape")
    assert process.pid is None and runner.restarts == 0
    assert (InProcessRollouts.roles, ProcessRollouts.roles, AsyncRollouts.roles) == ((), (), (BEHAVIOUR,))


def test_an_unknown_name_or_key_is_told_with_the_valid_ones() -> None:
    with pytest.raises(UserError, match=r"asynch.*async, in_process, process"):
        make_settings({"name": "asynch"})
    with pytest.raises(UserError, match=r"rollout=process: unknown key\(s\) thread; expected device, threads"):
        make_settings({"name": "process", "thread": 1})
    with pytest.raises(UserError, match=r"rollout=in_process: unknown key\(s\) threads; expected none"):
        make_settings({"name": "in_process", "threads": 1})


@pytest.mark.parametrize(
    ("settings", "method", "expected"),
    [
        (InProcessRollouts(), Finetune(**COMMON), []),
        (AsyncRollouts(), nft(), []),
        (ProcessRollouts(), Finetune(**COMMON), ["rollout=process: method finetune has no rollouts"]),
        (AsyncRollouts(), Finetune(**COMMON), ["rollout=async: method finetune has no rollouts"]),
        (ProcessRollouts(), NoPlan(**COMMON), []),
        (AsyncRollouts(), NoPlan(**COMMON), ["cannot say a step ahead"]),
        (
            ProcessRollouts(threads=0, chunk_mib=0, restarts=-1, device="tpu:x"),
            nft(),
            ["threads: got 0", "chunk_mib: got 0", "restarts: got -1", "rollout.device: got 'tpu:x'"],
        ),
    ],
)
def test_what_cannot_work_is_told(settings: Any, method: Method, expected: list[str]) -> None:
    found = settings.problems(method)
    assert len(found) == len(expected)
    assert all(part in message for part, message in zip(expected, found, strict=True))


def test_a_run_that_cannot_roll_out_so_stops_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wan_folder: Path
) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose(
            "train",
            [
                "method=finetune",
                "rollout=async",
                "rollout.chunk_mib=0",
                f"card.source={wan_folder}",
                f"outputs={tmp_path}",
            ],
        )
    assert run_job(cfg) == 2
    error = capsys.readouterr().err
    assert "rollout=async: method finetune has no rollouts" in error and "rollout.chunk_mib: got 0" in error
    assert list(tmp_path.iterdir()) == []


# -- bytes


def pieces(artifact: Artifact) -> dict[str, int]:
    """Bytes of what a method holds of a sample; conditions are the prompt's."""
    assert artifact.behaviour is not None
    record = {f.name: getattr(artifact.behaviour, f.name) for f in dataclasses.fields(BehaviourRecord)}
    tensors = {"latents": artifact.latents, "video": artifact.video, **record}
    return {name: value.nbytes for name, value in tensors.items() if isinstance(value, Tensor)}


METHODS = {
    "nft": lambda: nft(),
    "nft-captures": lambda: Capturing(**COMMON, samples=2, rollout_steps=3, timesteps=2),
    "flow_grpo": lambda: FlowGRPO(**COMMON, samples=2, rollout_steps=3),
    "flow_grpo-window": lambda: FlowGRPO(**COMMON, samples=2, rollout_steps=4, window=[1, 3]),
    "flow_grpo-guided": lambda: FlowGRPO(**COMMON, samples=2, rollout_steps=2, guidance=3.0),
}


@pytest.mark.parametrize("name", list(METHODS))
def test_planned_bytes_of_a_record_are_those_of_a_real_one(training: Any, name: str) -> None:
    method = METHODS[name]()
    planned = plan_record(training.card, method)
    assert planned is not None and planned.samples == 4 and planned.prompts == 2
    batch = [Prompt("a red circle"), Prompt("the blue square moves left")]
    requests = method.rollout_plan(batch, 0, seed=0, world=World()).requests
    artifacts = Engine(batching="shape").run_interleaved(requests, training.base())
    for artifact in artifacts:
        assert pieces(artifact) == dict(planned.fields)
        assert artifact.behaviour is not None
        conditions = artifact.behaviour.conditions
        shared = {} if conditions is None else {"conditions": sum(t.nbytes for t in conditions.values())}
        assert shared == dict(planned.per_prompt)
    assert planned.total == 4 * planned.bytes_per_sample + 2 * sum(planned.per_prompt.values())


def test_every_field_of_a_record_is_planned_by_one_of_these_methods(training: Any) -> None:
    """A new field needs a formula."""
    plans = [plan_record(training.card, make()) for make in METHODS.values()]
    planned = {name for plan in plans if plan is not None for name in (*plan.fields, *plan.per_prompt)}
    assert planned == {"latents", "video", *(field.name for field in dataclasses.fields(BehaviourRecord))}


def test_a_method_without_a_plan_has_no_record(training: Any) -> None:
    assert plan_record(training.card, NoPlan(**COMMON)) is None
    assert plan_record(training.card, Finetune(**COMMON)) is None


def test_the_engine_process_and_the_kept_weights_are_planned(training: Any) -> None:
    found = {
        settings.name: plan_memory(
            training.card,
            nft(),
            Single(),
            devices=1,
            clip=Clip(9, 32, 32),
            max_rows=4,
            generates=True,
            rollouts=settings,
        )
        for settings in (InProcessRollouts(), ProcessRollouts(), AsyncRollouts())
    }
    base = training.base()
    whole = sum(base.resident_bytes(cid) for cid in base.residents)
    assert found["in_process"].engine_process == 0
    assert found["process"].engine_process == found["async"].engine_process == whole
    rows = {name: {row.name: row for row in plan.rows} for name, plan in found.items()}
    assert BEHAVIOUR not in rows["process"]
    kept = rows["async"][BEHAVIOUR]
    assert kept.weights == rows["async"]["old"].weights > 0 and kept.gradients == kept.optimizer == 0
    assert found["process"].held == found["in_process"].held == found["async"].held - kept.weights


def test_dry_run_prints_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str], wan_folder: Path) -> None:
    given = ["dry_run=true", "rollout=async", "batch_size=3", "method.samples=2", f"card.source={wan_folder}"]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("train", [*given, f"outputs={tmp_path}"])
    assert run_job(cfg) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "A sample of a rollout leaves (6 a step)" in words and "engine process of rollout=async" in words
    found = json.loads(out.splitlines()[-1])
    record = found["record"]
    assert record["samples"] == 6 and record["bytes_per_sample"] == sum(record["fields"].values()) > 0
    assert found["rollouts"] == "async" and found["engine_process"] > 0
    assert BEHAVIOUR in [row["name"] for row in found["rows"]]
