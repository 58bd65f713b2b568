"""Steerable ShapeWorld: clips do what their actions say, ActionEval reads it off pixels, and nothing else passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cards.errors import UserError
from cards.registry import family
from cards.wan_causal.card import card_from_folder, with_actions, with_rollout
from inference.engine import Engine
from loops.loop import ModelCall
from methods.shapeworld.scene import COLOURS, SHAPES, Thing
from methods.shapeworld.shapes import EXTENT_ABOVE
from methods.shapeworld.steer import (
    ACTIONS,
    DIRECTION,
    EXTENT,
    LAST,
    OFFSET,
    action_eval,
    agrees,
    caption_of,
    centre_of,
    chunk_frames,
    frames_of,
    judge_actions,
    path_of,
    possible,
    sample_actions,
    sample_thing,
    steer_clip,
)


def free_actions(rng: np.random.Generator, clip_of: Callable[[tuple[str, ...]], Any], chunks: int) -> tuple[str, ...]:
    """Actions that the object has room for, by what is seen of it, as ActionEval draws them."""
    actions: tuple[str, ...] = ("none",)
    while len(actions) < chunks:
        frames, shape = clip_of(actions)
        actions += (str(rng.choice(possible(centre_of(frames[-1], shape), shape, 4))),)
    return actions


def clips(count: int, chunks: int = 6, size: int = 32) -> list[tuple[Any, tuple[str, ...], str]]:
    made = []
    for i in range(count):
        rng = np.random.default_rng([7, i])
        thing = sample_thing(rng)

        def clip_of(actions: tuple[str, ...], i: int = i, thing: Thing = thing) -> Any:
            return steer_clip(thing, actions, np.random.default_rng([8, i]), size=size), thing.shape

        actions = free_actions(rng, clip_of, chunks)
        made.append((clip_of(actions)[0], actions, thing.shape))
    return made


def test_frames_of_chunks() -> None:
    assert [frames_of(n) for n in (1, 3, 6)] == [1, 9, 21]
    assert [frames_of(n, 3) for n in (1, 2)] == [9, 21]
    assert [chunk_frames(j) for j in range(3)] == [slice(0, 1), slice(1, 5), slice(5, 9)]
    assert chunk_frames(1, 3) == slice(9, 21)


def test_a_path_goes_a_pixel_a_frame_and_stays_at_the_edge() -> None:
    path = path_of(("none", "right", "down", "none"), np.array([LAST - 2, OFFSET]))
    assert path.shape == (13, 2)
    assert path[:, 0].tolist() == [LAST - 2, LAST - 1, *[LAST] * 11]
    assert path[:, 1].tolist() == [OFFSET] * 5 + [OFFSET + n for n in (1, 2, 3, 4)] + [OFFSET + 4] * 4
    with pytest.raises(UserError, match=r"jump.*down, left, none, right, up"):
        path_of(("none", "jump"), np.zeros(2))


def test_clips_repeat_by_their_seed_and_stay_inside() -> None:
    for i in range(20):
        thing, actions = sample_thing(np.random.default_rng(i)), sample_actions(np.random.default_rng(i), 9)
        clip = steer_clip(thing, actions, np.random.default_rng(i))
        assert clip.shape == (33, 32, 32, 3)
        assert actions[0] == "none"
        assert np.array_equal(clip, steer_clip(thing, actions, np.random.default_rng(i)))
        chroma = clip.max(axis=-1).astype(int) - clip.min(axis=-1)
        assert chroma[:, [0, -1]].max() == chroma[:, :, [0, -1]].max() == 0
        assert clip.min() >= 26
        assert clip.max() <= 230
    assert {a for i in range(20) for a in sample_actions(np.random.default_rng(i), 9)} == set(ACTIONS)


def test_a_centre_is_where_the_object_was_drawn() -> None:
    for shape in SHAPES:
        for colour in COLOURS:
            frame = steer_clip(Thing(colour, shape), ("none",), np.random.default_rng(3))[0]
            centre = centre_of(frame, shape)
            assert centre is not None
            (drawn,) = path_of(("none",), np.floor(centre - EXTENT * np.array([1.0, EXTENT_ABOVE[shape]]) + 0.5))
            expected = drawn + EXTENT * np.array([1.0, EXTENT_ABOVE[shape]])
            assert np.abs(centre - expected).max() < 0.6


@pytest.mark.parametrize("size", [32, 64])
def test_real_clips_pass_and_wrong_actions_fail(size: int) -> None:
    marks: list[bool] = []
    wrong: list[bool] = []
    for frames, actions, shape in clips(100, size=size):
        marks += judge_actions(frames, actions, shape)
        other = ("none", *(ACTIONS[(ACTIONS.index(a) + 1) % 5] for a in actions[1:]))
        wrong += judge_actions(frames, other, shape)
    assert len(marks) == 500
    assert np.mean(marks) >= 0.99
    assert np.mean(wrong) == 0


def test_what_is_no_object_is_not_seen() -> None:
    frame = steer_clip(Thing("red", "circle"), ("none",), np.random.default_rng(0))[0]
    assert centre_of(np.full_like(frame, 128), "circle") is None
    twice = np.maximum(frame, np.roll(frame, 16, axis=0))
    assert centre_of(twice, "circle") is None
    whole = np.zeros_like(frame)
    whole[..., 0] = 200
    assert centre_of(whole, "circle") is None
    assert not agrees(None, np.zeros(2), "none", 4)
    assert agrees(np.zeros(2), np.array([-2.0, 1.0]), "left", 4)
    assert not agrees(np.zeros(2), np.array([-1.9, 0.0]), "left", 4)
    assert not agrees(np.zeros(2), np.array([-4.0, 2.0]), "left", 4)
    assert not agrees(np.zeros(2), np.array([0.0, 1.7]), "none", 4)


def test_possible_actions_are_those_with_room() -> None:
    corner = np.array([OFFSET, LAST])
    assert possible(corner + 4.5, "square", 4) == ("none", "right", "up")
    assert possible(corner + np.array([4.5, 6.0]), "triangle", 4) == ("none", "right", "up")
    assert possible(None, "square", 4) == ACTIONS
    assert set(DIRECTION) == set(ACTIONS)


def test_actions_survive_the_bundled_vae() -> None:
    """Clips encoded and decoded by the VAE that the model is trained on."""
    instance = Engine().load(family("wan21").card("tiny"))
    made = clips(24)
    video = torch.from_numpy(np.stack([frames for frames, _, _ in made])).permute(0, 4, 1, 2, 3) / 127.5 - 1
    latents = instance.call(ModelCall("vae", "encode", {"video": video.float()}))
    decoded = instance.call(ModelCall("vae", "decode", {"latents": latents}))
    pixels = ((decoded * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 4, 1).numpy()
    marks = [
        m for (_, actions, shape), clip in zip(made, pixels, strict=True) for m in judge_actions(clip, actions, shape)
    ]
    print(f"ActionEval after a round trip through the VAE: {np.mean(marks):.4f} of {len(marks)} acts")
    assert np.mean(marks) >= 0.99


def test_a_model_that_was_not_trained_is_not_steered(make_wan_folder: Callable[..., Path]) -> None:
    card = card_from_folder(make_wan_folder(seed=3))
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "height": 16, "width": 16})
    plain = with_rollout(card.model_copy(update={"sampling": short}), window=2)
    rates = action_eval(Engine().load(with_actions(plain, ACTIONS)), worlds=2, acts=2)
    assert rates["action_eval"] <= 0.5
    assert set(rates) >= {"action_eval", "action_seen"}
    with pytest.raises(UserError, match=r"expected .'none', 'left'"):
        action_eval(Engine().load(plain), worlds=1, acts=1)


def test_captions_name_the_object() -> None:
    assert caption_of(Thing("red", "circle")) == "a red circle"
