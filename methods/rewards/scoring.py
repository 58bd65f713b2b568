"""The rewards of a training step: this process's samples are scored, every process sees all of them.

Knows groups, failures and what is logged; knows no reward and no advantage.

Legend: G prompts (groups) of all processes, K samples a group, N samples of this process, group-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cards.errors import UserError
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.world import World


@dataclass(frozen=True)
class GroupRewards:
    """What a method makes advantages of."""

    rewards_GK: NDArray[np.float64]
    """Of all processes; NaN = failed."""
    metrics: dict[str, float]
    """This process's, under the same names on each; means over them are the step's."""
    parts_GK: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """The reward's parts, of all processes; NaN = not asked, or failed."""


def score_groups(
    reward: Reward, videos: Any, prompts: Sequence[str], metadata: Sequence[Any], samples: int, world: World
) -> GroupRewards:
    """Scores this process's N = groups x ``samples`` videos. Call on every process.

    Raises ``UserError`` when every sample of the step failed.
    """
    scores = reward.score(RewardBatch(videos, list(prompts), [dict(fields) for fields in metadata]))
    of_all = gathered(reward, scores, world)
    values = reward.settle(of_all)
    failed = int(np.isnan(values).sum())
    if failed == values.size:
        raise UserError(
            f"reward {reward.name!r} failed on all {failed} samples of the step; first reasons: "
            + "; ".join(scores.reasons[:3])
        )
    known = values[~np.isnan(values)]
    metrics = {
        "train/reward": float(known.mean()),
        "train/reward_std": float(known.std()),
        "train/reward_failed": float(failed),
        **scores.metrics(),
    }
    parts_GK = {name: part.reshape(-1, samples) for name, part in of_all.parts.items()}
    return GroupRewards(values.reshape(-1, samples), metrics, parts_GK)


def gathered(reward: Reward, scores: Scores, world: World) -> Scores:
    """The scores of all processes, in rank order."""
    names = reward.part_names()
    if tuple(sorted(scores.parts)) != tuple(sorted(names)):
        raise ValueError(f"reward {reward.name}: got parts {sorted(scores.parts)}, expected {sorted(names)}")
    table = world.gather(np.stack([scores.values, *(scores.parts[name] for name in names)], axis=1))
    parts = {name: table[:, i] for i, name in enumerate(names, start=1)}
    return Scores(values=table[:, 0], parts=parts, reasons=scores.reasons)
