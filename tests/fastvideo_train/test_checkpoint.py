"""Checkpoints: round trips and continuation bit for bit, what a kill leaves, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastvideo_train import checkpoint as ckpt
from fastvideo_train.data.prompts import Prompt
from methods.diffusion_nft import DiffusionNFT
from methods.dmd2 import DMD2
from methods.finetune import Finetune
from methods.method import Method
from methods.rewards.reward import Reward, RewardBatch, Scores

LORA = {"rank": 4, "alpha": 8}
WORDS = ("a red circle", "the blue square moves left", "a green triangle")


class Brightness(Reward):
    """Mean pixel of a clip."""

    name = "brightness"
    version = "1"

    def score(self, batch: RewardBatch) -> Scores:
        return Scores(values=np.array([np.mean(video) for video in batch.videos_BFHWC], dtype=np.float64))


def make(kind: str) -> Method:
    if kind == "finetune":
        return Finetune(lr=1e-2, steps=4, batch_size=4, micro_batch=3, ema=0.9, warmup=3, caption_dropout=0.3)
    lora = LORA if kind.endswith("-lora") else None
    if kind.startswith("dmd2"):
        gan = {"weight_g": 1e-2, "weight_d": 1e-2} if kind == "dmd2-gan" else None
        rates = {"lr": 1e-2, "critic_lr": 2e-2, "critic_clip": 0.1, "lr_schedule": "cosine"}
        return DMD2(steps=4, batch_size=4, micro_batch=3, ttur=3, ema=0.9, warmup=2, lora=lora, gan=gan, **rates)  # type: ignore[arg-type]
    settings: dict[str, Any] = {
        "samples": 3,
        "rollout_steps": 2,
        "timesteps": 2,
        "updates": 2,
        "micro_batch": 4,
        "kl": 0.1,
        "warmup": 3,
    }
    return DiffusionNFT(lr=1e-2, steps=4, batch_size=2, ema=0.9, ema_start=2, lora=lora, **settings)


def batch(kind: str, step: int) -> Any:
    if kind not in ("finetune", "dmd2-gan"):
        return [Prompt(WORDS[(step + i) % 3]) for i in range(4 if kind.startswith("dmd2") else 2)]
    latents = torch.randn(4, 4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    return {"latents": latents, "prompt": [WORDS[i % 3] for i in range(4)]}


def module_of(training: Any, kind: str, **options: Any) -> Any:
    reward = Brightness() if kind.startswith("nft") else None
    return training.module(make(kind), reward=reward, parity_every=2, **options)


def everything(module: Any) -> dict[str, torch.Tensor]:
    """All tensors that a run's future depends on, by name."""
    found = dict(module.roles.state_dict().items())
    names = {id(p): key for key, p in module.roles.named_parameters()}
    for optimizer in module.role_optimizers().values():
        for parameter, moments in optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{key}": torch.as_tensor(value) for key, value in moments.items()}
    return {key: value.detach().clone() for key, value in found.items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def at_end(module: Any, what: Any) -> None:
    """Runs ``what`` once the training steps are done, while the trainer still stands."""
    module.on_end = what


@pytest.mark.parametrize("kind", ["finetune", "nft", "nft-lora", "dmd2", "dmd2-lora", "dmd2-gan"])
def test_two_and_two_steps_are_four_steps_bit_for_bit(training: Any, tmp_path: Path, kind: str) -> None:
    """Weights of all roles, both Adam moments, counters, learning rates and every metric."""
    whole = module_of(training, kind)
    kept: dict[str, Any] = {}
    at_end(whole, lambda: kept.update(whole=everything(whole)))
    rows = training.fit(whole, [batch(kind, step) for step in range(4)])

    first = module_of(training, kind)

    def save() -> None:
        kept["saved"] = everything(first)
        ckpt.save(tmp_path / "checkpoints", first, {"position": {"next": 2}, "before": {"reward": 0.5}})

    at_end(first, save)
    head = training.fit(first, [batch(kind, step) for step in range(2)])

    checkpoint = ckpt.find_last(tmp_path)
    assert checkpoint is not None
    meta = ckpt.read_meta(checkpoint)
    updates = {"finetune": 2, "nft": 4}.get(kind.partition("-")[0], 1)
    assert (meta.step, meta.optimizer_steps, meta.method) == (2, updates, make(kind).name)

    torch.manual_seed(99)  # nothing may depend on the global generator
    second = module_of(training, kind, start_step=meta.step)
    versions = {role: second.roles.instance(role).versions() for role in second.roles.names}

    def load() -> None:
        state = ckpt.load_state(checkpoint)
        ckpt.restore(state, meta, second)
        kept["restored"], kept["data"] = everything(second), state["data"]

    second.on_start = load
    at_end(second, lambda: kept.update(continued=everything(second)))
    tail = training.fit(second, [batch(kind, step) for step in (2, 3)])

    assert_same(kept["restored"], kept["saved"])
    assert kept["data"] == {"position": {"next": 2}, "before": {"reward": 0.5}}
    assert_same(kept["continued"], kept["whole"])
    assert head + tail == rows
    assert second.optimizer_steps == whole.optimizer_steps and second.step_index == 4
    for role, before in versions.items():  # caches of the weights before the restore are not read again
        assert second.roles.instance(role).versions()["transformer"] > before["transformer"]
    moments = [key for key in kept["whole"] if key.endswith("/exp_avg")]
    assert moments and all(kept["whole"][key].abs().max() > 0 for key in moments if "lora_A" not in key)


def saved(training: Any, folder: Path, kind: str = "finetune", steps: tuple[int, ...] = (1,), keep: int = 2) -> Any:
    """A module of ``max(steps)`` steps that saved after each of ``steps``."""
    module = module_of(training, kind)

    def save(step: int, metrics: dict[str, float]) -> None:
        if step in steps:
            ckpt.save(folder / "checkpoints", module, {}, keep=keep)

    module.on_step = save
    training.fit(module, [batch(kind, step) for step in range(max(steps))])
    return module


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_newest_two_stay_and_last_points_at_the_newest(training: Any, tmp_path: Path) -> None:
    saved(training, tmp_path, steps=(1, 2, 3))
    assert names(tmp_path) == ["last", "step-000002", "step-000003"]
    link = tmp_path / "checkpoints" / "last"
    assert link.is_symlink() and not link.readlink().is_absolute()  # the run folder may move
    assert link.resolve().name == "step-000003"
    assert ckpt.read_meta(link).step == 3


def test_what_a_kill_leaves_is_not_a_checkpoint(training: Any, tmp_path: Path) -> None:
    saved(training, tmp_path, steps=(1, 2))
    folder = tmp_path / "checkpoints"
    (folder / ".step-000003.tmp").mkdir()
    (folder / ".step-000003.tmp" / ckpt.STATE_FILE).write_bytes(b"half")
    (folder / "step-000004").mkdir()
    (folder / "step-000004" / ckpt.STATE_FILE).write_bytes(b"no meta.json yet")
    assert ckpt.find_last(tmp_path) == folder / "step-000002"
    (folder / "last").unlink()  # killed between the rename and the link
    assert ckpt.find_last(tmp_path) == folder / "step-000002"
    (folder / "last").symlink_to("step-000009")
    assert ckpt.find_last(tmp_path) == folder / "step-000002"


def test_a_leftover_of_the_same_step_is_replaced(training: Any, tmp_path: Path) -> None:
    aside = tmp_path / "checkpoints" / ".step-000001.tmp"
    aside.mkdir(parents=True)
    (aside / "rubbish").write_text("x")
    saved(training, tmp_path, steps=(1,))
    assert names(tmp_path) == ["last", "step-000001"]
    assert sorted(p.name for p in (tmp_path / "checkpoints" / "step-000001").iterdir()) == ["meta.json", "state.pt"]


def test_a_run_without_checkpoints_has_no_last(tmp_path: Path) -> None:
    assert ckpt.find_last(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert ckpt.find_last(tmp_path) is None


def test_a_run_that_went_back_keeps_and_finds_what_it_wrote_itself(training: Any, tmp_path: Path) -> None:
    """Resumed from step 1 by path although step 3 exists: its own step 2 is the last, and is not pruned as old."""
    saved(training, tmp_path, steps=(1, 2, 3), keep=3)
    module = module_of(training, "finetune", start_step=1)
    checkpoint = tmp_path / "checkpoints" / "step-000001"
    module.on_start = lambda: ckpt.restore(ckpt.load_state(checkpoint), ckpt.read_meta(checkpoint), module)
    at_end(module, lambda: ckpt.save(tmp_path / "checkpoints", module, {}, keep=1))
    training.fit(module, [batch("finetune", 1)])
    assert ckpt.find_last(tmp_path) == tmp_path / "checkpoints" / "step-000002"
    assert "step-000001" not in names(tmp_path)


def test_a_checkpoint_of_another_card_method_or_seed_is_refused(tmp_path: Path) -> None:
    meta = ckpt.Meta(step=3, optimizer_steps=9, card_digest="a" * 64, card_name="wan21-tiny", method="finetune", seed=0)
    same = {"card_digest": "a" * 64, "card_name": "wan21-tiny", "method": "finetune", "seed": 0, "where": tmp_path}
    ckpt.check_meta(meta, **same)
    for change, message in (
        ({"card_digest": "b" * 64}, r"card: the checkpoint has wan21-tiny \(aaaaaaaaaaaa\).*\(bbbbbbbbbbbb\)"),
        ({"method": "diffusion_nft"}, "method: the checkpoint has finetune, this run has diffusion_nft"),
        ({"seed": 1}, "seed: the checkpoint has 0, this run has 1"),
    ):
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.check_meta(meta, **(same | change))
    with pytest.raises(ckpt.CheckpointError, match=r"card: .*method: .*seed: "):
        ckpt.check_meta(meta, card_digest="b" * 64, card_name="x", method="y", seed=2, where=tmp_path)


@pytest.mark.parametrize("content", [None, "not json", '{"step": 1}', "[1, 2]"])
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    with pytest.raises(ckpt.CheckpointError, match=f"{tmp_path.name} is not a checkpoint"):
        ckpt.read_meta(tmp_path)


def test_a_damaged_state_is_named(training: Any, tmp_path: Path) -> None:
    saved(training, tmp_path)
    checkpoint = ckpt.find_last(tmp_path)
    assert checkpoint is not None
    state = checkpoint / ckpt.STATE_FILE
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ckpt.CheckpointError, match=r"state\.pt cannot be read"):
        ckpt.load_state(checkpoint)


def test_a_state_loads_without_unpickling_code(training: Any, tmp_path: Path) -> None:
    saved(training, tmp_path)
    checkpoint = ckpt.find_last(tmp_path)
    assert checkpoint is not None
    assert set(torch.load(checkpoint / ckpt.STATE_FILE, weights_only=True)) == {
        "roles",
        "optimizers",
        "schedules",
        "method",
        "data",
    }
    assert json.loads((checkpoint / ckpt.META_FILE).read_text())["card_name"] == training.card.name


def test_a_resumed_run_takes_its_own_rate_betas_and_decay(training: Any, tmp_path: Path) -> None:
    def of(**settings: Any) -> Any:
        return training.module(Finetune(steps=4, batch_size=4, warmup=4, lr_schedule="cosine", **settings))

    first = of(lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    at_end(first, lambda: ckpt.save(tmp_path / "checkpoints", first, {}))
    training.fit(first, [batch("finetune", step) for step in range(2)])
    checkpoint = ckpt.find_last(tmp_path)
    assert checkpoint is not None

    second = of(lr=4e-3, betas=(0.5, 0.9), weight_decay=0.0)
    second.on_start = lambda: ckpt.restore(ckpt.load_state(checkpoint), ckpt.read_meta(checkpoint), second)
    kept: dict[str, Any] = {}
    at_end(second, lambda: kept.update(second.role_optimizers()["student"].param_groups[0]))
    tail = training.fit(second, [batch("finetune", 2)])

    assert [row["train/lr"] for row in tail] == [4e-3 * second.method.lr_factor(2, steps=4)]
    assert (kept["betas"], kept["weight_decay"]) == ((0.5, 0.9), 0.0)
    assert kept["lr"] == 4e-3 * second.method.lr_factor(3, steps=4)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"ema": None}, "roles: the checkpoint has ema, student, this run has student"),
        ({"ema": 0.9, "lora": LORA}, "weights of student: .* differ in name or shape"),
    ],
)
def test_other_roles_or_adapters_are_refused_in_one_message(
    training: Any, tmp_path: Path, method: dict[str, Any], message: str
) -> None:
    saved(training, tmp_path)
    checkpoint = ckpt.find_last(tmp_path)
    assert checkpoint is not None
    module = training.module(Finetune(lr=1e-2, steps=4, batch_size=4, **method))
    module.on_start = lambda: ckpt.restore(ckpt.load_state(checkpoint), ckpt.read_meta(checkpoint), module)
    with pytest.raises(ckpt.CheckpointError, match=message):
        training.fit(module, [batch("finetune", 0)])


def test_weight_change_is_the_largest_difference_to_the_source(training: Any) -> None:
    from methods.roles import STUDENT

    module = training.module(make("finetune"))
    with torch.no_grad():
        module.roles.parameters_of(STUDENT)["proj_out.weight"][2, 3] += 0.25
    state = ckpt.gather_roles(module)[STUDENT]
    change = ckpt.weight_change(training.card, state, STUDENT, None)
    assert change == {"transformer": pytest.approx(0.25, abs=1e-6)}
