"""PPO's clipped loss, shared by all methods whose policy has log-probs: pure functions of (B,) rows.

Knows log-probs, advantages and ratios; leaves what they are of (a sampler's step, a token) to the methods. Schulman et
al. 2017 (arXiv 1707.06347, Eq. 7), as Flow-GRPO (arXiv 2505.05470) uses it on mean-reduced log-probs, where the clip
range is small: 1e-4 to 1e-3.

Legend: B rows, each one decision of the policy. rho = exp(log-prob - old log-prob).
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(log_prob_B: Tensor, old_B: Tensor, advantage_B: Tensor, *, clip_range: float) -> Tensor:
    """(B,) losses ``max(-A rho, -A clip(rho, 1 - eps, 1 + eps))``; ``old_B`` gets no gradient.

    Where ``log_prob`` equals ``old`` bit for bit rho is exactly 1, the loss -A and its gradient that of -A log-prob.
    """
    rho_B = torch.exp(log_prob_B - old_B.detach())
    clipped_B = rho_B.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage_B * rho_B, -advantage_B * clipped_B)


def ratio_metrics(log_prob_B: Tensor, old_B: Tensor, *, clip_range: float) -> dict[str, Tensor]:
    """Per row (B,), without gradient, what is worth watching: ``clip_fraction`` (0 or 1: the ratio is outside the clip
    range), ``approx_kl`` (rho - 1 - log rho, Schulman's k3 estimate of KL(old, new)) and ``ratio_deviation`` |rho - 1|.
    """
    log_rho_B = (log_prob_B - old_B).detach().double()
    away_B = torch.expm1(log_rho_B)
    return {
        "clip_fraction": (away_B.abs() > clip_range).double(),
        "approx_kl": away_B - log_rho_B,
        "ratio_deviation": away_B.abs(),
    }
