"""Score requests: checked, equal to transformers' CLIPModel and to the CLIP reward, merged across requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CLIPModel, CLIPProcessor

from cards.card import ModelCard
from cards.errors import UserError
from inference.artifact import Artifact
from inference.engine import Engine
from inference.extend.observer import Forward, Observer
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from inference.resolve import resolve
from loops.loop import Profile
from loops.score import Score, ScoreParams
from methods.rewards.clip_score import CLIPScore
from methods.rewards.reward import RewardBatch
from tests.support.tiny_clip import TEXT_LENGTH, save_tiny_clip


def clip_of(frames: int, height: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (frames, height, width, 3), dtype=torch.uint8, generator=generator)


def asking(prompt: str, pixels: Tensor, **fields: Any) -> Request:
    return Request(prompt=prompt, task="score", inputs={"pixels": pixels}, **fields)


PICTURE = asking("a red cube", clip_of(1, 20, 24, 0))
REQUESTS = (
    PICTURE,
    asking("blue", clip_of(9, 20, 24, 1)),
    asking("a red cube", clip_of(5, 33, 17, 2), frames=5),
    asking("a much longer prompt than the text model can hold", clip_of(21, 16, 16, 3), frames=100),
    asking("", clip_of(2, 48, 20, 4), frames=1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def clip(folder: Path) -> ModelInstance:
    return Engine().load(folder)


@pytest.fixture(scope="module")
def card(folder: Path) -> ModelCard:
    return card_of(folder)


def score_of(artifact: Artifact) -> Score:
    assert artifact.score is not None
    return artifact.score


class Counter(Observer):
    """Keeps the rows of every forward, by operation."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}

    def on_forward(self, forward: Forward) -> None:
        self.rows.setdefault(forward.method, []).append(forward.rows)


# -- oracles


def test_scores_are_those_of_the_library(clip: ModelInstance, folder: Path) -> None:
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    for request in REQUESTS:
        score = score_of(Engine().run(request, clip))
        assert request.inputs is not None
        inputs = processor(
            text=[request.prompt],
            images=list(request.inputs["pixels"][list(score.indices)].numpy()),
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=TEXT_LENGTH,
        )
        with torch.no_grad():
            out = model(**inputs)
        cosines_F = (out.image_embeds * out.text_embeds).sum(-1).double()
        divisor = 100.0
        torch.testing.assert_close(score.frames_F, out.logits_per_image[:, 0].double() / divisor, rtol=0, atol=1e-5)
        ours_F = score.frames_F * divisor / model.logit_scale.exp().double()
        torch.testing.assert_close(ours_F.detach(), cosines_F, rtol=0, atol=1e-5)
        assert score.value == score.frames_F.mean().item()


def test_the_clip_reward_of_training_says_the_same(clip: ModelInstance, folder: Path) -> None:
    reward = CLIPScore(model=str(folder))  # four frames, as the card
    videos: list[np.ndarray] = []
    requests = [replace(request, frames=None) for request in REQUESTS]
    for request in requests:
        assert request.inputs is not None
        videos.append(request.inputs["pixels"].numpy())
    batch = RewardBatch(videos_BFHWC=videos, prompts=[r.prompt for r in requests], metadata=[{} for _ in requests])
    expected = reward.score(batch).values
    got = [score_of(a).value for a in Engine(batching="shape").run_interleaved(requests, clip)]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert len(set(np.round(expected, 5))) == len(requests)  # they do differ


# -- running


