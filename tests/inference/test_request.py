"""Requests: defaults from the card, every bad value at once, and 0, "" and False as the values that they are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cards.card import LoopMismatchError, ModelCard, Schedule
from cards.errors import UserError
from inference.load import card_of
from inference.request import Request
from inference.request_checks import MAX_SEED
from inference.resolve import denoise_spec, resolve
from loops.loop import Profile


@pytest.fixture(scope="module")
def card(wan_folder: Path) -> ModelCard:
    return card_of(wan_folder)


@pytest.fixture(scope="module")
def ladder_card(card: ModelCard) -> ModelCard:
    loop = card.loops["denoise"].model_copy(update={"schedule": Schedule(shift=5.0, ladder=(1.0, 0.9375, 0.625))})
    return card.derive(loops={"denoise": loop})


def test_what_is_not_said_comes_from_the_card(card: ModelCard) -> None:
    resolved = resolve(Request(prompt="a"), card)
    s, loop = card.sampling, card.loops["denoise"]
    p = resolved.params
    assert (p.frames, p.height, p.width, p.steps) == (s.frames, s.height, s.width, s.steps)
    assert (p.guidance, p.guidance_policy, p.solver, p.shift) == (loop.guidance.scale, "sequential", "unipc", 3.0)
    assert resolved.negative_prompt == s.negative_prompt
    assert resolved.request.seed == p.seed


def test_zero_and_the_empty_string_are_values(card: ModelCard) -> None:
    sampling = card.sampling.model_copy(update={"negative_prompt": "blurry"})
    wordy = card.model_copy(update={"sampling": sampling})
    resolved = resolve(Request(prompt="", seed=0, guidance=0.0, negative_prompt=""), wordy)
    assert (resolved.params.seed, resolved.params.guidance, resolved.negative_prompt) == (0, 0.0, "")
    assert not resolved.params.guided
    assert resolve(Request(prompt="a"), wordy).negative_prompt == "blurry"


def test_guidance_above_one_is_guided(card: ModelCard) -> None:
    assert not resolve(Request(prompt="a", guidance=1), card).params.guided
    assert resolve(Request(prompt="a", guidance=1.01), card).params.guided


BAD: dict[str, tuple[Any, ...]] = {
    "prompt": (None, 3, b"x"),
    "negative_prompt": (3,),
    "steps": (0, -1, 2.5, "4", True, math.nan),
    "seed": (-1, MAX_SEED + 1, 1.0, "7", False),
    "guidance": (-0.1, math.nan, math.inf, "3", True),
    "shift": (0, -1.0, math.nan, math.inf, "3"),
    "frames": (0, 8, 9.0, "9", True),
    "height": (0, 17, 16.0),
    "width": (-16, 31, "16"),
    "guidance_policy": ("batchde", 1),
    "solver": ("ueler", 1),
    "output": ("vidoe", None, False),
    "profile": ("serve", "rollout"),
    "capture": (("velocity",), "velocities"),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD.items() for v in values])
def test_a_bad_value_is_refused_with_what_was_got(card: ModelCard, field: str, value: Any) -> None:
    changes: dict[str, Any] = {"prompt": "a", "profile": Profile.ROLLOUT, field: value}
    with pytest.raises(UserError) as error:
        resolve(Request(**changes), card)
    message = str(error.value)
    assert message.startswith("the request cannot run: ")
    assert field.replace("_", " ") in message or field in message
    assert str(value[0] if isinstance(value, tuple) else value) in message
    assert "expected" in message


def test_every_bad_value_is_named_at_once(card: ModelCard) -> None:
    request = Request(**{name: values[0] for name, values in BAD.items()})
    with pytest.raises(UserError) as error:
        resolve(request, card)
    message = str(error.value).replace("guidance policy", "guidance_policy")
    assert [name for name in BAD if name not in message] == []


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
def test_every_seed_that_torch_takes_is_taken(card: ModelCard, seed: int) -> None:
    import torch

    assert resolve(Request(prompt="a", seed=seed), card).params.seed == seed
    torch.Generator("cpu").manual_seed(seed)


def test_a_seed_is_drawn_when_none_is_given(card: ModelCard) -> None:
    seeds = {resolve(Request(prompt="a"), card).params.seed for _ in range(8)}
    assert len(seeds) == 8


def test_capture_without_a_rollout_is_refused_instead_of_ignored(card: ModelCard) -> None:
    with pytest.raises(UserError, match=r"capture.*ROLLOUT"):
        resolve(Request(prompt="a", capture=("velocities",)), card)


def test_a_task_that_the_card_does_not_have_lists_those_it_has(card: ModelCard) -> None:
    with pytest.raises(UserError, match=r"'i2v'.*t2v"):
        resolve(Request(prompt="a", task="i2v"), card)
    assert denoise_spec(card, "t2v") is card.loops["denoise"]


# -- distilled cards


def test_a_distilled_card_runs_its_own_ladder(ladder_card: ModelCard) -> None:
    assert resolve(Request(prompt="a"), ladder_card).params.steps == 3
    assert resolve(Request(prompt="a", steps=3), ladder_card).params.steps == 3


def test_a_distilled_card_refuses_another_grid(ladder_card: ModelCard) -> None:
    with pytest.raises(LoopMismatchError, match=r"steps=50.*\[1\.0, 0\.9375, 0\.625\].*steps=3"):
        resolve(Request(prompt="a", steps=50), ladder_card)
    with pytest.raises(LoopMismatchError, match=r"shift=3\.0.*final"):
        resolve(Request(prompt="a", shift=3.0), ladder_card)


def test_bad_values_come_before_the_mismatch(ladder_card: ModelCard) -> None:
    with pytest.raises(UserError, match="steps: got 0") as error:
        resolve(replace(Request(prompt="a"), steps=0), ladder_card)
    assert not isinstance(error.value, LoopMismatchError)
