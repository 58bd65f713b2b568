"""Flow-GRPO end to end on a tiny random Wan: which samples move the student and how, and what is refused.

Legend: G groups, K samples a group, N = G K.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cards.card import Schedule
from cards.errors import UserError
from cards.registry import family
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.module import ParityError
from methods.flow_grpo import FlowGRPO
from methods.method import Update
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.roles import REFERENCE, STUDENT
from methods.sde_policy import log_probs, roll_out_paths
from methods.world import World

PROMPTS = ("a red circle", "the blue square moves left", "a green triangle")
NAN = math.nan


class TableReward(Reward):
    """Scores by a table: value i for sample i of a step. Keeps what it was shown."""

    name = "table"
    version = "1"

    def __init__(self, values: Any):
        self.values = np.asarray(values, dtype=np.float64).reshape(-1)
        self.seen: list[RewardBatch] = []

    def score(self, batch: RewardBatch) -> Scores:
        self.seen.append(batch)
        return Scores(values=self.values, reasons=("no face found",) if np.isnan(self.values).any() else ())


class RednessReward(Reward):
    """Red less green of a clip: differs between samples."""

    name = "redness"
    version = "1"

    def score(self, batch: RewardBatch) -> Scores:
        videos = [np.asarray(video, dtype=np.float64) for video in batch.videos_BFHWC]
        return Scores(values=np.array([v[..., 0].mean() - v[..., 1].mean() for v in videos]))


def grpo(**options: Any) -> FlowGRPO:
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "steps": 4,
        "batch_size": 2,
        "samples": 4,
        "rollout_steps": 3,
        "micro_batch": 5,
        "weight_decay": 0.0,
    }
    return FlowGRPO(**(settings | options))


def prompts(count: int = 2) -> list[Prompt]:
    return [Prompt(PROMPTS[i % len(PROMPTS)]) for i in range(count)]


def descend(method: FlowGRPO, ctx: Any, step: int = 0) -> tuple[dict[str, float], list[Update]]:
    """Metrics and updates of a step, whose losses are descended without any optimizer."""
    metrics: dict[str, float] = {}
    updates = []
    for update in method.updates(prompts(), step, ctx):
        if update.loss is not None:
            update.loss.backward()
        for name, value in update.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
        updates.append(update)
    return metrics, updates


def gradients(ctx: Any) -> dict[str, Tensor]:
    found = {
        key: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for key, p in ctx.roles.parameters_of(STUDENT).items()
        if p.requires_grad
    }
    for p in ctx.roles.parameters_of(STUDENT).values():
        p.grad = None
    return found


def move(ctx: Any, role: str, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in ctx.roles.parameters_of(role).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    ctx.roles.changed(role)


# -- the gradient


def test_samples_of_a_prompt_may_start_at_the_same_latents() -> None:
    plan = grpo(same_latent=True).rollout_plan(prompts(), 3, seed=0, world=World())
    apart = grpo().rollout_plan(prompts(), 3, seed=0, world=World())
    samples = len(plan.requests) // 2
    assert [request.seed for request in plan.requests] == [
        apart.requests[i - i % samples].seed for i in range(2 * samples)
    ]
    assert [request.sde.seed for request in plan.requests if request.sde] == [r.seed for r in apart.requests]


@pytest.mark.parametrize(
    "options",
    [{}, {"guidance": 2.0}, {"sde": "dance", "level": 0.3, "window": [0, 2]}, {"same_latent": True}],
)
def test_from_rewards_to_the_policy_gradient_of_the_samples_that_count(training: Any, options: dict[str, Any]) -> None:
    """-mean A grad log-prob over the noisy steps, without the failed sample and the group whose rewards are equal."""
    table = np.array([[0.1, 0.9, NAN, 0.3], [0.5, 0.5, 0.5, 0.5]])
    method = grpo(advantage_std="group", **options)
    ctx = training.context(method, TableReward(table))
    metrics, _ = descend(method, ctx, step=3)
    found = gradients(ctx)

    known = np.array([0.1, 0.9, 0.3])
    a = torch.from_numpy((known - known.mean()) / (known.std() + 1e-4)).float()
    student = ctx.roles.instance(STUDENT)
    plan = method.rollout_plan(prompts(), 3, seed=0, world=World())
    assert plan.role == STUDENT
    _, paths = roll_out_paths(ctx.engine, student, plan.requests)
    for k in range(paths.steps):
        log_prob = log_probs(student, paths, [(0, k), (1, k), (3, k)], gradient=True)
        (-(a * log_prob).sum() / (3 * paths.steps)).backward()
    expected = gradients(ctx)
    scale = max(g.abs().max().item() for g in expected.values())
    assert scale > 0
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4 * scale)
    assert metrics["train/reward"] == pytest.approx(np.nanmean(table))
    assert metrics["train/reward_failed"] == 1
    assert metrics["train/groups_without_signal"] == 0.5
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-6)  # group advantages sum to 0
    assert metrics["parity/log_prob"] <= 1e-6


@pytest.mark.parametrize("scope", ["batch", "group"])
def test_equal_rewards_move_nothing_and_take_no_optimizer_step(training: Any, scope: Any) -> None:
    method = grpo(advantage_std=scope)
    module = training.module(method, reward=TableReward(np.full(8, 0.1)))
    first = {key: p.detach().clone() for key, p in module.roles.parameters_of(STUDENT).items()}
    (row,) = training.fit(module, [prompts()])
    assert all(torch.equal(first[key], p) for key, p in module.roles.parameters_of(STUDENT).items())
    assert row["train/groups_without_signal"] == 1.0
    assert module.optimizer_steps == 0 and "train/loss" not in row


def test_a_failed_sample_is_no_zero(training: Any) -> None:
    """Its group goes on without it, as if it had never been drawn; a reward of 0 in its place would be another step."""
    found = []
    for value in (NAN, 0.0):
        method = grpo(advantage_std="group")
        ctx = training.context(method, TableReward([[0.4, 0.9, 0.6, value], [1.0, 0.0, 0.5, 0.2]]))
        descend(method, ctx)
        found.append(gradients(ctx))
    assert any(not torch.allclose(found[0][key], found[1][key], rtol=1e-3) for key in found[0])


def test_a_step_on_which_every_reward_failed_stops_with_the_reason(training: Any) -> None:
    method = grpo()
    ctx = training.context(method, TableReward(np.full(8, NAN)))
    with pytest.raises(UserError, match=r"'table' failed on all 8 samples.*no face found"):
        descend(method, ctx)


def test_the_reward_sees_the_rollouts_and_the_prompts_in_groups(training: Any) -> None:
    method, reward = grpo(), TableReward(np.arange(8))
    ctx = training.context(method, reward)
    descend(method, ctx)
    (seen,) = reward.seen
    assert list(seen.prompts) == [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4
    plan = method.rollout_plan(prompts(), 0, seed=0, world=World())
    artifacts, _ = roll_out_paths(ctx.engine, ctx.roles.instance(STUDENT), plan.requests)
    for video, artifact in zip(seen.videos_BFHWC, artifacts, strict=True):
        assert np.array_equal(video, artifact.frames_FHWC())


def test_the_kl_pulls_to_the_base_and_none_keeps_no_reference(training: Any) -> None:
    assert grpo().roles() == () and grpo(kl=0.1).roles() == (REFERENCE,)
    table = TableReward([0, 1, 2, 3, 4, 9, 1, 0])
    found, kls = [], []
    for kl in (0.0, 0.5):
        method = grpo(kl=kl)
        ctx = training.context(method, table)
        move(ctx, STUDENT, 0.01)
        metrics, _ = descend(method, ctx)
        kls.append(metrics.get("train/kl"))
        found.append(gradients(ctx))
    assert kls[0] is None and kls[1] is not None and kls[1] > 0
    # Against the direction in which the student went away from its base.
    generator = torch.Generator().manual_seed(7)
    away = {
        key: 0.01 * torch.randn(p.shape, generator=generator) for key, p in ctx.roles.parameters_of(STUDENT).items()
    }
    assert sum(((found[1][key] - found[0][key]) * away[key]).sum().item() for key in away) > 0


# -- a run


def test_the_log_probs_of_what_was_good_rise(training: Any) -> None:
    """One step on one batch: the paths that were better than their group's mean are likelier after it, and the reward
    is what says which."""
    table = np.array([[0.0, 1.0, 0.2, 0.9], [5.0, 1.0, 2.0, 4.0]])
    method = grpo(lr=1e-3, advantage_std="group", clip_range=0.1)
    module = training.module(method, reward=TableReward(table))
    student = module.roles.instance(STUDENT)
    plan = method.rollout_plan(prompts(), 0, seed=0, world=World())
    _, paths = roll_out_paths(module.engine, student, plan.requests)
    training.fit(module, [prompts()])
    a_GK = (table - table.mean(1, keepdims=True)) / table.std(1, keepdims=True)
    pairs = [(n, k) for n in range(8) for k in range(paths.steps)]
    moved = log_probs(student, paths, pairs, gradient=False) - paths.rolled_out(pairs)
    gain = (torch.from_numpy(a_GK.reshape(-1, 1)) * moved.reshape(8, -1)).mean().item()
    assert gain > 1e-4


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_several_updates_an_iteration_train_and_are_watched(training: Any, lora: Any) -> None:
    method = grpo(updates=3, kl=0.01, ema=0.9, lora=lora, clip_range=1e-6)
    module = training.module(method, reward=RednessReward(), parity_every=1)
    rows = training.fit(module, [prompts()] * 2)
    assert module.optimizer_steps == 6
    for row in rows:
        assert row["parity/c2"] == 0.0 and row["parity/c2_log_prob"] == 0.0 and row["parity/log_prob"] <= 1e-6
        assert row["train/ratio_deviation_max"] > 1e-6
        assert 0 < row["train/clip_fraction"] < 0.67  # the first of three is never clipped
        assert row["train/approx_kl"] > 0 and row["train/kl"] >= 0
        assert row["train/grad_norm"] > 0 and math.isfinite(row["train/loss"])


def test_the_gate_stops_a_run_whose_forwards_differ(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import methods.sde_policy as policy

    module = training.module(grpo(), reward=RednessReward(), parity_every=1)
    plain = policy.guided_velocity

    def off(*args: Any, **options: Any) -> Tensor:
        return plain(*args, **options) * 1.001

    monkeypatch.setattr(policy, "guided_velocity", off)
    with pytest.raises(ParityError, match=r"log-probs of a rollout"):
        training.fit(module, [prompts()])


def test_rollouts_of_an_older_student_are_weighed_by_the_rollouts_own_log_probs(training: Any) -> None:
    from methods.rollout import InProcess, Sampled

    method = grpo()
    ctx = training.context(method, RednessReward())

    class Late(InProcess):
        """What the student of a step before sampled."""

        def roll_out(self, requests: Any, *, role: str, step: int) -> Sampled:
            sampled = super().roll_out(requests, role=role, step=step)
            move(ctx, STUDENT, 1e-3)
            return Sampled(sampled.artifacts, None, step - 1)

    object.__setattr__(ctx, "rollouts", Late(ctx.engine, ctx.roles))
    metrics, _ = descend(method, ctx, step=1)
    assert metrics["train/ratio_deviation_max"] > 1e-5


# -- what is refused


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"samples": 1}, "samples: got 1, expected at least 2"),
    ({"clip_range": 0.0}, "clip_range: got 0.0"),
    ({"kl": -1.0}, "kl: got -1.0"),
    ({"a_max": 0.0}, "a_max: got 0.0"),
    ({"advantage_std": "world"}, "advantage_std: got 'world', expected one of batch, group"),
    ({"updates": 2}, "updates: got 2, expected a divisor of the 3 steps"),
    ({"updates": 0}, "updates: got 0"),
    ({"updates": 3, "guidance": 2.0}, "updates: got 3 with guidance=2.0, expected 1"),
    ({"timesteps": 4}, "timesteps: got 4, expected 1 .. 3"),
    ({"timesteps": 2, "window": [1, 2]}, "timesteps: got 2, expected 1 .. 1"),
    ({"timesteps": 0}, "timesteps: got 0"),
    ({"sde": "flwo"}, "'flwo'; expected one of: cps, dance, flow"),
    ({"level": 0.0}, "sde level: got 0.0"),
    ({"window": [2, 5]}, r"sde window: got \(2, 5\)"),
    ({"window": 3}, "sde window: got 3"),
    ({"window": [1]}, r"sde window: got \(1,\)"),
    ({"guidance": -1.0}, "guidance: got -1.0"),
    ({"rollout_steps": 0}, "steps: got 0"),
)


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused_with_what_was_got(training: Any, options: dict[str, Any], message: str) -> None:
    import re

    problems = grpo(**options).problems(training.card, 1)
    assert any(re.search(message, problem) for problem in problems), problems


def test_good_options_have_no_problems(training: Any) -> None:
    assert grpo().problems(training.card, 2) == []
    assert grpo(window=[1, 3], timesteps=2, updates=2, sde="cps", level=1.0).problems(training.card, 1) == []


def test_cards_whose_loop_takes_no_noise_are_refused(training: Any) -> None:
    loop = training.card.loops["denoise"]
    few = training.card.derive(
        loops={"denoise": loop.model_copy(update={"solver": "lcm", "schedule": Schedule(ladder=(1.0, 0.5))})}
    )
    assert any("ladder" in problem for problem in grpo().problems(few, 1))
    skipping = training.card.derive(loops={"denoise": loop.model_copy(update={"kind": "diffusion_denoise_skip"})})
    assert any("'diffusion_denoise_skip', expected none" in problem for problem in grpo().problems(skipping, 1))
    causal = family("wan_causal").card("tiny")
    assert any("chunk_rollout" in problem for problem in grpo().problems(causal, 1))
    assert ["which this method does not bring" in p for p in grpo().problems(family("wan21_i2v").card("14b"), 1)] == [
        True
    ]
