"""Conversions between what a flow network predicts and what loops and losses need.

Notation: ``sigma`` in [0, 1], 1 = noise; ``x_s = (1 - s) x0 + s e``; velocity ``v = e - x0``; the network sees the
timestep ``1000 s``, continuous. Pure functions; every tensor argument broadcasts. Source: rectified flow, Liu et al.
2022 (arXiv 2209.03003) and the timestep shift of Esser et al. 2024 (arXiv 2403.03206, Sec. 5.3.2).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
"""Timesteps per unit of sigma."""

FloatOrTensor = TypeVar("FloatOrTensor", float, Tensor)


def expand_to(values_B: Tensor, like: Tensor) -> Tensor:
    """``values`` (B,) viewed as (B, 1, 1, ...) so that it broadcasts over ``like`` (B, ...)."""
    return values_B.reshape(values_B.shape[0], *([1] * (like.ndim - 1)))


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """``x_s = (1 - s) x0 + s e``."""
    return (1 - sigma) * x0 + sigma * noise


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """``v* = e - x0``, the derivative of ``x_s`` by ``s``."""
    return noise - x0


def velocity_to_x0(x_s: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """``x0_hat = x_s - s v``."""
    return x_s - sigma * velocity


def velocity_to_noise(x_s: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """``e_hat = x_s + (1 - s) v``."""
    return x_s + (1 - sigma) * velocity


def x0_to_velocity(x_s: Tensor, x0: Tensor, sigma: Tensor | float) -> Tensor:
    """``v = (x_s - x0) / s``; infinite at s = 0, where ``x_s`` says nothing of the noise."""
    return (x_s - x0) / sigma


def sigma_to_timestep(sigma: FloatOrTensor) -> FloatOrTensor:
    """``t = 1000 s``, never truncated to an integer."""
    return sigma * NUM_TRAIN_TIMESTEPS


def timestep_to_sigma(timestep: FloatOrTensor) -> FloatOrTensor:
    """``s = t / 1000``."""
    return timestep / NUM_TRAIN_TIMESTEPS


def shift_sigma(sigma: FloatOrTensor, shift: float) -> FloatOrTensor:
    """``s = S u / (1 + (S - 1) u)``: a translation of the logit by ``ln S``. ``shift = 1`` returns its input."""
    if shift == 1:
        return sigma
    return shift * sigma / (1 + (shift - 1) * sigma)


def unshift_sigma(sigma: FloatOrTensor, shift: float) -> FloatOrTensor:
    """Inverse of :func:`shift_sigma`: a shift by ``1 / S``."""
    return shift_sigma(sigma, 1 / shift)


def network_timestep(sigma_B: Tensor) -> Tensor:
    """Timesteps (B,) in float32 for the network, from sigmas (B,)."""
    return sigma_to_timestep(sigma_B.to(torch.float32))
