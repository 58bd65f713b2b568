"""Rollouts by an engine process: in step they are this process' own to the bit; a step ahead they are those of a plain
loop that remembers the weights of every step. On a tiny random Wan."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cards.errors import UserError
from cards.unified.card import card_from_folder
from fastvideo_train import checkpoint as ckpt
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.rollouts import AsyncRollouts, InProcessRollouts, ProcessRollouts
from inference.remote.process import EngineProcess
from inference.request import Request
from methods.diffusion_nft import DiffusionNFT
from methods.method import Context, Method, Update
from methods.rewards.callable_reward import CallableReward
from methods.roles import OLD, STUDENT
from methods.rollout import RolloutPlan, RolloutRunner, Sampled, rollout_requests, rollout_seeds
from methods.rollout_process import BEHAVIOUR, Asynchronous, RolloutsLost, SeparateProcess
from methods.unirl import UniRL
from methods.world import World
from tests.support.tiny_unified import save_tiny_unified

STEPS = 4
PROMPTS = ("a red circle", "the blue square moves left", "a green triangle", "a red triangle moves right")


def red_minus_blue(videos: Any, prompts: Any, metadata: Any) -> list[float]:
    """A reward by dotted path."""
    return [float(np.mean(video[..., 0].astype(float) - video[..., 2])) for video in videos]


def batch_at(step: int) -> list[Prompt] | None:
    return [Prompt(PROMPTS[(step + i) % len(PROMPTS)]) for i in range(2)] if step < STEPS else None


def nft(**options: Any) -> DiffusionNFT:
    settings: dict[str, Any] = {
        "lr": 2e-3,
        "steps": STEPS,
        "batch_size": 2,
        "samples": 2,
        "rollout_steps": 2,
        "timesteps": 2,
        "updates": 2,
        "kl": 0.0,
        "eta": 0.5,
        "ema": 0.5,
    }
    return DiffusionNFT(**(settings | options))


class Pull(Method):
    """Rolls out the student itself, and draws its samples towards zero by their recorded path."""

    name = "pull"
    rolls_out = True

    def roles(self) -> tuple[str, ...]:
        return ()

    def rollout_plan(self, batch: Sequence[Any], step: int, *, seed: int, world: World) -> RolloutPlan:
        seeds = rollout_seeds(seed, step, range(len(batch)), 1)
        return RolloutPlan(
            STUDENT, rollout_requests([p.text for p in batch], seeds, steps=2, solver="euler", guidance=1.0)
        )

    def updates(self, batch: Sequence[Any], step: int, ctx: Context) -> Iterator[Update]:
        from methods.forward import encode_prompts, velocity

        plan = self.rollout_plan(batch, step, seed=ctx.seed, world=ctx.world)
        sampled = ctx.rollouts.roll_out(plan.requests, role=plan.role, step=step)
        assert sampled.role is None
        x0 = torch.stack([artifact.latents for artifact in sampled.artifacts])
        student = ctx.roles.instance(STUDENT)
        text = encode_prompts(ctx.engine, student, [prompt.text for prompt in batch])
        loss = velocity(student, x0, torch.full((len(batch),), 0.5), text, gradient=True).square().mean()
        yield Update(loss, step=True, metrics={"train/loss": loss.item(), "train/x0": x0.abs().sum().item()})


def unirl(**options: Any) -> UniRL:
    """Two models that move, or the language model alone."""
    settings: dict[str, Any] = {
        "lr": 3e-3,
        "lm_lr": 3e-3,
        "steps": STEPS,
        "batch_size": 2,
        "samples": 3,
        "num_skip_refinement": 1,
        "max_tokens": 5,
        "format": "ended",
        "rollout_steps": 2,
        "num_sde": 1,
    }
    return UniRL(**(settings | options))


@pytest.fixture(scope="module")
def unified(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Training parts of a card with a prompt refiner."""
    made = copy.copy(training)
    made.folder = save_tiny_unified(
        training.folder, tmp_path_factory.mktemp("unified") / "card", initializer_range=0.1, tie_word_embeddings=True
    )
    card = card_from_folder(made.folder)
    made.card = card.model_copy(update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 12})})
    return made


