"""CLIPScore and PickScore against transformers' own CLIPModel forward, on tiny random CLIP folders written here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from cards.errors import UserError
from methods.rewards.clip_score import CLIPScore
from methods.rewards.hps_score import HPSScore
from methods.rewards.pick_score import PickScore
from methods.rewards.reward import RewardBatch
from tests.support.tiny_clip import TEXT_LENGTH, save_tiny_clip

ROOT = Path(__file__).parents[2]
PROMPTS = ["a red cube", "blue", "a red cube", "a much longer prompt than the text model can hold"]


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


def _videos(count: int, frames: int = 5) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, frames, 20, 24, 3), dtype=np.uint8)


def _batch(videos, prompts=tuple(PROMPTS)) -> RewardBatch:
    return RewardBatch(videos_BFHWC=videos, prompts=list(prompts), metadata=[{} for _ in prompts])


def _logits(folder: Path, video_FHWC: np.ndarray, prompt: str) -> np.ndarray:
    """logits_per_image of the library's own forward, one a frame."""
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
        return model(**inputs).logits_per_image[:, 0].numpy()


@pytest.mark.parametrize(("reward_class", "divisor"), [(CLIPScore, 100.0), (PickScore, 26.0)])
@pytest.mark.parametrize("batch_size", [3, 64])
def test_equals_transformers_forward(clip_folder, reward_class, divisor, batch_size):
    videos = _videos(4)
    reward = reward_class(model=str(clip_folder), frames=None, batch_size=batch_size)
    scores = reward.score(_batch(videos))
    expected = [_logits(clip_folder, v, p).mean() / divisor for v, p in zip(videos, PROMPTS, strict=True)]
    np.testing.assert_allclose(scores.values, expected, rtol=2e-5)
    assert scores.failed == 0
    assert scores.values.dtype == np.float64
    assert len(set(np.round(scores.values, 6))) == 4  # the four samples do differ


def test_only_the_chosen_frames_count(clip_folder):
    video = _videos(1, frames=9)[0]
    got = CLIPScore(model=str(clip_folder), frames=3).score(_batch([video], PROMPTS[:1])).values
    expected = _logits(clip_folder, video[[1, 4, 7]], PROMPTS[0]).mean() / 100
    np.testing.assert_allclose(got, [expected], rtol=2e-5)
    assert abs(got[0] - _logits(clip_folder, video, PROMPTS[0]).mean() / 100) > 1e-5


def test_videos_of_different_sizes_and_a_broken_one(clip_folder):
    good, small = _videos(2)[0], np.ascontiguousarray(_videos(2)[1][:2, :17, :19])
    reward = CLIPScore(model=str(clip_folder), frames=None)
    broken = [np.zeros((5, 20, 24, 4), np.uint8), good.astype(np.float32), np.zeros((0, 20, 24, 3), np.uint8)]
    scores = reward.score(_batch([good, *broken, small], ["a"] * 5))
    assert np.isnan(scores.values[1:4]).all()
    assert scores.failed == 3
    assert "(5, 20, 24, 4)" in scores.reasons[0]
    for row, video in ((0, good), (4, small)):
        np.testing.assert_allclose(scores.values[row], _logits(clip_folder, video, "a").mean() / 100, rtol=2e-5)


def test_all_broken_is_all_masked(clip_folder):
    scores = CLIPScore(model=str(clip_folder)).score(_batch([np.zeros((2, 2), np.uint8)], ["a"]))
    assert scores.failed == 1


def test_hps_is_the_cosine(clip_folder):
    videos = _videos(2)
    scale = CLIPModel.from_pretrained(clip_folder).logit_scale.exp().item()
    got = HPSScore(model=str(clip_folder), frames=None).score(_batch(videos, PROMPTS[:2])).values
    expected = [_logits(clip_folder, v, p).mean() / scale for v, p in zip(videos, PROMPTS[:2], strict=True)]
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_own_processor_folder(clip_folder, tmp_path):
    """PickScore's model folder holds no tokenizer; it comes from elsewhere."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(clip_folder / name, tmp_path / name)
    with pytest.raises(UserError, match=r"no tokenizer .*no image processor"):
        PickScore(model=str(tmp_path)).check()
    split = PickScore(model=str(tmp_path), processor=str(clip_folder))
    split.check()
    whole = PickScore(model=str(clip_folder))
    batch = _batch(_videos(4))
    np.testing.assert_array_equal(split.score(batch).values, whole.score(batch).values)


def test_check_reports_every_problem_without_loading(clip_folder, tmp_path):
    CLIPScore(model=str(clip_folder)).check()
    with pytest.raises(UserError, match=r"no config.json; no weights"):
        CLIPScore(model=str(tmp_path)).check()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    with pytest.raises(UserError, match=r"model_type 'siglip', expected 'clip'; no part-1.safetensors"):
        CLIPScore(model=str(tmp_path)).check()
    with pytest.raises(UserError, match=r"no existing folder"):
        CLIPScore(model=str(tmp_path / "absent")).check()
    with pytest.raises(UserError, match=r"no existing folder"):
        CLIPScore(model=str(tmp_path / "absent")).prepare()


def test_weights_must_fit_the_config(clip_folder, tmp_path):
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"do not fit their config.*missing_keys.*vision_model.encoder.layers.2"):
        CLIPScore(model=str(tmp_path)).prepare()


def test_unreachable_hub_is_one_message_in_seconds():
    # A process of its own: the hub client reads its address once, on import.
    code = (
        "import time; from cards.errors import UserError; from methods.rewards.pretrained import check_model\n"
        "start = time.monotonic()\n"
        "try: check_model('pick_score', 'someone/some-clip', revision='v1', model_type='clip')\n"
        "except UserError as error: print(error, '|', time.monotonic() - start)\n"
    )
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    message, _, seconds = run.stdout.rpartition("|")
    assert "reward pick_score: got 'someone/some-clip' at revision 'v1'" in message, run.stdout
    assert "Expected a reachable model" in message
    assert float(seconds) < 20


def test_bad_arguments():
    with pytest.raises(UserError, match=r"frames got 0"):
        CLIPScore(model="m", frames=0)
    with pytest.raises(UserError, match=r"unknown dtype for reward clip_score 'float23'.*float32"):
        CLIPScore(model="m", dtype="float23")
    with pytest.raises(UserError, match=r"processor_revision='x' without a processor"):
        PickScore(model="m", processor_revision="x")
    with pytest.raises(TypeError, match=r"frame_count"):
        CLIPScore(model="m", frame_count=3)
