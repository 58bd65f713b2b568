"""The rewards of a step: several processes see what one would, whichever way rewards are put together."""

from __future__ import annotations

import numpy as np
import pytest

from cards.errors import UserError
from methods.advantages import group_advantages
from methods.rewards.callable_reward import CallableReward
from methods.rewards.combine import WeightedReward
from methods.rewards.reward import Reward
from methods.rewards.scoring import score_groups
from methods.rewards.tagged import TaggedReward
from methods.world import World

NAN = float("nan")
K = 3
A = [1.0, 2.0, 6.0, 4.0, 4.0, 4.0]
B = [10.0, 30.0, 50.0, 0.0, NAN, 70.0]
TAGS = ["a", "a", "b", "b", "b", "b"]


def score_a(videos, prompts, metadata):
    return [fields["a"] for fields in metadata]


def score_b(videos, prompts, metadata):
    return [fields["b"] for fields in metadata]


def _parts() -> dict[str, Reward]:
    return {name: CallableReward(function=f"{__name__}.score_{name}", name=name) for name in ("a", "b")}


def _weighted(normalise) -> WeightedReward:
    return WeightedReward(rewards=_parts(), weights={"a": 2.0, "b": 0.5}, normalise=normalise, eps=1e-12)


REWARDS = {
    "sum": _weighted("sum"),
    "each": _weighted("each"),
    "tagged": TaggedReward(rewards=_parts()),
    "tagged each": TaggedReward(rewards={"a": _weighted("each"), "b": _parts()["b"]}),
    "weighted tagged": WeightedReward(
        rewards={"t": TaggedReward(rewards=_parts()), "a": _parts()["a"]}, weights={"t": 1.0, "a": 1.0}
    ),
}
ROWS = [{"a": a, "b": b, "reward": tag} for a, b, tag in zip(A, B, TAGS, strict=True)]


class Recorder(World):
    """A rank of two that has what the other one sent."""

    def __new__(cls, sent, other, rank):
        return super().__new__(cls)

    def __init__(self, sent, other, rank):
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "size", 2)
        object.__setattr__(self, "sent", sent)
        object.__setattr__(self, "other", other)

    def gather(self, values):
        self.sent.append(values)
        tables = [values, self.other] if self.rank == 0 else [self.other, values]
        return np.concatenate(tables)


def _step(reward, rows, world):
    videos = np.zeros((len(rows), 1, 2, 2, 3), np.uint8)
    return score_groups(reward, videos, ["p"] * len(rows), rows, K, world)


@pytest.mark.parametrize("name", REWARDS)
def test_two_processes_see_what_one_does(name):
    reward = REWARDS[name]
    whole = _step(reward, ROWS, World())
    sent: list[np.ndarray] = []
    _step(reward, ROWS[K:], Recorder(sent, np.zeros((K, 1 + len(reward.part_names()))), 1))
    split = _step(reward, ROWS[:K], Recorder([], sent[0], 0))
    np.testing.assert_array_equal(split.rewards_GK, whole.rewards_GK)
    assert set(split.metrics) == set(whole.metrics)  # also where a rank has samples of one tag alone
    assert split.metrics["train/reward"] == whole.metrics["train/reward"]
    assert whole.metrics["train/reward_failed"] == 1


def test_each_is_a_sum_of_advantages_and_sum_an_advantage_of_the_sum():
    known = np.array([0, 1, 2, 3, 5])  # where both have a score
    a, b = np.array(A).reshape(-1, K), np.array(B).reshape(-1, K)
    rewards_GK = _step(REWARDS["each"], ROWS, World()).rewards_GK
    spread_a, spread_b = np.std(A), np.std(np.array(B)[known])
    got, valid = group_advantages(rewards_GK, std="batch", eps=1e-12)
    scale = np.std(rewards_GK[valid])
    raw = 2.0 * a / spread_a + 0.5 * b / spread_b
    expected = (raw - np.nanmean(raw, axis=1, keepdims=True)) / scale
    np.testing.assert_allclose(got[valid], expected[valid], rtol=1e-9)
    assert got[1, 1] == 0 and not valid[1, 1]
    summed = _step(REWARDS["sum"], ROWS, World()).rewards_GK
    np.testing.assert_allclose(summed, 2.0 * a + 0.5 * b)


def test_tagged_samples_are_compared_within_their_group():
    rows = [{"a": a, "b": b, "reward": tag} for a, b, tag in zip(A, [0, 0, 0, 100, 200, 300], "aaabbb", strict=True)]
    rewards_GK = _step(REWARDS["tagged"], rows, World()).rewards_GK
    np.testing.assert_allclose(rewards_GK, [[1, 2, 6], [100, 200, 300]])
    got, _ = group_advantages(rewards_GK, std="group", eps=1e-12)
    np.testing.assert_allclose(got[1], np.array([-1, 0, 1]) * np.sqrt(1.5), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got[0], (np.array([1, 2, 6]) - 3) / np.std([1, 2, 6]), rtol=1e-9)


def test_a_step_without_any_score_stops_the_run():
    rows = [{**row, "b": None} for row in ROWS]
    with pytest.raises(UserError, match=r"reward 'b' failed on all 6 samples"):
        _step(_parts()["b"], rows, World())


def test_a_reward_must_name_its_parts():
    class Nameless(CallableReward):
        def score(self, batch):
            scores = super().score(batch)
            scores.parts["x"] = scores.values
            return scores

    with pytest.raises(ValueError, match=r"got parts \['x'\], expected \[\]"):
        _step(Nameless(function=f"{__name__}.score_a"), ROWS, World())


def test_learned_is_what_any_part_is():
    fooled = CallableReward(function=f"{__name__}.score_a", learned=True)
    plain = _parts()["a"]
    assert not WeightedReward(rewards={"a": plain}, weights={"a": 1.0}).learned
    assert WeightedReward(rewards={"a": plain, "b": fooled}, weights={"a": 1.0, "b": 1.0}).learned
    assert TaggedReward(rewards={"a": plain, "b": fooled}).learned
