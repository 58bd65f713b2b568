"""PPO's clipped loss against plain numpy and against the policy gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from methods.ppo import policy_loss, ratio_metrics

OLD = torch.tensor([-1.0, -0.3, 0.2, 1.4, 3.7])
A = torch.tensor([2.0, -1.5, 0.0, 5.0, -5.0])


def test_at_equal_log_probs_the_ratio_is_one_to_the_bit_and_the_gradient_the_policy_gradient() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        log_prob = OLD.to(dtype).clone().requires_grad_(True)
        loss = policy_loss(log_prob, OLD.to(dtype), A.to(dtype), clip_range=1e-4)
        assert torch.equal(loss, -A.to(dtype))
        (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
        assert torch.equal(gradient, -A.to(dtype))


@pytest.mark.parametrize("clip_range", [1e-4, 1e-2, 0.2])
def test_the_loss_is_the_larger_of_the_plain_and_the_clipped_one(clip_range: float) -> None:
    moved = torch.tensor([3e-5, -3e-3, 0.4, 0.15, -0.15], dtype=torch.float64)
    old, a = OLD.double(), A.double()
    rho = np.exp(moved.numpy())
    expected = np.maximum(-a.numpy() * rho, -a.numpy() * np.clip(rho, 1 - clip_range, 1 + clip_range))
    np.testing.assert_allclose(policy_loss(old + moved, old, a, clip_range=clip_range).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "moved", "held"), [(1.0, 0.1, True), (1.0, -0.1, False), (-1.0, -0.1, True), (-1.0, 0.1, False)]
)
def test_beyond_the_clip_only_a_step_back_has_a_gradient(advantage: float, moved: float, held: bool) -> None:
    log_prob = torch.tensor([moved], requires_grad=True)
    loss = policy_loss(log_prob, torch.zeros(1), torch.tensor([advantage]), clip_range=0.05)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    assert gradient.item() == (0.0 if held else pytest.approx(-advantage * np.exp(moved), rel=1e-6))


def test_the_old_log_probs_get_no_gradient() -> None:
    old = OLD.clone().requires_grad_(True)
    log_prob = OLD.clone().requires_grad_(True)
    policy_loss(log_prob, old, A, clip_range=0.1).sum().backward()
    assert old.grad is None and log_prob.grad is not None


def test_what_is_watched() -> None:
    moved = torch.tensor([0.0, 2e-4, -2e-4, 0.1, -0.1], dtype=torch.float64)
    watched = ratio_metrics(OLD.double() + moved, OLD.double(), clip_range=1e-3)
    rho = np.exp(moved.numpy())
    assert watched["clip_fraction"].tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_allclose(watched["ratio_deviation"].numpy(), np.abs(rho - 1), atol=1e-15)
    np.testing.assert_allclose(watched["approx_kl"].numpy(), rho - 1 - np.log(rho), atol=1e-15)
    assert all(not value.requires_grad for value in ratio_metrics(OLD.requires_grad_(True), A, clip_range=1).values())
