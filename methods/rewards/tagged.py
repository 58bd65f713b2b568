"""Several rewards, one a sample: the sample's own tag says which.

Knows how to route and put together; leaves adding rewards up to ``combine``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cards.errors import UserError, unknown_name
from methods.rewards.combine import RewardGroup, part_of
from methods.rewards.reward import Reward, RewardBatch, Scores, attempt


class TaggedReward(RewardGroup):
    """``metadata["reward"]`` of each sample names the reward that scores it, and only that one sees it.

    Scales differ between rewards, so normalise advantages per group (``std: group``).

    Args:
        rewards: tag -> reward.
        default: tag of the samples that carry none; None = such a sample is masked and counted, as one with an unknown
            tag always is.
    """

    name = "tagged"

    def __init__(self, *, rewards: Mapping[str, Reward], default: str | None = None) -> None:
        if not rewards:
            raise UserError("reward tagged: got no rewards, expected at least one under rewards")
        if default is not None and default not in rewards:
            raise unknown_name("default for reward tagged", default, rewards)
        self.rewards = dict(rewards)
        self.default = default
        self.version = "1 " + ", ".join(f"{tag} ({reward.version})" for tag, reward in self.rewards.items())

    def settle(self, scores: Scores) -> NDArray[np.float64]:
        """Each sample has one tag, so a reward's own samples are those that have its part; a sample that it failed to
        score has none and stays NaN."""
        values = np.full(len(scores.values), np.nan)
        for tag, reward in self.rewards.items():
            own = part_of(scores, tag)
            rows = ~np.isnan(own.values)
            parts = {name: part[rows] for name, part in own.parts.items()}
            values[rows] = reward.settle(Scores(values=own.values[rows], parts=parts))
        return values

    def score(self, batch: RewardBatch) -> Scores:
        tags, reasons = attempt(self.name, len(batch), lambda i: self._tag(batch.metadata[i]))
        values = np.full(len(batch), np.nan)
        parts = {name: np.full(len(batch), np.nan) for name in self.part_names()}
        for tag, reward in self.rewards.items():
            rows = [i for i, own in enumerate(tags) if own == tag]
            if not rows:
                continue
            scores = reward.score(batch.select(rows))
            values[rows] = scores.values
            inner = {f"{tag}/{part}": part_values for part, part_values in scores.parts.items()}
            for part, part_values in ({tag: scores.values} | inner).items():
                parts[part][rows] = part_values
            reasons += tuple(f"{tag}: {reason}" for reason in scores.reasons)
        return Scores(values=values, parts=parts, reasons=reasons)

    def _tag(self, metadata: Mapping[str, object]) -> str:
        tag = metadata.get("reward", self.default)
        if tag not in self.rewards:
            raise ValueError(
                f"got reward tag {tag!r} in the metadata, expected one of {', '.join(sorted(self.rewards))}"
            )
        return str(tag)
