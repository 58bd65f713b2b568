"""The SDE's steps against closed forms: Gaussian data whose velocity is known, scipy's densities, the Euler step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from scipy import stats
from torch import Tensor

from cards.errors import UserError
from cards.prediction import shift_sigma
from loops.flow import euler_step
from loops.sde import SDE_KINDS, StepDistribution, sde_step

C = 0.4
"""Standard deviation of the data."""
SHAPE = (3, 4, 2, 2, 2)


def normal(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sigmas(*values: float) -> Tensor:
    return torch.tensor(values)


def step(kind: str, level: float, s: float, following: float, seed: int = 0) -> tuple[Tensor, Tensor, StepDistribution]:
    x, v = normal(seed), normal(seed + 1)
    return x, v, sde_step(kind, x, v, sigmas(s, s, s), sigmas(following, following, following), level)


# -- the step


@pytest.mark.parametrize("kind", SDE_KINDS)
@pytest.mark.parametrize(("s", "following"), [(1.0, 0.95), (0.7, 0.3), (0.01, 0.0)])
def test_level_0_is_the_euler_step_to_the_last_bit(kind: str, s: float, following: float) -> None:
    x, v, reached = step(kind, 0.0, s, following)
    assert torch.equal(reached.mean, euler_step(x, v, torch.tensor(s), torch.tensor(following)))
    assert torch.equal(reached.sample(normal(5)), reached.mean)
    assert not reached.std_B.any()


def test_level_0_walks_the_librarys_grid_as_its_scheduler_does() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    ours = theirs = normal(0, (1, 4, 2, 2, 2))
    for index, timestep in enumerate(scheduler.timesteps):
        v = normal(index + 1, (1, 4, 2, 2, 2))
        s, following = scheduler.sigmas[index : index + 2].split(1)
        ours = sde_step("flow", ours, v, s, following, 0.0).mean
        theirs = scheduler.step(v, timestep, theirs, return_dict=False)[0]
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("level", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(("s", "following"), [(1.0, 0.9), (0.6, 0.45), (0.02, 0.0)])
def test_flow_and_dance_are_their_formulas(level: float, s: float, following: float) -> None:
    """mu = x + [v + g^2 / (2 s) (x + (1 - s) v)] dt and std = g sqrt(-dt), written out in numpy."""
    for kind in ("flow", "dance"):
        x, v, reached = step(kind, level, s, following)
        s64, n64 = float(np.float32(s)), float(np.float32(following))
        inside = n64 if s == 1 else s64
        g = level * math.sqrt(s64 / (1 - inside)) if kind == "flow" else level
        dt, x64, v64 = n64 - s64, x.double().numpy(), v.double().numpy()
        mean = x64 + (v64 + g**2 / (2 * s64) * (x64 + (1 - s64) * v64)) * dt
        np.testing.assert_allclose(reached.mean.numpy(), mean, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(reached.std_B.numpy(), g * math.sqrt(-dt), rtol=1e-6)
        z = normal(9)
        np.testing.assert_allclose(
            reached.sample(z).numpy(), mean + g * math.sqrt(-dt) * z.numpy(), rtol=4e-6, atol=4e-6
        )


@pytest.mark.parametrize("level", [0.3, 0.8, 1.0])
@pytest.mark.parametrize(("s", "following"), [(1.0, 0.9), (0.6, 0.45), (0.02, 0.0)])
def test_cps_keeps_the_coefficients_of_the_next_sigma(level: float, s: float, following: float) -> None:
    """mu = (1 - s') x0_hat + sqrt(s'^2 - sd^2) x1_hat, so that the whole noise has coefficient s'."""
    x, v, reached = step("cps", level, s, following)
    sd = following * math.sin(level * math.pi / 2)
    expected = (1 - following) * (x - s * v) + math.sqrt(following**2 - sd**2) * (x + (1 - s) * v)
    torch.testing.assert_close(reached.mean, expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(reached.std_B, torch.full((3,), sd))


def test_rows_of_one_batch_may_be_at_different_sigmas_and_do_not_mix() -> None:
    x, v, z = normal(0), normal(1), normal(2)
    s, following = sigmas(1.0, 0.5, 0.1), sigmas(0.9, 0.3, 0.0)
    for kind in SDE_KINDS:
        whole = sde_step(kind, x, v, s, following, 0.7)
        reached = whole.sample(z)
        for i in range(3):
            row = slice(i, i + 1)
            alone = sde_step(kind, x[row], v[row], s[row], following[row], 0.7)
            assert torch.equal(whole.mean[row], alone.mean)
            assert torch.equal(whole.log_prob(reached)[row], alone.log_prob(reached[row]))


def test_an_unknown_kind_lists_the_names() -> None:
    with pytest.raises(UserError, match=r"'flwo'.*cps, dance, flow"):
        step("flwo", 0.7, 0.5, 0.4)


# -- marginals


def final_std(kind: str, level: float, count: int, shift: float) -> float:
    """Standard deviation of the samples when the data are N(0, C^2) and the velocity is exact.

    x_s has variance q = (1 - s)^2 C^2 + s^2 and the velocity is k x with k = (s - (1 - s) C^2) / q, so a step is linear
    in x: its factor and its noise are read off ``sde_step`` at x = 1, and the variance follows.
    """
    grid = [shift_sigma(1 - i / count, shift) for i in range(count + 1)]
    variance = 1.0
    for s, following in itertools.pairwise(grid):
        k = (s - (1 - s) * C**2) / ((1 - s) ** 2 * C**2 + s**2)
        one = torch.ones(1, 1, dtype=torch.float64)
        reached = sde_step(kind, one, k * one, sigmas(s), sigmas(following), level)
        variance = reached.mean.item() ** 2 * variance + reached.std_B.item() ** 2
    return math.sqrt(variance)


@pytest.mark.parametrize(("kind", "level", "coarse"), [("flow", 0.7, 0.334), ("dance", 0.3, 0.298)])
def test_flow_and_dance_keep_the_marginals_as_steps_grow(kind: str, level: float, coarse: float) -> None:
    stds = [final_std(kind, level, count, shift=3.0) for count in (10, 50, 200, 800)]
    print(f"{kind}: {[round(std, 4) for std in stds]} for 10, 50, 200, 800 steps; target {C}")
    assert stds[0] == pytest.approx(coarse, abs=2e-3)
    assert stds[-1] == pytest.approx(0.399, abs=1e-3)
    assert all(a < b < C + 1e-3 for a, b in itertools.pairwise(stds))


def test_samples_have_the_marginals_that_the_recursion_says() -> None:
    """The recursion above, checked by drawing: 20000 samples of 50 steps."""
    x = normal(0, (20_000, 1)).double()
    grid = [shift_sigma(1 - i / 50, 3.0) for i in range(51)]
    draw = torch.Generator().manual_seed(1)
    for s, following in itertools.pairwise(grid):
        v = (s - (1 - s) * C**2) / ((1 - s) ** 2 * C**2 + s**2) * x
        x = sde_step("flow", x, v, sigmas(s).expand(20_000), sigmas(following).expand(20_000), 0.7).sample(
            torch.randn(x.shape, generator=draw)
        )
    assert x.std().item() == pytest.approx(final_std("flow", 0.7, 50, 3.0), rel=0.02)
    assert abs(x.mean().item()) < 0.01


# -- log-probs and KL


@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_the_log_prob_is_scipys_gaussian_averaged_over_a_rows_dims(kind: str) -> None:
    _, _, reached = step(kind, 0.7, 0.6, 0.45)
    moved = reached.sample(normal(3))
    density = stats.norm(reached.mean.double().numpy(), reached.std_B[0].item()).logpdf(moved.double().numpy())
    log_prob = reached.log_prob(moved)
    assert log_prob.dtype == torch.float32
    np.testing.assert_allclose(log_prob.numpy(), density.reshape(3, -1).mean(1), rtol=1e-6)


def test_the_log_prob_of_cps_is_minus_the_mean_square_and_finite_without_noise() -> None:
    for following in (0.4, 0.0):
        _, _, reached = step("cps", 0.8, 0.6, following)
        moved = reached.sample(normal(3))
        expected = -((moved - reached.mean) ** 2).flatten(1).mean(1)
        torch.testing.assert_close(reached.log_prob(moved), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", SDE_KINDS)
def test_the_log_prob_has_the_velocitys_gradient_and_none_of_what_was_drawn(kind: str) -> None:
    """d log-prob / dv = (x' - mu) / (var D) dmu/dv, with the dmu/dv of the formula."""
    s, following, level = 0.6, 0.45, 0.7
    x, v = normal(0), normal(1).requires_grad_(True)
    reached = sde_step(kind, x, v, sigmas(s, s, s), sigmas(following, following, following), level)
    moved = reached.sample(normal(2))
    (gradient,) = torch.autograd.grad(reached.log_prob(moved).sum(), v)
    dt, sd = following - s, reached.std_B[0].item()
    if kind == "cps":
        by_v, variance = -s * (1 - following) + math.sqrt(following**2 - sd**2) * (1 - s), 0.5
    else:
        g2 = sd**2 / -dt
        by_v, variance = dt * (1 + g2 / (2 * s) * (1 - s)), sd**2
    expected = (moved - reached.mean).detach() / (variance * x[0].numel()) * by_v
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_the_kl_is_that_of_two_gaussians(kind: str) -> None:
    """Against torch.distributions, and against the mean of the difference of log-probs over many draws."""
    _, _, p = step(kind, 0.7, 0.6, 0.45)
    other = p.mean + 0.05 * normal(4)
    std = p.std_B[0].item()
    normal_p, normal_q = (torch.distributions.Normal(mean.double(), std) for mean in (p.mean, other))
    expected = torch.distributions.kl_divergence(normal_p, normal_q).flatten(1).mean(1)
    torch.testing.assert_close(p.kl(other).double(), expected, rtol=1e-5, atol=0)


def test_the_kl_carries_gradient() -> None:
    v = normal(1).requires_grad_(True)
    s, following = sigmas(0.6, 0.6, 0.6), sigmas(0.45, 0.45, 0.45)
    reached = sde_step("flow", normal(0), v, s, following, 0.7)
    kl = reached.kl(reached.mean.detach() - 0.1)
    (gradient,) = torch.autograd.grad(kl.sum(), v)
    assert gradient.abs().min() > 0
