"""Several rewards as one: a weighted sum.

Knows how scores add up and that a sample which one reward failed to score has no sum. Leaves the choice of ONE reward a
sample to ``tagged`` and the rewards to their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from inference.engine import Engine
from methods.rewards.reward import Reward, RewardBatch, Scores, clean

Normalise = Literal["sum", "each"]


class RewardGroup(Reward):
    """Base of a reward that is made of others, by name; its parts are their values and ``name/part`` of theirs."""

    rewards: dict[str, Reward]

    def check(self) -> None:
        for reward in self.rewards.values():
            reward.check()

    @property
    def learned(self) -> bool:  # type: ignore[override]
        return any(reward.learned for reward in self.rewards.values())

    def cards(self) -> Mapping[str, ModelCard]:
        return {
            f"{name}/{inner}": card for name, reward in self.rewards.items() for inner, card in reward.cards().items()
        }

    def use_engine(self, engine: Engine) -> None:
        for reward in self.rewards.values():
            reward.use_engine(engine)

    def prepare(self, device: str = "cpu") -> None:
        for reward in self.rewards.values():
            reward.prepare(device)

    def part_names(self) -> tuple[str, ...]:
        inner = (f"{name}/{part}" for name, reward in self.rewards.items() for part in reward.part_names())
        return (*self.rewards, *inner)


class WeightedReward(RewardGroup):
    """Weighted sum of rewards that all look at every sample.

    Args:
        rewards: name -> reward.
        weights: name -> weight, one for each reward.
        normalise: ``sum`` adds the raw scores, to be normalised later as one reward, so a reward of small spread counts
            little; ``each`` first brings every reward to mean 0 and standard deviation 1 over the scored samples of the
            batch (of all processes, see ``settle``), so weights compare spreads. Values of two batches then do not
            compare: the mean is always 0. Follow ``parts`` (raw, by name) instead.
        eps: added to the standard deviations of ``each``.
    """

    name = "weighted"

    def __init__(
        self,
        *,
        rewards: Mapping[str, Reward],
        weights: Mapping[str, float],
        normalise: Normalise = "sum",
        eps: float = 1e-4,
    ) -> None:
        if not rewards:
            raise UserError("reward weighted: got no rewards, expected at least one under rewards")
        if set(rewards) != set(weights):
            raise UserError(
                f"reward weighted: got weights for {sorted(weights)}, expected one for each of {sorted(rewards)}; make"
                " the two lists of names equal"
            )
        bad = {name: weight for name, weight in weights.items() if not np.isfinite(weight)}
        if bad:
            raise UserError(f"reward weighted: got weights {bad}, expected finite numbers")
        if normalise not in get_args(Normalise):
            raise unknown_name("normalise for reward weighted", str(normalise), get_args(Normalise))
        if not eps > 0:
            raise UserError(f"reward weighted: eps got {eps}, expected a number above 0; use 1e-4")
        self.rewards = dict(rewards)
        self.weights = {name: float(weights[name]) for name in self.rewards}
        self.normalise = normalise
        self.eps = eps
        terms = ", ".join(f"{self.weights[name]:g} {name} ({part.version})" for name, part in self.rewards.items())
        self.version = f"1 {normalise}: {terms}"

    def settle(self, scores: Scores) -> NDArray[np.float64]:
        return self.combine({name: reward.settle(part_of(scores, name)) for name, reward in self.rewards.items()})

    def score(self, batch: RewardBatch) -> Scores:
        scores = {name: reward.score(batch) for name, reward in self.rewards.items()}
        parts = {name: score.values for name, score in scores.items()}
        inner = {f"{name}/{part}": values for name, score in scores.items() for part, values in score.parts.items()}
        reasons = tuple(f"{name}: {reason}" for name, score in scores.items() for reason in score.reasons)
        return Scores(values=self.combine(parts), parts=parts | inner, reasons=reasons)

    def combine(self, parts: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """The weighted sum of raw scores by reward name, each (B,); NaN in any of them is NaN in the sum."""
        terms = [self.weights[name] * self._scaled(clean(parts[name])) for name in self.rewards]
        return np.sum(terms, axis=0)

    def _scaled(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        known = values[~np.isnan(values)]
        if self.normalise == "sum" or known.size == 0:
            return values
        shifted = values - known[0]  # through differences, so that equal scores give exact zeros
        mean, std = np.nanmean(shifted), np.nanstd(shifted)
        return (shifted - mean) / (std + self.eps)


def part_of(scores: Scores, name: str) -> Scores:
    """The scores of the reward ``name`` among several: its values are the part of that name."""
    parts = {key.removeprefix(f"{name}/"): values for key, values in scores.parts.items() if key.startswith(f"{name}/")}
    return Scores(values=scores.parts[name], parts=parts)
