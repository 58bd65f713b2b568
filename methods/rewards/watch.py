"""Reward hacking watch: a learned reward that rises while a rule-based one falls says so while the run can be stopped.

Knows that ShapeWorld prompts have a rule-based judge, ShapeEval, and what a trend is. The judge is only watched: it is
no part of what is trained on. Prompts of other worlds are left unwatched.

Legend: B samples, n steps of a window.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cards.card import ModelCard
from cards.errors import UserError
from inference.engine import Engine
from methods.rewards.combine import WeightedReward
from methods.rewards.reward import WATCH, Reward, RewardBatch, Scores
from methods.rewards.shape_eval import ShapeEvalReward
from methods.shapeworld.scene import parse

LEARNED, RULE, EXACT = WATCH + "learned", WATCH + "score", WATCH + "all_correct"
SINCE = WATCH + "hacking_since"
"""Metric: the training step at which hacking began, 0 while there is none."""


class HackingWarning(UserWarning):
    """The learned reward rises while the rule-based one falls."""


class WatchedReward(Reward):
    """A learned reward as it is, with ShapeEval's verdict on the same samples beside it as ``watch/...`` parts:
    ``learned`` (its raw value; of several rewards the weighted sum of the learned ones), ``score`` and ``all_correct``.
    """

    learned = True

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self.name = reward.name
        self.version = reward.version
        self._judge = ShapeEvalReward()

    def check(self) -> None:
        self.reward.check()

    def cards(self) -> Mapping[str, ModelCard]:
        return self.reward.cards()

    def use_engine(self, engine: Engine) -> None:
        self.reward.use_engine(engine)

    def prepare(self, device: str = "cpu") -> None:
        self.reward.prepare(device)

    def part_names(self) -> tuple[str, ...]:
        return (*self.reward.part_names(), LEARNED, RULE, EXACT)

    def settle(self, scores: Scores) -> NDArray[np.float64]:
        return self.reward.settle(scores)

    def score(self, batch: RewardBatch) -> Scores:
        scores = self.reward.score(batch)
        rows = [i for i, prompt in enumerate(batch.prompts) if _is_caption(prompt)]
        watched = {name: np.full(len(batch), np.nan) for name in (RULE, EXACT)}
        if rows:
            parts = self._judge.score(batch.select(rows)).parts
            watched[RULE][rows], watched[EXACT][rows] = parts["score"], parts["all_correct"]
        parts = {**scores.parts, LEARNED: raw_learned(self.reward, scores), **watched}
        return Scores(values=scores.values, parts=parts, reasons=scores.reasons)


def watched(reward: Reward) -> Reward:
    """The reward, watched where it is a learned one."""
    return WatchedReward(reward) if reward.learned and not isinstance(reward, WatchedReward) else reward


def raw_learned(reward: Reward, scores: Scores) -> NDArray[np.float64]:
    """(B,) what the learned part of a reward says, comparable from step to step."""
    if not isinstance(reward, WeightedReward):
        return scores.values
    terms = [reward.weights[name] * scores.parts[name] for name, part in reward.rewards.items() if part.learned]
    return np.sum(terms, axis=0)


def _is_caption(prompt: Any) -> bool:
    try:
        parse(prompt)
    except (UserError, AttributeError):
        return False
    return True


def trend(steps: Sequence[float], values: Sequence[float]) -> float:
    """t statistic of the slope of a least-squares line, n - 2 degrees of freedom: the slope over its standard error.

    0 for equal values; an infinity for points that lie on a sloped line up to rounding.
    """
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    x, y = x - x.mean(), y - y[0]
    y = y - y.mean()
    sxx, sxy, syy = float(x @ x), float(x @ y), float(y @ y)
    if syy == 0 or sxx == 0:
        return 0.0
    slope = sxy / sxx
    left = max(0.0, syy - slope * sxy)
    if left <= 1e-12 * syy:
        return math.copysign(math.inf, slope)
    return slope / math.sqrt(left / (len(x) - 2) / sxx)


@dataclass
class HackingWatch:
    """Looks at the trends of both rewards over the last steps and warns once.

    Args:
        window: n, training steps that a trend is of.
        certainty: t statistic that a trend must reach, up for the learned reward and down for the rule-based one.
    """

    window: int = 30
    certainty: float = 3.0
    steps: list[int] = field(default_factory=list)
    """Of the window; steps without both figures are left out."""
    learned: list[float] = field(default_factory=list)
    rule: list[float] = field(default_factory=list)
    since: int = 0
    """Step at which the present hacking began: the first of the window in which it was first seen; 0 = none."""
    warned: bool = False

    def observe(self, step: int, learned: float, rule: float) -> int:
        """Takes the means of a step's rollouts; gives ``since``."""
        if not (math.isfinite(learned) and math.isfinite(rule)):
            return self.since
        for history, value in ((self.steps, step), (self.learned, learned), (self.rule, rule)):
            history.append(value)  # type: ignore[arg-type]
            del history[: -self.window]
        if len(self.steps) < self.window:
            return self.since
        rises = trend(self.steps, self.learned) >= self.certainty
        falls = trend(self.steps, self.rule) <= -self.certainty
        if not (rises and falls):
            self.since = 0
        elif self.since == 0:
            self.since = self.steps[0]
            self._warn()
        return self.since

    def _warn(self) -> None:
        if self.warned:
            return
        self.warned = True
        half = self.window // 2
        ends = [(np.mean(values[:half]), np.mean(values[-half:])) for values in (self.learned, self.rule)]
        (a, b), (c, d) = ends
        warnings.warn(
            f"reward hacking since about step {self.since}: the learned reward rises ({a:.3g} to {b:.3g}) while "
            f"held-out ShapeEval falls ({c:.3g} to {d:.3g}). Go back to a checkpoint from before, lower lr=, keep the "
            "policy closer to its base, or train on both rewards",
            HackingWarning,
            stacklevel=3,
        )

    def figures(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """What a step's metrics are to be joined by; nothing where nothing is watched."""
        if LEARNED not in metrics or RULE not in metrics:
            return {}
        return {SINCE: float(self.observe(step, metrics[LEARNED], metrics[RULE]))}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> HackingWatch:
        return cls(**state)
