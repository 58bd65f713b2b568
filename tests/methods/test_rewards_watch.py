"""The reward hacking watch on sequences whose trends are known in closed form, and what it is fed with."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.stats import linregress

from methods.rewards.callable_reward import CallableReward
from methods.rewards.combine import WeightedReward
from methods.rewards.reward import RewardBatch
from methods.rewards.shape_eval import ShapeEvalReward
from methods.rewards.watch import HackingWarning, HackingWatch, WatchedReward, trend, watched
from methods.shapeworld.render import render
from methods.shapeworld.scene import parse

RIGHT = "a red circle moves left"


def brightness(videos, prompts, metadata):
    return [video.mean() / 255 for video in videos]


def _learned() -> CallableReward:
    return CallableReward(function=f"{__name__}.brightness", learned=True, name="bright")


def _batch(*prompts: str) -> RewardBatch:
    clip = render(parse(RIGHT), np.random.default_rng(0))
    return RewardBatch(videos_BFHWC=[clip] * len(prompts), prompts=list(prompts), metadata=[{} for _ in prompts])


def test_trend_is_the_t_statistic_of_the_slope():
    rng = np.random.default_rng(0)
    x = np.arange(3, 23)
    for slope in (0.0, 0.1, -0.7):
        y = slope * x + rng.normal(size=20)
        fit = linregress(x, y)
        assert trend(list(x), list(y)) == pytest.approx(fit.slope / fit.stderr, rel=1e-9)
    assert trend([1, 2, 3], [5, 5, 5]) == 0
    assert trend([1, 2, 3], [0.1, 0.2, 0.3]) == math.inf
    assert trend([1, 2, 3], [0.1, 0.1 - 1e-3, 0.1 - 2e-3]) == -math.inf


def _run(watch: HackingWatch, learned, rule, start: int = 1) -> list[int]:
    return [watch.observe(start + i, a, b) for i, (a, b) in enumerate(zip(learned, rule, strict=True))]


def test_it_warns_when_one_rises_while_the_other_falls_and_says_since_when():
    watch = HackingWatch(window=6)
    up, down = [0.1 * i for i in range(6)], [1 - 0.05 * i for i in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _run(watch, up[:5], down[:5]) == [0] * 5
    with pytest.warns(HackingWarning, match=r"since about step 1: the learned reward rises \(0.1 to 0.4\) while"):
        assert watch.observe(6, up[5], down[5]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once a run
        assert watch.observe(7, 0.6, 0.7) == 1  # it began where it was first seen
        assert _run(watch, [0.6] * 6, [0.7] * 6, start=8)[-1] == 0  # and is over


@pytest.mark.parametrize(
    ("learned", "rule"),
    [
        (range(12), range(12)),  # both rise
        (range(12, 0, -1), range(12, 0, -1)),  # both fall
        (range(12, 0, -1), range(12)),
        ([1] * 12, range(12, 0, -1)),  # the rule-based one falls alone
        (range(12), [1] * 12),
        ([0, 1] * 6, [1, 0] * 6),  # apart, without a trend
        ([float("nan")] * 12, range(12, 0, -1)),
    ],
)
def test_it_is_silent_otherwise(learned, rule):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(_run(HackingWatch(window=6), learned, rule)) == {0}


def test_a_turn_is_seen_only_once_the_window_is_past_it():
    watch = HackingWatch(window=6)
    learned = [0.1 * i for i in range(20)]
    rule = [0.1 * i for i in range(10)] + [0.9 - 0.1 * i for i in range(10)]
    with pytest.warns(HackingWarning):
        since = _run(watch, learned, rule)
    first = next(i for i, value in enumerate(since) if value)
    assert set(since[:first]) == {0} and set(since[first:]) == {since[first]}
    assert first >= 10 and since[first] == first + 1 - 5  # the window's first step; steps count from 1
    assert 8 <= since[first] <= 11  # the turn is at step 10


def test_a_resumed_watch_says_what_the_uninterrupted_one_does():
    learned, rule = [0.1 * i for i in range(12)], [1 - 0.05 * i for i in range(12)]
    with pytest.warns(HackingWarning):
        whole = _run(HackingWatch(window=6), learned, rule)
    for cut in (3, 8):
        first = HackingWatch(window=6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            head = _run(first, learned[:cut], rule[:cut])
            second = HackingWatch.restored(first.state())
            assert second is not first
            tail = _run(second, learned[cut:], rule[cut:], start=cut + 1)
        assert head + tail == whole
        assert second.warned


def test_figures_come_of_a_steps_metrics():
    watch = HackingWatch(window=3)
    assert watch.figures(1, {"train/reward": 1.0}) == {}
    rows = [{"watch/learned": 0.1 * i, "watch/score": 1 - 0.1 * i} for i in range(3)]
    with pytest.warns(HackingWarning):
        got = [watch.figures(i + 1, row) for i, row in enumerate(rows)]
    assert got == [{"watch/hacking_since": 0.0}] * 2 + [{"watch/hacking_since": 1.0}]


def test_shape_eval_is_watched_beside_a_learned_reward_and_not_trained_on():
    batch = _batch(RIGHT, "a blue circle moves left", "a photo of a cat")
    reward = watched(_learned())
    assert isinstance(reward, WatchedReward) and watched(reward) is reward
    scores = reward.score(batch)
    np.testing.assert_array_equal(scores.values, _learned().score(batch).values)
    np.testing.assert_array_equal(reward.settle(scores), scores.values)
    np.testing.assert_array_equal(scores.parts["watch/learned"], scores.values)
    np.testing.assert_allclose(scores.parts["watch/all_correct"], [1.0, 0.0, np.nan])
    assert scores.parts["watch/score"][0] == 1.0 and 0 < scores.parts["watch/score"][1] < 1
    assert set(scores.parts) == set(reward.part_names())
    assert scores.reasons == ()  # a prompt of another world is no failure
    assert (reward.name, reward.version) == (_learned().name, _learned().version)


def test_a_rule_is_not_watched():
    rule = ShapeEvalReward()
    assert watched(rule) is rule


@pytest.mark.parametrize("normalise", ["sum", "each"])
def test_of_several_rewards_the_learned_ones_are_followed_raw(normalise):
    both = WeightedReward(
        rewards={"rule": ShapeEvalReward(), "bright": _learned()},
        weights={"rule": 1.0, "bright": 0.5},
        normalise=normalise,
    )
    batch = _batch(RIGHT, RIGHT)
    scores = watched(both).score(batch)
    np.testing.assert_allclose(scores.parts["watch/learned"], 0.5 * _learned().score(batch).values)
    np.testing.assert_array_equal(watched(both).settle(scores), scores.values)
