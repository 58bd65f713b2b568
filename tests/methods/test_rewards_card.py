"""A served card as a reward: transformers' own forward, the run's engine, and failures that cost no other sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from cards.errors import UserError
from inference.engine import Engine
from inference.extend.observer import Forward, Observer, Step
from loops.score import spread
from methods.rewards.card_reward import CardReward
from methods.rewards.reward import RewardBatch
from tests.support.tiny_clip import TEXT_LENGTH, save_tiny_clip

PROMPTS = ["a red cube", "blue", "a red cube", "a much longer prompt than the text model can hold"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


def _reward(folder: Path, **options) -> CardReward:
    return CardReward(card={"name": "reward", "size": "clip-l14", "source": str(folder)}, **options)


def _batch(videos, prompts=tuple(PROMPTS)) -> RewardBatch:
    return RewardBatch(videos_BFHWC=videos, prompts=list(prompts), metadata=[{} for _ in prompts])


def _videos(count: int, frames: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, frames, 20, 24, 3), dtype=np.uint8)


def _cosines(folder: Path, video_FHWC: np.ndarray, prompt: str) -> np.ndarray:
    """Of the library's own forward, one a frame."""
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(
        text=[prompt],
        images=list(video_FHWC),
        return_tensors="pt",
        padding="max_length",
        truncation=True,
        max_length=TEXT_LENGTH,
    )
    with torch.no_grad():
        out = model(**inputs)
    return (out.image_embeds * out.text_embeds).sum(-1).numpy()


class Units(Observer):
    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def on_forward(self, forward: Forward) -> None:
        self.rows.setdefault(forward.method, []).append(forward.rows)


@pytest.mark.parametrize("divisor", [100.0, 26, "scale", None])
def test_scores_are_those_of_transformers(folder, divisor):
    videos = _videos(4)
    scores = _reward(folder, divisor=divisor).score(_batch(videos))
    scale = CLIPModel.from_pretrained(folder).logit_scale.exp().item()
    by = {"scale": scale, None: 100.0}.get(divisor, divisor)
    expected = [scale * _cosines(folder, v[spread(5, 4)], p).mean() / by for v, p in zip(videos, PROMPTS, strict=True)]
    np.testing.assert_allclose(scores.values, expected, rtol=2e-5)
    assert scores.failed == 0 and len(set(np.round(expected, 6))) == 4


def test_the_runs_engine_is_used_and_forwards_are_shared(folder):
    units = Units()
    engine = Engine(batching="shape", max_rows=32, observers=(units,))
    reward = _reward(folder)
    reward.use_engine(engine)
    reward.prepare("cpu")
    reward.score(_batch(_videos(4)))
    assert units.rows == {"encode": [1, 1, 1], "score": [16]}  # equal prompts once; four frames of four clips
    reward.score(_batch(_videos(4)))
    assert units.rows["encode"] == [1, 1, 1]  # of the feature cache


def test_frames_are_the_cards_or_ours(folder):
    videos = _videos(1, frames=9)
    scale = CLIPModel.from_pretrained(folder).logit_scale.exp().item()
    got = _reward(folder, frames=2).score(_batch(videos, PROMPTS[:1])).values
    np.testing.assert_allclose(got, [scale * _cosines(folder, videos[0][[2, 6]], PROMPTS[0]).mean() / 100], rtol=2e-5)


def test_a_broken_sample_is_masked_alone(folder):
    good = _videos(1)[0]
    broken = [
        np.zeros((5, 20, 24, 4), np.uint8),
        good.astype(np.float32),
        np.zeros((0, 20, 24, 3), np.uint8),
    ]
    reward = _reward(folder)
    scores = reward.score(_batch([good, *broken, good], ["a"] * 5))
    alone = reward.score(_batch([good], ["a"])).values[0]
    np.testing.assert_allclose(scores.values, [alone, np.nan, np.nan, np.nan, alone], rtol=1e-6)
    assert "(5, 20, 24, 4)" in scores.reasons[0]
    assert reward.score(_batch([good], [7])).failed == 1


class Refuses(Observer):
    """Refuses the scores of one prompt, once they are computed."""

    def on_step(self, step: Step) -> None:
        if step.request.request.prompt == "b" and step.plan.label.startswith("score"):
            raise RuntimeError("not this one")


def test_a_request_that_fails_in_the_engine_is_masked_alone(folder):
    reward, plain = _reward(folder), _reward(folder)
    reward.use_engine(Engine(batching="shape", observers=(Refuses(),)))
    batch = _batch(_videos(3), ["a", "b", "c"])
    scores = reward.score(batch)
    expected = plain.score(batch).values
    np.testing.assert_allclose(scores.values, [expected[0], np.nan, expected[2]], rtol=1e-6)
    assert scores.reasons == ("RuntimeError: not this one",)


def test_misconfiguration_is_told_before_weights_load(folder, tmp_path):
    _reward(folder).check()
    with pytest.raises(UserError, match=r"unknown key of card for reward card 'sise'.*Did you mean 'size'"):
        CardReward(card={"name": "reward", "sise": "tiny"})
    with pytest.raises(UserError, match=r"expected at least its name and size"):
        CardReward(card={"name": "reward"})
    for wrong in (0, -1.0, float("nan"), "scales", True):
        with pytest.raises(UserError, match=r"divisor got"):
            _reward(folder, divisor=wrong)
    with pytest.raises(UserError, match=r"frames got 0"):
        _reward(folder, frames=0)
    with pytest.raises(UserError, match=r"card 'wan21-tiny' has the tasks t2v, expected 'score'"):
        CardReward(card={"name": "wan21", "size": "tiny"}).check()
    with pytest.raises(UserError, match=r"'clip-x'"):
        CardReward(card={"name": "reward", "size": "clip-x"}).check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"config.json"):
        _reward(tmp_path / "empty").check()
