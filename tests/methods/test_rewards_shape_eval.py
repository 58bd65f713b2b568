"""ShapeEvalReward on rendered clips whose right answers are known from the scene that was drawn."""

from __future__ import annotations

import numpy as np
import pytest

from cards.errors import UserError
from methods.rewards.reward import RewardBatch
from methods.rewards.shape_eval import CATEGORIES, ShapeEvalReward
from methods.shapeworld.render import render
from methods.shapeworld.scene import parse


def _clip(caption: str) -> np.ndarray:
    return render(parse(caption), np.random.default_rng(0))


def _batch(drawn: list[str], asked: list[str]) -> RewardBatch:
    return RewardBatch(
        videos_BFHWC=np.stack([_clip(caption) for caption in drawn]), prompts=asked, metadata=[{} for _ in asked]
    )


RIGHT = "a red circle moves left"
PAIR = "a red circle left of a blue square"


def test_right_and_wrong_clips():
    scores = ShapeEvalReward(target="all_correct").score(
        _batch([RIGHT, "a red circle moves right", "a green circle moves left", PAIR], [RIGHT, RIGHT, RIGHT, PAIR])
    )
    np.testing.assert_array_equal(scores.values, [1, 0, 0, 1])
    np.testing.assert_array_equal(scores.parts["motion"], [1, 0, 1, np.nan])  # the pair's caption asks for none
    np.testing.assert_array_equal(scores.parts["colour"][:3], [1, 1, 0])
    np.testing.assert_array_equal(scores.parts["position"], [np.nan, np.nan, np.nan, 1])
    assert set(scores.parts) == {*CATEGORIES, "all_correct", "score"}
    assert scores.failed == 0


def test_targets():
    batch = _batch([RIGHT, "a red circle moves right"], [RIGHT, RIGHT])
    graded = ShapeEvalReward(target="score").score(batch).values
    hard = ShapeEvalReward(target="all_correct").score(batch).values
    blend = ShapeEvalReward(target="blend").score(batch).values
    assert graded[0] == 1.0
    assert 0.0 < graded[1] < 1.0  # colour and shape are right
    np.testing.assert_array_equal(hard, [1.0, 0.0])
    np.testing.assert_allclose(blend, (graded + hard) / 2, rtol=1e-15)


def test_what_cannot_be_judged_is_masked():
    batch = _batch([RIGHT, RIGHT], [RIGHT, "a photo of a cat"])
    broken = RewardBatch(
        videos_BFHWC=[*batch.videos_BFHWC, np.zeros((4, 4), np.uint8)],
        prompts=[*batch.prompts, RIGHT],
        metadata=[{}, {}, {}],
    )
    scores = ShapeEvalReward().score(broken)
    np.testing.assert_array_equal(scores.values, [1.0, np.nan, np.nan])
    assert scores.failed == 2
    assert "'a photo of a cat'" in scores.reasons[0]
    assert np.isnan(scores.parts["valid"][1])
    assert scores.metrics()["reward/all_correct"] == 1.0
    assert set(scores.parts) == set(ShapeEvalReward().part_names())


def test_unknown_target():
    with pytest.raises(UserError, match="unknown target for reward shape_eval 'colour'; expected one of: all_correct"):
        ShapeEvalReward(target="colour")


def test_an_instruction_is_judged_by_what_it_means():
    asked = "a crimson ball drifting west"
    batch = RewardBatch(
        videos_BFHWC=np.stack([_clip(RIGHT), _clip(PAIR)]), prompts=[asked, asked], metadata=[{"meaning": RIGHT}] * 2
    )
    np.testing.assert_array_equal(ShapeEvalReward(target="all_correct").score(batch).values, [1, 0])
