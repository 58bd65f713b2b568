"""Distribution matching as pure functions: the DMD gradient, its loss, and the noise levels of the scores.

Yin et al. 2023 (arXiv 2311.18828) and 2024 (arXiv 2405.14867). Knows no model: whoever calls evaluates the scores.

Legend: B rows, ... the dims of a sample. Sigma in [0, 1], 1 = noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cards.prediction import expand_to
from loops.flow import sample_sigmas

SIGMA_RANGE = (0.02, 0.98)
"""Scores say little of the clean sample outside."""


def score_sigma(shift: float, generator: torch.Generator) -> Tensor:
    """One sigma (1,) for the scores of a sample: uniform, shifted, then clamped to ``SIGMA_RANGE``."""
    return sample_sigmas("uniform", 1, shift, generator).clamp(*SIGMA_RANGE)


def dmd_gradient(x: Tensor, x0_fake: Tensor, x0_real: Tensor) -> Tensor:
    """Direction (B, ...) in which the samples ``x`` are to be lowered (arXiv 2311.18828, Eq. 7 and 8).

    ``(x0_fake - x0_real) / mean |x - x0_real|`` with one mean a sample, so that it does not depend on what else is in
    the batch. Where that is no number (a sample that the teacher leaves exactly as it is) the gradient is 0.
    """
    size_B = (x - x0_real).abs().flatten(1).mean(1)
    return torch.nan_to_num((x0_fake - x0_real) / expand_to(size_B, x))


def dmd_loss(x: Tensor, gradient: Tensor) -> Tensor:
    """(B,) losses ``0.5 MSE(x, stopgrad(x - gradient))``: of one sample, dL/dx is ``gradient`` / its elements."""
    target = (x - gradient).detach()
    return 0.5 * (x - target).square().flatten(1).mean(1)


def sid_loss(x: Tensor, x0_fake: Tensor, x0_real: Tensor, *, alpha: float = 1.0) -> Tensor:
    """(B,) losses of score identity distillation (arXiv 2404.04057, Eq. 23; arXiv 2506.08009, Sec. 3.3).

    Mean over a sample's elements of ``(f_real - f_fake) [(f_real - x) - alpha (f_real - f_fake)] / mean |x - f_real|``;
    the normaliser is one a sample and carries no gradient, everything else does.
    """
    size_B = (x - x0_real).detach().abs().flatten(1).mean(1)
    apart = x0_real - x0_fake
    terms = torch.nan_to_num(apart * ((x0_real - x) - alpha * apart) / expand_to(size_B, x))
    return terms.flatten(1).mean(1)