class Kept(EngineProcess):
    """One process for all tests: closing it only makes it forget its models."""

    def close(self) -> None:
        if self._flight is not None:
            self.results()
        self._hosted, self._known = {}, {}

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def process() -> Iterator[Kept]:
    made = Kept()
    made.start()
    yield made
    made.end()


REWARD = f"{__name__}.red_minus_blue"


def make_module(
    training: Any, method: Method, settings: Any, process: EngineProcess | None = None, **options: Any
) -> Any:
    module = training.module(
        method, reward=CallableReward(function=REWARD), rollouts=settings, batch_at=batch_at, **options
    )
    if process is not None:
        assert isinstance(module.rollouts, SeparateProcess)
        module.rollouts.process = process
    return module


def fit(training: Any, module: Any, steps: int = STEPS) -> list[dict[str, float]]:
    return training.fit(module, [batch_at(step) for step in range(module.step_index, steps)])


def weights(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.roles.state_dict().items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def without_staleness(rows: list[dict[str, float]]) -> list[dict[str, str]]:
    """To the last digit, as words: NaN is NaN."""
    return [{name: repr(value) for name, value in row.items() if name != "train/staleness"} for row in rows]


# -- in step


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 2}, "kl": 0.1}], ids=["full", "lora"])
def test_a_separate_process_changes_no_bit_of_a_run(training: Any, process: Kept, options: dict[str, Any]) -> None:
    plain = make_module(training, nft(**options), InProcessRollouts())
    expected = fit(training, plain)
    apart = make_module(training, nft(**options), ProcessRollouts(), process)
    rows = fit(training, apart)
    assert without_staleness(rows) == without_staleness(expected)
    assert [row["train/staleness"] for row in rows] == [0.0] * STEPS and "train/staleness" not in expected[0]
    assert_same(weights(apart), weights(plain))
    first = dict(training.module(nft(**options), reward=None).roles.state_dict())
    assert any(not torch.equal(value, first[name]) for name, value in weights(apart).items()), "nothing was trained"


# -- a step ahead


def own(roles: Any, role: str) -> dict[str, Tensor]:
    """A role's own weights of all its components, under names that all roles have."""
    joined = {cid: roles[name] for cid, name in roles.joined(role).items()}
    further = {f"{cid}.{key}": p for cid, part in joined.items() for key, p in part.named_parameters()}
    return {**roles.parameters_of(role), **further}


class Remembering(RolloutRunner):
    """What one-step-old rollouts are, said plainly: the weights of every step are remembered, and step t samples by
    those of step max(0, t - 1), which also stand in the role ``behaviour`` while it trains."""

    def __init__(self, module: Any):
        self.module = module
        self.past: list[dict[str, Tensor]] = []

    def roll_out(self, requests: Sequence[Request], *, role: str, step: int) -> Sampled:
        roles = self.module.roles
        self.past.append({key: p.detach().clone() for key, p in own(roles, role).items()})
        version = max(0, step - 1)
        for key, parameter in own(roles, BEHAVIOUR).items():
            parameter.data.copy_(self.past[version][key])
        roles.changed(BEHAVIOUR)
        artifacts = self.module.engine.run_interleaved(requests, roles.instance(BEHAVIOUR))
        return Sampled(artifacts, None if role == STUDENT else BEHAVIOUR, version)


METHODS = {
    "nft": lambda: nft(),
    "nft-lora": lambda: nft(lora={"rank": 2}),
    "student": lambda: Pull(lr=1e-2, steps=STEPS, batch_size=2),
    "unirl": lambda: unirl(),
    "unirl-prompt-only": lambda: unirl(mode="prompt_only"),
}


