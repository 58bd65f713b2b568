"""Rejection-sampling finetune: what is kept by closed form, and the gradient that the kept samples give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cards.errors import UserError
from fastvideo_train.data.prompts import Prompt
from methods.method import Update
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.rft import RFT, kept_mask
from methods.roles import OLD, STUDENT
from methods.rollout import roll_out, rollout_seeds
from methods.world import World

NAN = math.nan
TABLE = [[0.1, 0.9, 0.4, 0.9], [NAN, -2.0, NAN, 5.0], [3.0, 3.0, 3.0, 3.0], [7.0, NAN, NAN, NAN]]


class TableReward(Reward):
    name = "table"
    version = "1"

    def __init__(self, values: Any):
        self.values = np.asarray(values, dtype=np.float64).reshape(-1)

    def score(self, batch: RewardBatch) -> Scores:
        return Scores(values=self.values, reasons=("no face found",))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # Equal rewards and a single score say nothing of which is better; of equal ones the earlier is kept.
        ({"keep": "best"}, ["0100", "0001", "0000", "0000"]),
        ({"keep": "best", "best": 2}, ["0101", "0101", "0000", "0000"]),
        ({"keep": "best", "best": 3}, ["0111", "0101", "0000", "0000"]),
        # 11 scored samples; 3 of them are a quarter, rounded up: 7, 5 and the first 3.
        ({"keep": "top", "share": 0.25}, ["0000", "0001", "1000", "1000"]),
        ({"keep": "top", "share": 1e-6}, ["0000", "0000", "0000", "1000"]),
        ({"keep": "threshold", "threshold": 0.9}, ["0101", "0001", "1111", "1000"]),
        ({"keep": "threshold", "threshold": -3.0}, ["1111", "0101", "1111", "1000"]),
        ({"keep": "threshold", "threshold": 8.0}, ["0000"] * 4),
    ],
)
def test_what_is_kept(rule: dict[str, Any], expected: list[str]) -> None:
    got = ["".join(map(str, row.astype(int))) for row in kept_mask(TABLE, **rule)]
    assert got == expected


def test_a_share_is_not_rounded_up_for_a_float() -> None:
    assert kept_mask([list(range(10))], keep="top", share=0.3).sum() == 3  # 0.3 * 10 is 3.0000000000000004 in places
    assert kept_mask([list(range(100))], keep="top", share=0.07).sum() == 7  # and this one is 7.000000000000001


def test_equal_rewards_of_a_whole_step_keep_nothing_but_by_threshold() -> None:
    equal = np.full((2, 3), 0.7)
    assert not kept_mask(equal, keep="best").any()
    assert not kept_mask(equal, keep="top", share=0.5).any()
    assert kept_mask(equal, keep="threshold", threshold=0.7).all()
    with pytest.raises(UserError, match=r"unknown keep of method rft 'most'.*best, threshold, top"):
        kept_mask(equal, keep="most")  # type: ignore[arg-type]


# -- in training

CONTROL = {"lr": 1e-2, "steps": 4, "batch_size": 2, "weight_decay": 0.0, "micro_batch": 5}


def rft(**options: Any) -> RFT:
    small = {"samples": 4, "rollout_steps": 3, "updates": 1, "draws": 3, "caption_dropout": 0.0}
    return RFT(**(CONTROL | small | options))


def prompts(count: int = 2) -> list[Prompt]:
    return [Prompt(("a red circle moves left", "the blue square")[i % 2]) for i in range(count)]


def descend(method: RFT, batch: Any, step: int, ctx: Any) -> list[Update]:
    updates = []
    for update in method.updates(batch, step, ctx):
        if update.loss is not None:
            update.loss.backward()
        updates.append(update)
    return updates


def metrics(updates: list[Update]) -> dict[str, float]:
    total: dict[str, float] = {}
    for update in updates:
        for name, value in update.metrics.items():
            total[name] = total.get(name, 0.0) + value
    return total


def test_the_kept_samples_get_the_gradient_of_flow_matching_and_no_other_does(training: Any) -> None:
    method = rft(best=2, keep="best")
    ctx = training.context(method, TableReward(TABLE[:2]))
    rows: list[tuple[torch.Tensor, ...]] = []

    def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if output[0].requires_grad:
            seen = (kwargs["hidden_states"], kwargs["timestep"], output[0].detach())
            output[0].register_hook(lambda gradient: rows.extend(zip(*seen, gradient, strict=True)))

    ctx.roles[STUDENT].register_forward_hook(keep, with_kwargs=True)
    updates = descend(method, prompts(), 3, ctx)

    texts = [prompt.text for prompt in prompts() for _ in range(4)]
    seeds = rollout_seeds(0, 3, range(2), 4)
    student = ctx.roles.instance(STUDENT)
    x0_N = roll_out(ctx.engine, student, texts, seeds, steps=3, solver="euler", guidance=1.0).x0_NCTHW
    kept = [1, 3, 5, 7]
    assert len(rows) == 4 * 3  # each kept sample at three noise levels
    losses = []
    for index, (x_s, timestep, v, gradient) in enumerate(rows):
        x0, sigma = x0_N[kept[index % 4]], timestep.item() / 1000
        noise = (x_s - (1 - sigma) * x0) / sigma
        assert abs(noise.mean()) < 0.5 and 0.7 < noise.std() < 1.3  # it is this sample that was noised
        expected = 2 * (v - (noise - x0)) / x0.numel() / 12
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)
        losses.append((v - (noise - x0)).square().mean().item())
    assert len({round(row[1].item(), 3) for row in rows}) == 12  # each row has a noise level of its own
    logged = metrics(updates)
    assert logged["train/loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert logged["train/reward_kept"] == pytest.approx(np.mean([0.9, 0.9, -2.0, 5.0]))
    assert logged["train/reward"] == pytest.approx(np.nanmean(TABLE[:2]))
    assert (logged["train/kept"], logged["train/reward_failed"], logged["train/groups_without_signal"]) == (4, 2, 0)
    assert [update.step for update in updates if update.loss is not None] == [False, False, True]


def test_equal_rewards_move_nothing(training: Any) -> None:
    method = rft()
    module = training.module(method, reward=TableReward(np.full(8, 0.3)))
    before = {key: p.detach().clone() for key, p in module.roles.parameters_of(STUDENT).items()}
    rows = training.fit(module, [prompts()])
    assert all(torch.equal(p, before[key]) for key, p in module.roles.parameters_of(STUDENT).items())
    assert rows[0]["train/kept"] == 0 and math.isnan(rows[0]["train/reward_kept"])
    assert rows[0]["train/groups_without_signal"] == 1 and module.optimizer_steps == 0


def test_updates_are_optimizer_steps_with_noise_of_their_own(training: Any) -> None:
    module = training.module(rft(updates=2, eta=0.5), reward=TableReward(TABLE[:2]))
    before = {key: p.detach().clone() for key, p in module.roles.parameters_of(OLD).items()}
    training.fit(module, [prompts()])
    assert module.optimizer_steps == 2
    student, old = (module.roles.parameters_of(role) for role in (STUDENT, OLD))
    moved = 0.0
    for key, p in old.items():
        torch.testing.assert_close(p.detach(), 0.5 * before[key] + 0.5 * student[key].detach())
        moved = max(moved, (p - before[key]).abs().max().item())
    assert moved > 1e-4


def test_the_policy_is_the_student_or_one_that_follows_it() -> None:
    world = World()
    on, off = rft(), rft(eta=0.9)
    assert (on.roles(), off.roles()) == ((), (OLD,))
    assert on.rollout_plan(prompts(), 0, seed=0, world=world).role == STUDENT
    plan = off.rollout_plan(prompts(), 0, seed=0, world=world)
    assert plan.role == OLD and len(plan.requests) == 8


def test_every_process_has_as_many_rows_and_they_weigh_what_one_process_gives_them() -> None:
    method = rft(draws=2)
    kept_GK = np.array([[1, 1, 0, 1], [0, 0, 0, 0]], dtype=bool)
    first, weights = method._rows(kept_GK, World(0, 2))
    second, none = method._rows(kept_GK, World(1, 2))
    assert first == [(0, 0), (1, 0), (3, 0), (0, 1), (1, 1), (3, 1)] and weights == [1.0] * 6
    assert second == [(0, 0)] * 6 and none == [0.0] * 6
    kept_GK[1, 2] = True
    assert method._rows(kept_GK, World(1, 2)) == ([(2, 0), (2, 1)] + [(2, 0)] * 4, [1.0] * 2 + [0.0] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 1}, "samples: got 1"),
        ({"keep": "most"}, "keep: got 'most', expected one of best, top, threshold"),
        ({"best": 4}, "best: got 4, expected 1 .. samples - 1 = 3"),
        ({"best": 0}, "best: got 0"),
        ({"keep": "top", "share": 0.0}, "share: got 0.0"),
        ({"keep": "top", "share": 1.0}, "share: got 1.0"),
        ({"threshold": NAN}, "threshold: got nan"),
        ({"eta": 1.0}, "eta: got 1.0"),
        ({"updates": 0}, "updates: got 0"),
        ({"draws": 0}, "draws: got 0"),
        ({"solver": "nothing"}, "solver: got 'nothing'"),
        ({"rollout_steps": 0}, "rollout_steps: got 0"),
        ({"caption_dropout": 2.0}, "caption_dropout: got 2.0"),
    ],
)
def test_bad_input_is_named(training: Any, options: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in rft(**options).problems(training.card, 1))
    assert rft().problems(training.card, 1) == []


def test_a_card_with_a_ladder_is_refused(training: Any) -> None:
    name, loop = next((name, loop) for name, loop in training.card.loops.items() if loop.schedule.ladder is None)
    schedule = loop.schedule.model_copy(update={"ladder": (1.0, 0.5)})
    loops = {**training.card.loops, name: loop.model_copy(update={"schedule": schedule})}
    card = training.card.model_copy(update={"loops": loops})
    assert any("ladder" in problem for problem in rft().problems(card, 1))


def test_a_step_that_nobody_scores_stops_the_run(training: Any) -> None:
    ctx = training.context(rft(), TableReward([NAN] * 8))
    with pytest.raises(UserError, match=r"failed on all 8 samples of the step; first reasons: no face found"):
        descend(rft(), prompts(), 0, replace(ctx))


def test_a_card_that_diffusion_nft_made_is_warned_of(training: Any) -> None:
    card = training.card
    made = card.model_copy(update={"recipe": card.recipe.model_copy(update={"method": "diffusion_nft"})})
    assert rft().cautions(card) == []
    (caution,) = rft().cautions(made)
    assert "made by diffusion_nft" in caution and "0022" in caution
