"""The memory plan against memory: real modules, a real optimizer, what the allocator says and what FSDP2 shards."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cards.card import ModelCard
from cards.registry import family
from fastvideo_train.memory_plan import BASE, Clip, MemoryPlan, Row, plan_memory
from fastvideo_train.parallel.plan import FSDP2, make_plan
from inference.engine import Engine
from inference.instance import ModelInstance
from methods.diffusion_nft import DiffusionNFT
from methods.dmd2 import DMD2
from methods.finetune import Finetune
from methods.forward import velocity
from methods.method import Method
from methods.rewards.card_reward import CardReward
from methods.rewards.combine import WeightedReward
from methods.rewards.shape_eval import ShapeEvalReward
from methods.roles import CRITIC, EMA, OLD, REFERENCE, STUDENT, TEACHER

ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = {"lr": 1e-3, "steps": 2, "batch_size": 4}
CLIP = Clip(frames=9, height=32, width=32)


def finetune(**options: Any) -> Finetune:
    return Finetune(**{**COMMON, "micro_batch": 4, **options})


def nft(**options: Any) -> DiffusionNFT:
    return DiffusionNFT(**{**COMMON, "samples": 4, "micro_batch": 3, "kl": 1e-3, **options})


def plan(card: ModelCard, method: Method, name: str = "single", devices: int = 1, **options: Any) -> MemoryPlan:
    settings: dict[str, Any] = {"clip": CLIP, "max_rows": 4, "generates": True}
    checkpointing = options.pop("checkpointing", False)
    parallel = make_plan(name, activation_checkpointing=checkpointing)
    return plan_memory(card, method, parallel, devices=devices, **(settings | options))


def rows(found: MemoryPlan) -> dict[str, Row]:
    return {row.name: row for row in found.rows}


def allocated_peak(run: Any) -> int:
    """Most bytes that the CPU allocator gave out at once beyond what it had given out before, scratch included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    kineto = watched.profiler.kineto_results  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted((e for e in kineto.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def full_text(card: ModelCard) -> ModelCard:
    return card.model_copy(update={"precision": card.precision.model_copy(update={"text_padding": "full"})})


def measured(training: Any, method: Method, *, checkpointing: bool) -> int:
    """One micro batch on real tensors, gradients there already."""
    module = training.module(method, plan=make_plan("single", activation_checkpointing=checkpointing))
    module.configure_model()
    roles = module.roles
    for role in module.optimizer_specs:
        for parameter in roles.trained(role):
            parameter.grad = torch.zeros_like(parameter)
    size = min(method.micro_batch, 4)

    def step() -> None:
        latents, text = torch.randn(size, 4, 3, 8, 8), torch.randn(size, 12, 24)
        sigma = torch.rand(size)
        predicted = velocity(roles.instance(STUDENT), latents, sigma, text, gradient=True)
        for role in roles.names:
            if role not in (STUDENT, EMA):
                velocity(roles.instance(role), latents, sigma, text, gradient=False)
        (predicted - latents).square().mean().backward()

    step()  # what is made once and stays
    return allocated_peak(step)


METHODS = {
    "finetune": lambda: finetune(),
    "finetune-lora": lambda: finetune(lora={"rank": 4}, ema=0.9),
    "nft": lambda: nft(),
    "nft-lora": lambda: nft(lora={"rank": 4}),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", list(METHODS))
def test_activations_are_what_the_allocator_gives_out(training: Any, name: str, checkpointing: bool) -> None:
    """Within 10 %."""
    method = METHODS[name]()
    planned = plan(training.card, method, checkpointing=checkpointing).activations
    real = measured(training, METHODS[name](), checkpointing=checkpointing)
    print(f"{name}, checkpointing {checkpointing}: planned {planned}, measured {real}, {planned / real:.3f}x")
    assert planned == pytest.approx(real, rel=0.1)


def test_checkpointing_trades_activations(make_wan_folder: Any) -> None:
    """With six blocks most of what is saved is theirs, and one's inputs are a small part of that."""
    card = family("wan21").card_from_folder(make_wan_folder(layers=6))
    whole, cut = (plan(card, finetune(), checkpointing=on).activations for on in (False, True))
    assert cut < 0.5 * whole


def storages(tensors: Iterator[torch.Tensor] | Any) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("name", list(METHODS))
def test_held_bytes_are_those_of_the_real_module_and_optimizer(training: Any, name: str) -> None:
    method = METHODS[name]()
    found = rows(plan(training.card, method))
    module = training.module(method)
    roles = module.roles
    everything = (*roles.parameters(), *roles.buffers())
    names = [STUDENT, *method.roles(), *((EMA,) if method.ema is not None else ())]
    planned = sum(row.weights for row in found.values() if row.name in (*names, BASE))
    assert planned == storages(everything)

    optimizer = module.configure_optimizers()["optimizer"]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert found[STUDENT].gradients == storages(p.grad for p in trained)
    assert found[STUDENT].optimizer == storages(moments)
    assert all(row.gradients == row.optimizer == 0 for row in found.values() if row.name != STUDENT)
    frozen = ModelInstance.from_folder(training.card, training.folder)
    for component in ("vae", "text_encoder"):
        part = frozen.module(component)
        assert found[component].weights == storages((*part.parameters(), *part.buffers()))


def test_lora_roles_are_adapters_and_the_reference_is_the_base(training: Any) -> None:
    found = rows(plan(training.card, nft(lora={"rank": 4}, ema=0.9)))
    linear = 4 * (32 + 32) * 4 * 2 * 2  # rank, in and out, four targets, two attentions, two blocks
    assert found[STUDENT].weights == found[OLD].weights == found[EMA].weights == 4 * linear
    assert found[REFERENCE].weights == 0 and found[BASE].weights > found[STUDENT].weights
    assert found[STUDENT].gradients == 4 * linear and found[STUDENT].optimizer == 8 * linear


def test_dmd2_trains_a_student_and_a_critic_beside_a_teacher(training: Any) -> None:
    method = DMD2(**COMMON, critic_lr=1e-3, ema=0.9)
    found = rows(plan(training.card, method))
    trained = {name: row.optimizer for name, row in found.items() if row.optimizer}
    assert set(trained) == {STUDENT, CRITIC} and trained[STUDENT] == trained[CRITIC] == 2 * found[CRITIC].gradients
    assert found[TEACHER].weights == found[STUDENT].weights == found[CRITIC].weights == found[EMA].weights
    adapters = rows(plan(training.card, DMD2(**COMMON, critic_lr=1e-3, lora={"rank": 4})))
    assert adapters[TEACHER].weights == 0 < adapters[CRITIC].weights < found[CRITIC].weights


@pytest.fixture
def four_ranks() -> Iterator[Any]:
    """A mesh of four devices of which only the first is there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_a_rank_holds_what_fsdp2_leaves_it(training: Any, four_ranks: Any) -> None:
    method = finetune()
    found = rows(plan(training.card, method, "fsdp2", 4))
    module = copy.deepcopy(training.base().module("transformer"))
    buffers = sum(b.nbytes for b in module.buffers())
    FSDP2().shard(module, four_ranks)
    local = sum(p.to_local().nbytes for p in module.parameters())
    assert found[STUDENT].weights == local + buffers
    assert found[STUDENT].gradients == local and found[STUDENT].optimizer == 2 * local


def test_replicas_hold_everything_and_shards_a_part(training: Any) -> None:
    alone, replica = plan(training.card, finetune()), plan(training.card, finetune(), "ddp", 4)
    shard = plan(training.card, finetune(), "fsdp2", 4)
    assert rows(replica) == rows(alone) and alone.gathered == replica.gathered == 0
    assert rows(shard)[STUDENT].weights < 0.5 * rows(alone)[STUDENT].weights
    assert rows(shard)["vae"] == rows(alone)["vae"]
    assert shard.gathered > 0
    assert replica.micro_batch == 1 and replica.activations < alone.activations


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own, on a CPU
def test_bfloat16_training_holds_less_than_float32(training: Any) -> None:
    card = training.card
    half = card.model_copy(update={"precision": card.precision.model_copy(update={"serve": "bfloat16"})})
    assert plan(half, finetune()).activations < plan(card, finetune()).activations


def test_the_encoder_is_counted_where_clips_are_encoded(training: Any) -> None:
    """Within 10 % of the allocator's peak."""
    found = plan(training.card, finetune(), encode_rows=3)
    instance = training.base()
    from loops.loop import ModelCall

    def encode() -> None:
        instance.call(ModelCall("vae", "encode", {"video": torch.rand(3, 3, 9, 32, 32)}))

    encode()
    assert found.encoding == pytest.approx(allocated_peak(encode), rel=0.1)
    assert plan(training.card, finetune()).encoding == 0
    assert found.peak >= found.held + found.encoding


def test_the_weights_of_a_card_that_scores_are_counted(training: Any) -> None:
    reward = WeightedReward(
        rewards={"seen": CardReward(card={"name": "reward", "size": "tiny"}), "ruled": ShapeEvalReward()},
        weights={"seen": 1.0, "ruled": 1.0},
    )
    with_judge = plan(training.card, finetune(), rewards=reward.cards())
    instance = Engine("cpu").load(reward.cards()["seen/card"])
    held = sum(instance.weights_bytes(cid) for cid in instance.residents)
    assert held > 1_000_000
    assert rows(with_judge)["reward seen/card"].weights == held
    assert with_judge.held == plan(training.card, finetune()).held + held


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    line = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("switch", ["+dry_run=true", "dry_run=true", "++dry_run=true"])
def test_the_switch_prints_the_plan_and_writes_nothing(switch: str, tmp_path: Path) -> None:
    done = command(switch, "method=finetune", "batch_size=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["card"] == "wan21-tiny" and found["micro_batch"] == 8
    for word in ("student", "ema", "text_encoder", "vae", "peak", "gradients", "optimizer"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_real_size_needs_neither_network_nor_weights(tmp_path: Path) -> None:
    """The transformer's parameters by hand: d 1536, ffn 8960, 30 blocks, text 4096, 16 channels in 1x2x2 patches."""
    done = command(
        "+dry_run=true",
        "method=finetune",
        "card.size=1.3b",
        "parallel=fsdp2",
        "devices=8",
        "batch_size=8",
        "method.ema=null",
        "parallel.activation_checkpointing=true",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    d, ffn, text, blocks = 1536, 8960, 4096, 30
    attention = 4 * (d * d + d) + 2 * d
    block = 2 * attention + (2 * d * ffn + ffn + d) + 2 * d + 6 * d
    embedders = (16 * 4 * d + d) + (256 * d + d + d * d + d) + (6 * d * d + 6 * d) + (text * d + d + d * d + d)
    whole = blocks * block + embedders + (d * 64 + 64) + 2 * d
    (student,) = (row for row in found["rows"] if row["name"] == "student")
    # A first dim that 8 does not divide is padded: of these the tables of the blocks' shifts, whose first dim is 1.
    tables = blocks * 6 * d + 2 * d
    assert student["gradients"] == 4 * ((whole - tables) // 8 + tables)
    assert found["devices"] == 8 and found["gathered"] > 0


def test_everything_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hydra import compose, initialize_config_dir

    from fastvideo_train.app import run_job
    from fastvideo_train.paths import conf_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        overrides = ["dry_run=true", "method=finetune", "data.num_frames=10", "devices=2", "batch_size=3"]
        cfg = compose("train", overrides=[*overrides, f"outputs={tmp_path}"])
    assert run_job(cfg) == 2
    error = capsys.readouterr().err
    assert "frames: got 10" in error and "devices=2" in error and "batch_size: got 3" in error
