"""Flow-matching maths as pure functions: sampling of sigmas, loss weights, the Euler step.

Notation as in ``cards.prediction``: sigma in [0, 1], 1 = noise. Sources: Esser et al. 2024 (arXiv 2403.03206, Sec. 3.1)
for logit-normal, mode and cosmap; Lipman et al. 2023 (arXiv 2210.02747) for the Euler step of the flow ODE.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cards.errors import unknown_name
from cards.prediction import shift_sigma

MODE_SCALE = 1.29
SAMPLERS = ("uniform", "logit_normal", "mode")
WEIGHTINGS = ("none", "sigma_sqrt", "cosmap", "bell")


def sample_u(
    kind: str, count: int, generator: torch.Generator, *, mean: float = 0.0, std: float = 1.0, scale: float = MODE_SCALE
) -> Tensor:
    """Unshifted sigmas (count,) float32 in [0, 1].

    uniform | logit_normal: sigmoid(N(mean, std^2)) | mode: 1 - u - k (cos^2(pi u / 2) - 1 + u) with k = ``scale``.
    """
    if kind == "logit_normal":
        return torch.sigmoid(torch.randn(count, generator=generator) * std + mean)
    u = torch.rand(count, generator=generator)
    if kind == "uniform":
        return u
    if kind == "mode":
        return 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)
    raise unknown_name("sigma sampler", kind, SAMPLERS)


def sample_sigmas(kind: str, count: int, shift: float, generator: torch.Generator, **options: float) -> Tensor:
    """:func:`sample_u`, then the flow shift."""
    return shift_sigma(sample_u(kind, count, generator, **options), shift)


def _bell(t: Tensor, steps: int) -> Tensor:
    return torch.exp(-2 * ((t - steps / 2) / steps) ** 2)


def loss_weight(kind: str, sigmas: Tensor, *, steps: int = 1000) -> Tensor:
    """Weight of the flow loss at each sigma, shaped as ``sigmas``.

    none = 1 | sigma_sqrt = s^-2 | cosmap = 2 / (pi (1 - 2s + 2 s^2)) | bell: exp(-2 ((t - N/2) / N)^2) minus its
    minimum, rescaled to mean 1 over the N = ``steps`` timesteps t = s N.
    """
    if kind == "none":
        return torch.ones_like(sigmas)
    if kind == "sigma_sqrt":
        return sigmas**-2.0
    if kind == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    if kind == "bell":
        grid = _bell(torch.arange(1, steps + 1, dtype=torch.float64), steps)
        low = grid.min()
        mean = (grid - low).mean()
        return ((_bell(sigmas.double() * steps, steps) - low).clamp_min(0) / mean).to(sigmas.dtype)
    raise unknown_name("loss weighting", kind, WEIGHTINGS)


def euler_step(x_s: Tensor, velocity: Tensor, sigma: Tensor | float, sigma_next: Tensor | float) -> Tensor:
    """``x' = x + (s' - s) v`` in float32."""
    return x_s.float() + (sigma_next - sigma) * velocity
