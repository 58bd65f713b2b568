"""Weighted, tagged and user-written rewards against hand-computed sums."""

from __future__ import annotations

import numpy as np
import pytest

from cards.errors import UserError
from methods.rewards.callable_reward import CallableReward
from methods.rewards.combine import WeightedReward
from methods.rewards.reward import RewardBatch, Scores, clean
from methods.rewards.tagged import TaggedReward

NAN = float("nan")


# Rewards as a user would write them, found by their dotted path.
def brightness(videos, prompts, metadata):
    return [video.mean() / 255 for video in videos]


def from_metadata(videos, prompts, metadata):
    return [fields["value"] for fields in metadata]


def breaks_on_bad(videos, prompts, metadata):
    return [1 / fields["divide_by"] for fields in metadata]


def too_few(videos, prompts, metadata):
    return [1.0]


def _callable(function, name="callable") -> CallableReward:
    return CallableReward(function=f"{__name__}.{function.__name__}", name=name)


def _batch(levels, metadata=None) -> RewardBatch:
    """Grey videos; a level (0..255) each."""
    videos = np.stack([np.full((2, 4, 4, 3), level, np.uint8) for level in levels])
    return RewardBatch(
        videos_BFHWC=videos,
        prompts=["p"] * len(levels),
        metadata=[{} for _ in levels] if metadata is None else metadata,
    )


def test_callable_scores_and_masks():
    np.testing.assert_allclose(_callable(brightness).score(_batch([0, 51, 255])).values, [0.0, 0.2, 1.0])
    scores = _callable(from_metadata).score(_batch([0] * 4, [{"value": v} for v in (0, None, NAN, np.inf)]))
    np.testing.assert_array_equal(scores.values, [0.0, NAN, NAN, NAN])
    assert scores.failed == 3


def test_one_bad_sample_costs_only_itself():
    scores = _callable(breaks_on_bad).score(_batch([0] * 4, [{"divide_by": d} for d in (2, 0, 4)] + [{}]))
    np.testing.assert_array_equal(scores.values, [0.5, NAN, 0.25, NAN])
    assert scores.failed == 2
    assert scores.reasons == ("ZeroDivisionError: division by zero", "KeyError: 'divide_by'")


def test_callable_misconfiguration():
    with pytest.raises(UserError, match=r"expected a flat sequence of 2 numbers"):
        _callable(too_few).score(_batch([0, 0]))
    with pytest.raises(UserError, match=r"importing 'no_such_package' failed"):
        CallableReward(function="no_such_package.reward").check()
    with pytest.raises(UserError, match=r"expected a dotted path"):
        CallableReward(function="reward").check()
    with pytest.raises(UserError, match=r"unknown function in .* 'brightnes'.*Did you mean 'brightness'"):
        CallableReward(function=f"{__name__}.brightnes").check()
    _callable(brightness).check()


def _weighted(normalise, **kwargs) -> WeightedReward:
    return WeightedReward(
        rewards={"bright": _callable(brightness), "meta": _callable(from_metadata)},
        weights={"bright": 2.0, "meta": -0.5},
        normalise=normalise,
        **kwargs,
    )


def test_weighted_sum():
    batch = _batch([0, 51, 255], [{"value": 10}, {"value": 20}, {"value": 60}])
    scores = _weighted("sum").score(batch)
    np.testing.assert_allclose(scores.values, [-5.0, 0.4 - 10, 2.0 - 30])
    np.testing.assert_allclose(scores.parts["bright"], [0.0, 0.2, 1.0])
    np.testing.assert_allclose(scores.parts["meta"], [10, 20, 60])


def test_weighted_each_compares_spreads():
    batch = _batch([0, 102, 204], [{"value": 10}, {"value": 10}, {"value": 40}])
    scores = _weighted("each", eps=1e-12).score(batch)
    unit = np.sqrt(1.5)  # z-scores of 0, 1, 2 are -unit, 0, unit; those of 0, 0, 3 are -1, -1, 2 over sqrt(2)
    expected = 2 * np.array([-unit, 0, unit]) - 0.5 * np.array([-1, -1, 2]) / np.sqrt(2)
    np.testing.assert_allclose(scores.values, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scores.parts["meta"], [10, 10, 40])  # parts stay raw


