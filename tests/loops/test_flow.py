"""Sigma samplers, loss weights and the Euler step against their closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from cards.errors import UserError
from cards.prediction import shift_sigma
from loops.flow import SAMPLERS, WEIGHTINGS, euler_step, loss_weight, sample_sigmas, sample_u


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("mean", "std", "shift"), [(0.0, 1.0, 3.0), (-0.5, 0.7, 5.0), (0.8, 1.5, 0.25)])
def test_a_shifted_logit_normal_is_the_logit_normal_of_a_moved_mean(mean: float, std: float, shift: float) -> None:
    """Sample by sample, from the same generator state; float32 rounding of sigmoid and quotient is all that differs."""
    shifted = sample_sigmas("logit_normal", 4096, shift, generator(), mean=mean, std=std)
    moved = sample_sigmas("logit_normal", 4096, 1.0, generator(), mean=mean + math.log(shift), std=std)
    torch.testing.assert_close(shifted, moved, rtol=2e-6, atol=2e-7)


def test_the_logit_normal_has_its_distribution() -> None:
    u = sample_u("logit_normal", 20_000, generator(), mean=-0.5, std=0.7).double().numpy()
    assert stats.kstest(np.log(u / (1 - u)), stats.norm(-0.5, 0.7).cdf).pvalue > 1e-3


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_the_median_of_shifted_uniform_is_s_over_1_plus_s(shift: float) -> None:
    count = 100_001
    sigmas = sample_sigmas("uniform", count, shift, generator(7))
    u = sample_sigmas("uniform", count, 1.0, generator(7))
    # The shift is monotone, so the median of the sample is the shifted median of u, exactly; and u's is near 1/2.
    assert sigmas.median() == shift_sigma(u.median(), shift)
    assert sigmas.median().item() == pytest.approx(shift / (1 + shift), abs=5 * 0.5 / math.sqrt(count) * shift)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_shift_of_one_changes_nothing(kind: str) -> None:
    assert torch.equal(sample_sigmas(kind, 100, 1.0, generator()), sample_u(kind, 100, generator()))


@pytest.mark.parametrize("scale", [1.29, 0.0, -0.5])
def test_the_mode_sampler_is_its_closed_form(scale: float) -> None:
    u = torch.rand(1000, generator=generator()).double()
    expected = 1 - u - scale * ((1 + torch.cos(math.pi * u)) / 2 - 1 + u)
    torch.testing.assert_close(sample_u("mode", 1000, generator(), scale=scale).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_sigmas_stay_in_the_unit_interval(kind: str, shift: float) -> None:
    sigmas = sample_sigmas(kind, 10_000, shift, generator())
    assert sigmas.dtype == torch.float32
    assert sigmas.min() >= 0
    assert sigmas.max() <= 1


def test_weights_are_their_closed_forms() -> None:
    s = torch.tensor([0.1, 0.25, 0.5, 1.0], dtype=torch.float64)
    assert loss_weight("none", s).tolist() == [1.0] * 4
    assert loss_weight("sigma_sqrt", s).tolist() == pytest.approx([100.0, 16.0, 4.0, 1.0])
    assert loss_weight("cosmap", s).tolist() == pytest.approx(
        [2 / (math.pi * 0.82), 2 / (math.pi * 0.625), 4 / math.pi, 2 / math.pi]
    )


def test_cosmap_is_a_density() -> None:
    area, _ = integrate.quad(lambda s: loss_weight("cosmap", torch.tensor(s, dtype=torch.float64)).item(), 0, 1)
    assert area == pytest.approx(1.0)


@pytest.mark.parametrize("steps", [1000, 50])
def test_the_bell_has_mean_one_a_zero_minimum_and_its_peak_in_the_middle(steps: int) -> None:
    t = torch.arange(1, steps + 1, dtype=torch.float64)
    weights = loss_weight("bell", t / steps, steps=steps)
    assert weights.mean().item() == pytest.approx(1.0)
    assert weights.min() == 0
    assert weights.argmax().item() + 1 == steps // 2
    raw = torch.exp(-2 * ((t - steps / 2) / steps) ** 2)
    # An affine map of the bell: the ratio of any two differences is that of the raw curve.
    ratio = (weights - weights[0]) / (weights[steps // 2] - weights[0])
    torch.testing.assert_close(ratio, (raw - raw[0]) / (raw[steps // 2] - raw[0]))


def test_no_weight_is_negative() -> None:
    s = torch.linspace(0, 1, 1001, dtype=torch.float64)[1:]
    assert all((loss_weight(kind, s) >= 0).all() for kind in WEIGHTINGS)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UserError, match="uniform"):
        sample_u("unifrom", 1, generator())
    with pytest.raises(UserError, match="cosmap"):
        loss_weight("cosmpa", torch.ones(1))


def test_the_euler_step_is_exact_on_a_straight_path() -> None:
    x0, noise = torch.tensor([0.5, -2.0]), torch.tensor([1.5, 4.0])
    x = 0.25 * x0 + 0.75 * noise
    assert torch.equal(euler_step(x, noise - x0, 0.75, 0.25), 0.75 * x0 + 0.25 * noise)


def test_the_euler_step_computes_in_float32() -> None:
    x = torch.tensor([1.0], dtype=torch.bfloat16)
    assert euler_step(x, torch.tensor([2**-10]), 1.0, 0.0).item() == 1 - 2**-10