@pytest.mark.parametrize("name", list(METHODS))
def test_asynchronous_rollouts_are_those_of_the_weights_of_the_step_before(
    training: Any, unified: Any, process: Kept, name: str
) -> None:
    training = unified if name.startswith("unirl") else training
    plain = make_module(training, METHODS[name](), AsyncRollouts())
    plain.rollouts = Remembering(plain)
    expected = fit(training, plain)
    ahead = make_module(training, METHODS[name](), AsyncRollouts(), process)
    rows = fit(training, ahead)
    assert without_staleness(rows) == without_staleness(expected)
    assert [row["train/staleness"] for row in rows] == [0.0] + [1.0] * (STEPS - 1)
    ours, theirs = weights(ahead), weights(plain)
    kept = {key for key in ours if BEHAVIOUR in key}  # it is of the next step already
    assert kept
    assert_same({k: v for k, v in ours.items() if k not in kept}, {k: v for k, v in theirs.items() if k not in kept})

    synchronous = make_module(training, METHODS[name](), InProcessRollouts())
    others = fit(training, synchronous)
    assert [row["train/loss"] for row in others[:1]] == [row["train/loss"] for row in rows[:1]]
    assert all(a["train/loss"] != b["train/loss"] for a, b in zip(others[2:], rows[2:], strict=True))


@pytest.mark.parametrize("name", ["nft", "student"])
def test_a_run_that_goes_on_from_a_checkpoint_samples_the_batch_under_way_again(
    training: Any, process: Kept, tmp_path: Path, name: str
) -> None:
    whole = make_module(training, METHODS[name](), AsyncRollouts(), process)
    expected = fit(training, whole)
    for done in (1, 3):
        begun = make_module(training, METHODS[name](), AsyncRollouts(), process)
        folder = tmp_path / f"{name}-{done}"
        begun.on_step = lambda step, metrics, m=begun, f=folder, d=done: ckpt.save(f, m, {}) if step == d else None
        fit(training, begun, done)  # which leaves the next step's batch under way
        process.close()
        resumed = make_module(training, METHODS[name](), AsyncRollouts(), process)
        checkpoint = folder / "last"

        def restore(module: Any = resumed, checkpoint: Path = checkpoint) -> None:
            ckpt.restore(ckpt.load_state(checkpoint), ckpt.read_meta(checkpoint), module)

        resumed.step_index = done
        resumed.on_start = restore
        assert fit(training, resumed) == expected[done:]
        assert_same(weights(resumed), weights(whole))


def test_a_second_rollout_in_a_step_is_refused(training: Any, process: Kept) -> None:
    module = make_module(training, nft(), AsyncRollouts(), process)
    assert isinstance(module.rollouts, Asynchronous)
    plan = module.method.rollout_plan(batch_at(0), 0, seed=0, world=World())
    module.rollouts.ahead = lambda step: module.method.rollout_plan(batch_at(step), step, seed=0, world=World())
    module.rollouts.roll_out(plan.requests, role=OLD, step=0)
    with pytest.raises(UserError, match="rolls out once a step"):
        module.rollouts.roll_out(plan.requests, role=OLD, step=0)
    process.close()


# -- a process that dies


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ProcessRollouts(), AsyncRollouts()], ids=["process", "async"])
def test_a_death_is_survived_with_the_same_bits_and_a_second_one_ends_the_run(training: Any, settings: Any) -> None:
    whole = make_module(training, nft(), settings)
    expected = fit(training, whole)
    module = make_module(training, nft(), settings)

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            os.kill(module.rollouts.process.pid, signal.SIGKILL)

    module.on_step = kill
    assert fit(training, module) == expected
    assert module.rollouts.deaths == 1 and whole.rollouts.deaths == 0
    assert_same(weights(module), weights(whole))
    assert module.rollouts.process.pid is None

    strict = make_module(training, nft(), type(settings)(restarts=0))
    module = strict
    strict.on_step = kill
    with pytest.raises(RolloutsLost, match=r"signal 9.*first time.*resume=auto"):
        fit(training, strict)
    strict.rollouts.close()