def test_frames_are_spread_and_a_long_clip_is_several_steps(clip: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(REQUESTS[3], clip)
    assert handle.progress == (0, 1 + 3)  # the prompt, then 8 + 8 + 5 frames
    while engine.tick():
        pass
    assert handle.progress == (4, 4)
    assert score_of(handle.result()).indices == tuple(range(21))
    assert score_of(Engine().run(REQUESTS[1], clip)).indices == (1, 3, 5, 7)
    assert score_of(Engine().run(REQUESTS[4], clip)).indices == (1,)


def test_requests_of_any_prompt_and_size_share_forwards(clip: ModelInstance) -> None:
    counter = Counter()
    Engine(batching="shape", observers=(counter,)).run_interleaved(REQUESTS, clip)
    # What is cached is never merged, and equal prompts are encoded once.
    assert counter.rows == {"encode": [1] * 4, "score": [1 + 4 + 5 + 8 + 1, 8, 5]}


def test_interleaved_is_serial_to_the_bit(clip: ModelInstance) -> None:
    serial = [score_of(a).frames_F for a in Engine(cache_bytes=0).run_serial(REQUESTS, clip)]
    together = [score_of(a).frames_F for a in Engine(cache_bytes=0).run_interleaved(REQUESTS, clip)]
    assert all(torch.equal(a, b) for a, b in zip(serial, together, strict=True))
    merged = [score_of(a).frames_F for a in Engine(batching="shape").run_interleaved(REQUESTS, clip)]
    for a, b in zip(serial, merged, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_artifact_holds_a_score_and_nothing_else(clip: ModelInstance) -> None:
    artifact = Engine().run(PICTURE, clip)
    assert (artifact.video, artifact.completion, artifact.latents.numel()) == (None, None, 0)
    provenance = artifact.provenance
    assert provenance.params == ScoreParams(frames=1, rows=8, divisor=100.0)
    other = Engine().run(asking("a red cube", clip_of(1, 20, 24, 9)), clip).provenance
    assert set(provenance.inputs) == {"pixels"}
    assert provenance.inputs != other.inputs
    assert provenance.inputs == Engine().run(PICTURE, clip).provenance.inputs


def test_the_prompt_is_encoded_once_for_many_clips(clip: ModelInstance) -> None:
    counter = Counter()
    engine = Engine(observers=(counter,))
    for seed in range(3):
        engine.run(asking("a red cube", clip_of(1, 16, 16, seed)), clip)
    assert len(counter.rows["encode"]) == 1
    assert len(counter.rows["score"]) == 3


@pytest.mark.parametrize("profile", list(Profile))
def test_every_profile_scores_alike(clip: ModelInstance, profile: Profile) -> None:
    score = score_of(Engine().run(replace(REQUESTS[1], profile=profile), clip))
    assert torch.equal(score.frames_F, score_of(Engine().run(REQUESTS[1], clip)).frames_F)


# -- requests

GOOD = torch.zeros((2, 16, 16, 3), dtype=torch.uint8)
BAD: dict[str, tuple[Any, ...]] = {
    "prompt": (None, 3, b"x"),
    "frames": (0, -1, 2.5, "4", True),
    "inputs": (
        None,
        {},
        [GOOD],
        {"pixels": GOOD.numpy()},
        {"pixels": GOOD.float()},
        {"pixels": GOOD[0]},
        {"pixels": GOOD[..., :2]},
        {"pixels": GOOD[:0]},
        {"pixels": GOOD[:, :, :0]},
        {"pixels": GOOD, "pixel": GOOD},
    ),
    "seed": (0, 7),
    "steps": (4,),
    "height": (16,),
    "guidance": (1.0,),
    "negative_prompt": ("",),
    "max_tokens": (0,),
    "messages": ((),),
    "output": ("latents", "score"),
    "profile": ("serve",),
    "capture": (("trajectory",),),
}


@pytest.mark.parametrize(("field", "index"), [(f, i) for f, values in BAD.items() for i in range(len(values))])
def test_a_bad_value_is_refused_with_what_was_got(card: ModelCard, field: str, index: int) -> None:
    fields: dict[str, Any] = {"prompt": "a", "task": "score", "inputs": {"pixels": GOOD}, field: BAD[field][index]}
    with pytest.raises(UserError) as error:
        resolve(Request(**fields), card)
    message = str(error.value)
    assert message.startswith("the request cannot run: ")
    assert ("got" in message) or ("unknown input 'pixel'" in message)
    assert (field in message) or ("input" in message and field == "inputs")
    assert "expected" in message
    assert message.count("expected") == 1
    assert len(message) < 300  # never the tensor's numbers


def test_a_float_input_is_held_to_its_range() -> None:
    from cards.program import Input, Program
    from inference.inputs import input_problems

    program = Program(nodes=(), inputs=(Input(name="x", dtype="float32", shape=("rows", 2), low=-1, high=1),))
    assert input_problems({"x": torch.tensor([[-1.0, 1.0]])}, program, "t") == []
    for bad in (1.001, float("nan"), float("inf"), -2.0):
        (problem,) = input_problems({"x": torch.tensor([[0.0, bad]])}, program, "t")
        assert problem.startswith("inputs['x']: got values from")
        assert problem.endswith("expected float32 (rows, 2) in [-1, 1]")


def test_every_bad_value_is_named_at_once(card: ModelCard) -> None:
    fields = {name: values[0] for name, values in BAD.items()}
    with pytest.raises(UserError) as error:
        resolve(Request(**fields, task="score"), card)
    assert [name for name in BAD if name not in str(error.value)] == []


def test_a_clip_takes_no_inputs(wan_folder: Path) -> None:
    with pytest.raises(UserError, match=r"inputs: got a mapping with pixels, expected nothing \(task 't2v'"):
        resolve(Request(prompt="a", inputs={"pixels": GOOD}), card_of(wan_folder))


def test_a_request_that_fails_fails_alone(clip: ModelInstance) -> None:
    """A clip that the image processor cannot take."""
    engine = Engine()
    bad = engine.submit(asking("a", clip_of(1, 1, 3000, 0)), clip)
    good = engine.submit(PICTURE, clip)
    while engine.tick():
        pass
    assert torch.equal(score_of(good.result()).frames_F, score_of(Engine().run(PICTURE, clip)).frames_F)
    assert bad.done
