"""The SDE of a flow as pure functions: a step's distribution and the log-prob of what was drawn from it.

A deterministic sampler gives no probabilities; with noise in its steps and the drift that makes up for it the marginals
stay and each step is a Gaussian whose mean the network decides. Kinds: ``flow`` (Flow-GRPO, Liu et al. 2025, arXiv
2505.05470), ``dance`` (DanceGRPO, Xue et al. 2025, arXiv 2505.07818) and ``cps`` (coefficients-preserving sampling,
Wang and Yu 2025, arXiv 2509.05952), whose samples have less noise left and whose marginals are not the flow's.

All three are the Euler step plus a multiple of the predicted noise: ``mean = x + dt v + c (x + (1 - s) v)``, so that
level 0 is the Euler step to the last bit. Everything about a row is computed from that row alone, in a fixed order: a
value does not depend on the rest of the batch. Knows nothing of requests and networks.

Legend: B rows; ``...`` the dims of a latent. Sigmas s in [0, 1], 1 = noise; s' is the next one and dt = s' - s < 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cards.errors import unknown_name
from cards.prediction import expand_to, velocity_to_noise

SDE_KINDS = ("flow", "dance", "cps")


@dataclass(frozen=True)
class StepDistribution:
    """Where a step may lead: ``mean + std z`` with z standard normal."""

    mean: Tensor
    """(B, ...) float32, with the velocity's gradient."""
    std_B: Tensor
    """float32, >= 0."""
    variance_B: Tensor
    """float64: what squared distances from the mean are measured in, by log-probs and KL alike. It is ``std^2``; for
    ``cps``, whose last step has no noise, 1/2."""
    normalised: bool
    """Whether log-probs hold the Gaussian's constant; ``cps`` leaves it out."""

    def sample(self, z: Tensor) -> Tensor:
        """(B, ...) for standard normal ``z``."""
        return self.mean + expand_to(self.std_B, self.mean) * z

    def log_prob(self, reached: Tensor) -> Tensor:
        """(B,) float32: log-density of ``reached`` (B, ...), the mean over a row's dims; computed in float64.

        ``-(x' - mu)^2 / (2 var) - log(2 pi var) / 2``; ``cps``: ``-(x' - mu)^2``. ``reached`` gets no gradient. The
        mean, not the sum: a ratio of sums would be at the mercy of the number of dims.
        """
        squared_B = _mean_square(reached.detach(), self.mean)
        log_prob_B = -squared_B / (2 * self.variance_B)
        if self.normalised:
            log_prob_B = log_prob_B - 0.5 * torch.log(2 * math.pi * self.variance_B)
        return log_prob_B.float()

    def kl(self, other_mean: Tensor) -> Tensor:
        """(B,) float32: exact KL divergence from the same step with another mean, ``|mu - mu'|^2 / (2 var)``, the mean
        over a row's dims. The gradient is that of both means."""
        return (_mean_square(self.mean, other_mean) / (2 * self.variance_B)).float()


def noise_level(kind: str, sigma_B: Tensor, sigma_next_B: Tensor, level: float) -> Tensor:
    """(B,) float64: g of ``flow``, ``a sqrt(s / (1 - s))`` with s' in place of the s inside 1 - s at s = 1, or of
    ``dance``, the level itself. ``cps`` has none."""
    if kind == "dance":
        return torch.full_like(sigma_B, level, dtype=torch.float64)
    if kind == "flow":
        s, following = sigma_B.double(), sigma_next_B.double()
        return level * torch.sqrt(s / (1 - torch.where(s == 1, following, s)))
    raise unknown_name("SDE kind with a noise level", kind, ("flow", "dance"))


def sde_step(
    kind: str, x: Tensor, velocity: Tensor, sigma_B: Tensor, sigma_next_B: Tensor, level: float
) -> StepDistribution:
    """The step from ``x`` (B, ...) at ``sigma_B`` to ``sigma_next_B`` for a ``velocity`` (B, ...), in float32.

    flow, dance: ``mu = x + [v + g^2 / (2 s) (x + (1 - s) v)] dt``, ``std = g sqrt(-dt)``.
    cps: ``std = s' sin(a pi / 2)``, ``mu = (1 - s') x0_hat + sqrt(s'^2 - std^2) x1_hat`` with the predicted noise
    ``x1_hat = x + (1 - s) v``; here ``x + dt v + (sqrt(s'^2 - std^2) - s') x1_hat``, which is the same.

    ``level`` is a, in [0, 1] for cps. Raises ``UserError`` for a kind that does not exist.
    """
    if kind not in SDE_KINDS:
        raise unknown_name("SDE kind", kind, SDE_KINDS)
    s, following = sigma_B.double(), sigma_next_B.double()
    dt = following - s
    if kind == "cps":
        std = following * math.sin(level * math.pi / 2)
        noise_share = torch.sqrt(following**2 - std**2) - following
        variance = torch.full_like(std, 0.5)
    else:
        g = noise_level(kind, sigma_B, sigma_next_B, level)
        std = g * torch.sqrt(-dt)
        noise_share = g**2 * dt / (2 * s)
        variance = std**2

    def each(values_B: Tensor) -> Tensor:
        return expand_to(values_B.float(), x)

    x, velocity = x.float(), velocity.float()
    predicted_noise = velocity_to_noise(x, velocity, expand_to(sigma_B.float(), x))
    mean = x + each(dt) * velocity + each(noise_share) * predicted_noise
    return StepDistribution(mean, std.float(), variance, normalised=kind != "cps")


def _mean_square(a: Tensor, b: Tensor) -> Tensor:
    """(B,) float64 mean of ``(a - b)^2`` over a row's dims, each row by itself."""
    squared = (a.double() - b.double()).square()
    return torch.stack([row.mean() for row in squared])
