"""Rewards -> advantages -> optimality probabilities: pure functions in float64.

Knows how a (group, sample) table of rewards becomes a training signal, and that a reward may be missing. Leaves
scoring to ``methods.rewards`` and losses to the methods. Under several processes, gather the whole table first: with
``std="batch"`` the standard deviation is one number over every sample of the iteration.

Legend: G = groups (one prompt each), K = samples a group. NaN (or an infinity) in a reward table = failed to score.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cards.errors import UserError, unknown_name

StdScope = Literal["batch", "group"]


def group_advantages(
    rewards_GK: ArrayLike, *, std: StdScope = "batch", eps: float = 1e-4
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Group-relative advantages A = (R - mean_group) / (std + eps), and the mask of valid samples.

    DiffusionNFT (arXiv 2509.16117, sec. 3) and Flow-GRPO (arXiv 2505.05470, eq. 5). ``std="group"`` divides each group
    by its own standard deviation. ``std="batch"`` divides all by one number: the standard deviation of the RAW rewards
    of every valid sample in the table (not of the group-centred ones), so differences between prompts widen it. Both
    are population standard deviations (divide by n).

    Failed samples enter neither mean nor std and get A = 0. A group with fewer than two valid samples gets A = 0, and
    so does, exactly and not up to rounding, one whose rewards are all equal. Each group sums to zero up to rounding.

    Returns:
        advantages_GK float64, valid_GK bool.
    """
    if std not in get_args(StdScope):
        raise unknown_name("advantage std", str(std), get_args(StdScope))
    if not eps > 0:
        raise UserError(f"advantage eps: got {eps}, expected a number above 0; use 1e-4")
    rewards_GK = np.asarray(rewards_GK, dtype=np.float64)
    if rewards_GK.ndim != 2:
        raise ValueError(f"rewards: got shape {rewards_GK.shape}, expected (groups, samples a group)")
    valid_GK = np.isfinite(rewards_GK)
    advantages_GK = np.zeros_like(rewards_GK)
    batch_std = _std(rewards_GK[valid_GK])
    for group, (rewards_K, valid_K) in enumerate(zip(rewards_GK, valid_GK, strict=True)):
        known = rewards_K[valid_K]
        if known.size < 2:
            continue
        scale = batch_std if std == "batch" else _std(known)
        advantages_GK[group, valid_K] = _centred(known) / (scale + eps)
    return advantages_GK, valid_GK


def optimality_probability(advantages: ArrayLike, *, a_max: float = 5.0) -> NDArray[np.float64]:
    """r = clamp(0.5 + 0.5 clip(A, +-A_max) / A_max, 0, 1): how far a sample is to be pulled towards (r = 1) or pushed
    away from (r = 0); exactly 0.5, no signal, at A = 0. DiffusionNFT (arXiv 2509.16117, algorithm 1). Any shape."""
    if not a_max > 0:
        raise UserError(f"a_max: got {a_max}, expected a number above 0; use 5")
    advantages = np.asarray(advantages, dtype=np.float64)
    return np.clip(0.5 + 0.5 * np.clip(advantages, -a_max, a_max) / a_max, 0.0, 1.0)


def drop_zero_groups(advantages_GK: ArrayLike) -> NDArray[np.bool_]:
    """Mask (G,) of the groups worth a training step: True where any advantage differs from zero.

    A group whose samples all scored alike says nothing about which is better (Flow-GRPO, arXiv 2505.05470)."""
    return np.any(np.asarray(advantages_GK, dtype=np.float64) != 0.0, axis=1)


def _centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """values - mean(values), through differences to the first one, so that equal values give exact zeros."""
    shifted = values - values[0]
    return shifted - shifted.mean()


def _std(values: NDArray[np.float64]) -> float:
    """Population standard deviation, exactly 0 for equal values and for none."""
    if values.size == 0:
        return 0.0
    return float(np.sqrt(np.mean(_centred(values) ** 2)))