def test_weighted_each_is_blind_to_scale_and_exact_on_equal_scores():
    batch = _batch([0, 102, 204], [{"value": 0.1}] * 3)
    scores = _weighted("each", eps=1e-12).score(batch)
    np.testing.assert_allclose(scores.values, 2 * np.sqrt(1.5) * np.array([-1, 0, 1]), rtol=1e-9, atol=1e-12)
    alone = WeightedReward(rewards={"meta": _callable(from_metadata)}, weights={"meta": 1.0}, normalise="each")
    assert (alone.score(batch).values == 0.0).all()


@pytest.mark.parametrize("normalise", ["sum", "each"])
def test_masked_part_masks_the_sample(normalise):
    batch = _batch([0, 51, 255], [{"value": 1}, {"value": None}, {"value": 3}])
    scores = _weighted(normalise).score(batch)
    np.testing.assert_array_equal(np.isnan(scores.values), [False, True, False])
    assert scores.failed == 1
    assert not np.isnan(scores.parts["bright"]).any()
    assert scores.metrics()["reward/meta"] == 2.0


def test_masked_sample_stays_out_of_the_normalisation():
    alone = WeightedReward(rewards={"meta": _callable(from_metadata)}, weights={"meta": 1.0}, normalise="each")
    with_hole = alone.score(_batch([0] * 3, [{"value": 1}, {"value": None}, {"value": 3}])).values
    without = alone.score(_batch([0] * 2, [{"value": 1}, {"value": 3}])).values
    np.testing.assert_array_equal(with_hole[[0, 2]], without)


def test_weighted_misconfiguration():
    reward = _callable(brightness)
    with pytest.raises(UserError, match=r"got weights for \['b'\], expected one for each of \['a'\]"):
        WeightedReward(rewards={"a": reward}, weights={"b": 1.0})
    with pytest.raises(UserError, match=r"unknown normalise .*'all'.*each, sum"):
        WeightedReward(rewards={"a": reward}, weights={"a": 1.0}, normalise="all")
    with pytest.raises(UserError, match=r"got no rewards"):
        WeightedReward(rewards={}, weights={})
    with pytest.raises(UserError, match=r"importing 'no_such_package'"):
        WeightedReward(rewards={"a": CallableReward(function="no_such_package.f")}, weights={"a": 1.0}).check()


def test_tag_chooses_the_reward_of_each_sample():
    reward = TaggedReward(rewards={"bright": _callable(brightness), "meta": _callable(from_metadata)}, default="bright")
    metadata = [{"reward": "meta", "value": 7}, {"reward": "bright"}, {}, {"reward": "nobody"}, {"reward": "meta"}]
    scores = reward.score(_batch([0, 51, 255, 255, 0], metadata))
    np.testing.assert_allclose(scores.values, [7.0, 0.2, 1.0, NAN, NAN])  # the last one has no value
    np.testing.assert_allclose(scores.parts["bright"], [NAN, 0.2, 1.0, NAN, NAN])
    np.testing.assert_allclose(scores.parts["meta"], [7.0, NAN, NAN, NAN, NAN])
    assert scores.failed == 2
    assert "got reward tag 'nobody' in the metadata, expected one of bright, meta" in scores.reasons[0]


def test_tag_without_default_is_masked():
    reward = TaggedReward(rewards={"bright": _callable(brightness)})
    np.testing.assert_array_equal(reward.score(_batch([255, 255], [{}, {"reward": "bright"}])).values, [NAN, 1.0])
    with pytest.raises(UserError, match=r"unknown default for reward tagged 'dark'"):
        TaggedReward(rewards={"bright": _callable(brightness)}, default="dark")


def test_scores_and_batches():
    parts = {"a": clean([1.0, 2.0, NAN]), "watch/b": clean([0.0, 0.0, 3.0]), "c": clean([NAN] * 3)}
    scores = Scores(values=clean([1.0, np.inf, NAN]), parts=parts)
    assert scores.failed == 2
    metrics = scores.metrics()
    assert np.isnan(metrics.pop("reward/c"))
    assert metrics == {"reward/a": 1.5, "watch/b": 1.0}
    with pytest.raises(ValueError, match=r"got 1 videos, 2 prompts, 1 metadata"):
        RewardBatch(videos_BFHWC=np.zeros((1, 1, 2, 2, 3), np.uint8), prompts=["a", "b"], metadata=[{}])
    batch = _batch([1, 2, 3]).select([2, 0])
    assert [int(video.max()) for video in batch.videos_BFHWC] == [3, 1]
