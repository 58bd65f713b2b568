"""Token sampling against transformers' warpers, closed forms and counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from loops.sampling import choose, cut_at_stop, draw, token_logprob, token_probabilities


def logits(seed: int, size: int = 50, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def warped(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    scores = logits_V.double()[None]
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return torch.softmax(scores, dim=-1)[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 99])
@pytest.mark.parametrize("top_p", [1e-6, 0.4, 0.9, 1.0])
def test_probabilities_are_those_of_the_librarys_warpers(temperature: float, top_k: int, top_p: float) -> None:
    for seed in range(5):
        ours = token_probabilities(logits(seed), temperature=temperature, top_k=top_k, top_p=top_p)
        theirs = warped(logits(seed), temperature, min(top_k, 50), top_p)
        assert torch.equal(ours > 0, theirs > 0)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-15)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    p = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    for top_p, kept in ((0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3}), (0.95, {0, 1, 2, 3})):
        got = token_probabilities(p.log(), temperature=1.0, top_k=0, top_p=top_p)
        assert set(torch.nonzero(got).flatten().tolist()) == kept
        assert got.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(("token", "p"), [(0, 0.5), (1, 0.25), (2, 0.25)])
def test_a_logprob_is_the_models_own(token: int, p: float) -> None:
    """logits log(p) + c: the log-prob is log p whatever c, to float64."""
    logits_V = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log() + 7
    got = token_logprob(logits_V, token)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(math.log(p), abs=1e-14)


def test_a_logprob_of_float32_logits_keeps_float64_inside() -> None:
    logits_V = torch.full((1000,), 12.0)
    assert token_logprob(logits_V, 3).item() == pytest.approx(-math.log(1000), abs=1e-13)


def test_draws_have_the_frequencies_of_the_probabilities() -> None:
    p = torch.tensor([0.0, 0.05, 0.6, 0.0, 0.35, 0.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    n = 4000
    counts = torch.bincount(torch.tensor([draw(p, generator) for _ in range(n)]), minlength=6)
    assert counts[p == 0].sum() == 0
    # five standard deviations of a binomial
    assert bool(((counts / n - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-300, 0.3, 1.0]), min_size=1, max_size=8), st.integers(0, 2**31))
def test_a_draw_has_a_probability(weights: list[float], seed: int) -> None:
    p = torch.tensor(weights, dtype=torch.float64)
    if p.sum() == 0:
        p[-1] = 1.0
    assert p[draw(p / p.sum(), torch.Generator().manual_seed(seed))] > 0


def test_one_number_is_drawn_a_token_and_none_when_greedy() -> None:
    generator, same = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    assert choose(logits(0), temperature=0, top_k=0, top_p=1.0, generator=generator) == int(logits(0).argmax())
    assert torch.equal(generator.get_state(), same.get_state())
    choose(logits(0), temperature=1.0, top_k=5, top_p=0.5, generator=generator)
    torch.rand((), dtype=torch.float64, generator=same)
    assert torch.equal(generator.get_state(), same.get_state())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_choose_nothing(bad: float, temperature: float) -> None:
    broken = logits(0)
    broken[4] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(broken, temperature=temperature, top_k=0, top_p=1.0, generator=torch.Generator())


def test_a_token_forbidden_by_minus_infinity_is_no_failure() -> None:
    masked = torch.tensor([-math.inf, 0.0, -math.inf])
    assert choose(masked, temperature=1.0, top_k=0, top_p=0.9, generator=torch.Generator().manual_seed(0)) == 1


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("one two three", ("four",), None),
        ("one two", ("one two three", "one"), ""),
        ("é—é", ("—",), "é"),
        ("", ("a",), None),
    ],
)
def test_a_text_ends_before_the_first_stop_string(text: str, stop: tuple[str, ...], expected: str | None) -> None:
    assert cut_at_stop(text, stop) == expected
