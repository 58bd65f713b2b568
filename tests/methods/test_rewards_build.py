"""conf/reward/*.yaml: each composes and builds; wrong keys are one-message errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from cards.errors import UserError
from methods.rewards.build import build_reward
from methods.rewards.callable_reward import CallableReward
from methods.rewards.card_reward import CardReward
from methods.rewards.clip_score import CLIPScore
from methods.rewards.combine import WeightedReward
from methods.rewards.hps_score import HPSScore
from methods.rewards.pick_score import PickScore
from methods.rewards.reward import Reward
from methods.rewards.shape_eval import ShapeEvalReward
from methods.rewards.tagged import TaggedReward
from methods.rewards.vlm_judge import VLMJudge

CONF = Path(__file__).parents[2] / "conf"
CLASSES = {
    "shape_eval": ShapeEvalReward,
    "shape_eval_strict": ShapeEvalReward,
    "clip_score": CLIPScore,
    "pick_score": PickScore,
    "hps_score": HPSScore,
    "clip_card": CardReward,
    "tiny_clip": CardReward,
    "vlm_judge": VLMJudge,
    "shape_eval_clip": WeightedReward,
    "tagged": TaggedReward,
    "callable": CallableReward,
}
NEEDED = {
    "callable": ["reward.function=math.sqrt"],
    "hps_score": ["reward.model=some/folder"],
    "vlm_judge": ["reward.base_url=http://localhost:1/v1", "reward.model=judge"],
}


def _config(name: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(f"reward/{name}", overrides=list(overrides)).reward


def test_every_file_is_known_here():
    assert {path.stem for path in (CONF / "reward").glob("*.yaml")} == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_builds_by_hydra_and_by_us(name):
    config = _config(name, *NEEDED.get(name, ()))
    for reward in (build_reward(config), instantiate(config)):
        assert type(reward) is CLASSES[name]
        assert isinstance(reward, Reward)
        assert reward.name
        assert reward.version
    with pytest.raises(InstantiationException, match=r"colour_of_paint"):
        instantiate({**config, "colour_of_paint": 1})
    with pytest.raises(
        UserError, match=r"unknown key of reward \(methods.rewards\..*'colour_of_paint'; expected one of"
    ):
        build_reward({**config, "colour_of_paint": 1})


def test_the_bundled_clip_needs_nothing_from_outside():
    reward = build_reward(_config("tiny_clip"))
    reward.check()
    assert reward.learned and reward.name == "tiny_clip"


def test_values_reach_the_object():
    reward = build_reward(
        _config("shape_eval_clip", "reward.rewards.clip_score.frames=null", "reward.weights.clip_score=0.25")
    )
    assert isinstance(reward, WeightedReward)
    assert reward.weights == {"shape_eval": 1.0, "clip_score": 0.25}
    assert reward.rewards["clip_score"].frames is None
    assert reward.rewards["shape_eval"].target == "blend"


def test_nested_mistakes_name_their_place():
    config = _config("shape_eval_clip", "+reward.rewards.clip_score.frame=3")
    with pytest.raises(UserError, match=r"key of reward.rewards.clip_score .*'frame'.*Did you mean 'frames'"):
        build_reward(config)
    with pytest.raises(UserError, match=r"unknown target for reward shape_eval 'scores'.*Did you mean 'score'"):
        build_reward(_config("shape_eval_clip", "reward.rewards.shape_eval.target=scores"))


def test_missing_and_unknown():
    with pytest.raises(UserError, match=r"missing function; set e.g. reward.function="):
        build_reward(_config("callable"))
    with pytest.raises(
        UserError, match=r"got _target_ 'methods.rewards.nothing.Nothing', which is no importable class"
    ):
        build_reward({"_target_": "methods.rewards.nothing.Nothing"})
    with pytest.raises(
        UserError, match=r"got a Fraction.*expected a class that derives from methods.rewards.reward.Reward"
    ):
        build_reward({"_target_": "fractions.Fraction"})
