"""The DMD gradient and its loss against closed forms, alone and on data whose scores are known."""

from __future__ import annotations

import math

import pytest
import torch

from cards.prediction import add_noise
from methods.distribution_matching import SIGMA_RANGE, dmd_gradient, dmd_loss, score_sigma


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_gradient_is_the_difference_over_a_mean_of_each_sample() -> None:
    x, fake, real = (draw(3, 2, 4, seed=i) for i in range(3))
    found = dmd_gradient(x, fake, real)
    for b in range(3):
        size = sum(abs(float(v)) for v in (x[b] - real[b]).flatten()) / 8
        torch.testing.assert_close(found[b], (fake[b] - real[b]) / size, rtol=1e-12, atol=0)


def test_a_samples_gradient_does_not_depend_on_its_batch() -> None:
    x, fake, real = (draw(5, 3, 2, seed=i) for i in range(3))
    x[4] *= 1e6  # a wild neighbour
    whole = dmd_gradient(x, fake, real)
    for b in range(5):
        assert torch.equal(whole[b : b + 1], dmd_gradient(x[b : b + 1], fake[b : b + 1], real[b : b + 1]))


def test_equal_scores_give_exactly_no_gradient() -> None:
    x, fake = draw(2, 6).float(), draw(2, 6, seed=1).float()
    assert torch.equal(dmd_gradient(x, fake, fake), torch.zeros(2, 6))


@pytest.mark.parametrize("scale", [-2.0, 0.5, 10.0])
def test_the_gradient_is_linear_in_the_difference_of_the_scores(scale: float) -> None:
    x, fake, real = (draw(2, 5, seed=i) for i in range(3))
    scaled = dmd_gradient(x, real + scale * (fake - real), real)
    torch.testing.assert_close(scaled, scale * dmd_gradient(x, fake, real), rtol=1e-12, atol=1e-14)


def test_a_sample_that_the_teacher_leaves_as_it_is_gets_no_nan() -> None:
    x = draw(2, 4)
    assert torch.equal(dmd_gradient(x, x.clone(), x.clone()), torch.zeros(2, 4, dtype=torch.float64))
    assert torch.isfinite(dmd_gradient(x, x + 1, x.clone())).all()


def test_autograd_gives_the_gradient_over_the_elements_of_the_batch() -> None:
    x, fake, real = (draw(4, 3, 5, seed=i) for i in range(3))
    x.requires_grad_(True)
    gradient = dmd_gradient(x, fake, real)
    assert gradient.requires_grad  # the loss must stop it: the scores are constants to the sample
    (found,) = torch.autograd.grad(dmd_loss(x, gradient).mean(), x)
    torch.testing.assert_close(found, gradient.detach() / x.numel(), rtol=1e-12, atol=0)


def test_the_loss_value_is_half_the_mean_square_of_the_gradient() -> None:
    x, gradient = draw(3, 4), draw(3, 4, seed=1)
    torch.testing.assert_close(dmd_loss(x, gradient), 0.5 * gradient.square().mean(1), rtol=1e-12, atol=0)


def test_descent_along_the_gradient_moves_a_gaussian_onto_the_teachers() -> None:
    """Student N(m, 1), teacher data N(2, 1): both scores are known, and m must go to 2. A wrong sign runs away."""
    m = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD([m], lr=0.3)

    def x0_hat(x_s: torch.Tensor, s: float, mean: float) -> torch.Tensor:
        """E[x0 | x_s] for x0 ~ N(mean, 1)."""
        return mean + (1 - s) / ((1 - s) ** 2 + s**2) * (x_s - (1 - s) * mean)

    for _ in range(100):
        noise, again = (torch.randn(16, 32, generator=generator, dtype=torch.float64) for _ in range(2))
        x = m + noise
        s = 0.2 + 0.6 * torch.rand(1, generator=generator).item()
        with torch.no_grad():
            x_s = add_noise(x, again, s)
            gradient = dmd_gradient(x, x0_hat(x_s, s, m.item()), x0_hat(x_s, s, 2.0))
        optimizer.zero_grad()
        dmd_loss(x, gradient).mean().backward()
        optimizer.step()
    assert m.item() == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
def test_score_sigmas_are_shifted_uniform_clamped_into_their_range(shift: float) -> None:
    generator = torch.Generator().manual_seed(3)
    s = torch.cat([score_sigma(shift, generator) for _ in range(4000)])
    low, high = SIGMA_RANGE
    assert (low, high) == (0.02, 0.98)
    assert s.min().item() == pytest.approx(low) or shift > 1
    assert low - 1e-7 <= s.min() and s.max() <= high + 1e-7
    assert s.median().item() == pytest.approx(shift / (1 + shift), abs=0.02)  # a shift is a translation of the logit
    u = 0.98 / (shift - (shift - 1) * 0.98)  # where the shifted uniform passes the upper bound
    assert (s >= high - 1e-7).float().mean().item() == pytest.approx(
        1 - u, abs=3 * math.sqrt(u * (1 - u) / 4000) + 0.005
    )
