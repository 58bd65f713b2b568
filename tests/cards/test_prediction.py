"""What must hold of the flow's conversions. Oracles: algebra, scipy, exact binary fractions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit

from cards.prediction import (
    add_noise,
    expand_to,
    network_timestep,
    shift_sigma,
    sigma_to_timestep,
    timestep_to_sigma,
    unshift_sigma,
    velocity_target,
    velocity_to_noise,
    velocity_to_x0,
    x0_to_velocity,
)

SIGMA = st.floats(1e-4, 1 - 1e-4)
SHIFT = st.floats(0.1, 20.0)


@given(SIGMA, SHIFT)
def test_shift_translates_the_logit_by_the_logarithm_of_the_shift(u: float, shift: float) -> None:
    assert shift_sigma(u, shift) == pytest.approx(expit(logit(u) + math.log(shift)), rel=1e-9)


@given(SIGMA, SHIFT, SHIFT)
def test_shifts_compose_by_multiplication(u: float, first: float, second: float) -> None:
    assert shift_sigma(shift_sigma(u, first), second) == pytest.approx(shift_sigma(u, first * second), rel=1e-9)


@given(SIGMA, SHIFT)
def test_unshift_inverts_shift(u: float, shift: float) -> None:
    assert unshift_sigma(shift_sigma(u, shift), shift) == pytest.approx(u, rel=1e-9)


def test_a_shift_of_one_is_the_identity_to_the_bit() -> None:
    u = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(shift_sigma(u, 1.0), u)
    assert shift_sigma(0.1, 1) == 0.1


def test_shift_keeps_both_ends() -> None:
    assert (shift_sigma(0.0, 5.0), shift_sigma(1.0, 5.0)) == (0.0, 1.0)


def exact_fractions(seed: int) -> torch.Tensor:
    """Multiples of 1/16 below 16: with sigmas of few bits their sums and products are exact in float32."""
    return torch.randint(-255, 256, (2, 4, 3, 2, 2), generator=torch.Generator().manual_seed(seed)).float() / 16


@pytest.mark.parametrize("sigma", [0.0, 0.125, 0.5, 0.9375, 1.0])
def test_the_true_velocity_gives_x0_and_noise_back_exactly(sigma: float) -> None:
    """Exact, not approximate: every operand is a short binary fraction, so no operation rounds."""
    x0, noise = exact_fractions(1), exact_fractions(2)
    x_s = add_noise(x0, noise, sigma)
    velocity = velocity_target(x0, noise)
    assert torch.equal(velocity_to_x0(x_s, velocity, sigma), x0)
    assert torch.equal(velocity_to_noise(x_s, velocity, sigma), noise)
    if sigma in (0.125, 0.5, 1.0):
        assert torch.equal(x0_to_velocity(x_s, x0, sigma), velocity)


def test_the_true_velocity_gives_x0_back_for_any_values_in_float64() -> None:
    generator = torch.Generator().manual_seed(3)
    x0, noise = torch.randn(2, 64, generator=generator, dtype=torch.float64).unbind(0)
    for sigma in torch.linspace(0, 1, 33, dtype=torch.float64):
        x_s = add_noise(x0, noise, sigma)
        assert (velocity_to_x0(x_s, velocity_target(x0, noise), sigma) - x0).abs().max() < 1e-14


def test_the_velocity_is_the_derivative_of_the_path() -> None:
    x0, noise = exact_fractions(4), exact_fractions(5)
    slope = (add_noise(x0, noise, 0.75) - add_noise(x0, noise, 0.25)) / 0.5
    assert torch.equal(slope, velocity_target(x0, noise))


def test_a_batch_has_one_sigma_a_row() -> None:
    x0, noise = exact_fractions(6), exact_fractions(7)
    mixed = add_noise(x0, noise, expand_to(torch.tensor([0.0, 1.0]), x0))
    assert torch.equal(mixed[0], x0[0])
    assert torch.equal(mixed[1], noise[1])


def test_timesteps_are_continuous() -> None:
    assert sigma_to_timestep(0.12345) == pytest.approx(123.45)
    assert timestep_to_sigma(123.45) == pytest.approx(0.12345)
    timesteps = network_timestep(torch.tensor([0.12345, 0.5], dtype=torch.float64))
    assert timesteps.dtype == torch.float32
    assert timesteps.tolist() == pytest.approx([123.45, 500.0])
