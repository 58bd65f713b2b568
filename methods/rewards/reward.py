"""What a reward takes and gives, and the rule for samples that fail.

Knows nothing about any particular reward, about groups or about advantages.

Legend: B = samples, F = frames, H, W = pixels, C = 3 (RGB, 0..255).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cards.card import ModelCard
from cards.errors import UserError
from inference.engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")
WATCH = "watch/"


@dataclass(frozen=True)
class RewardBatch:
    """Decoded samples with what they were asked to show."""

    videos_BFHWC: NDArray[np.uint8] | Sequence[NDArray[np.uint8]]  # uint8 RGB; a list when sizes differ
    prompts: Sequence[str]  # the ORIGINAL instruction, one a sample
    metadata: Sequence[Mapping[str, Any]]  # the prompt source's own fields, one mapping a sample

    def __post_init__(self) -> None:
        sizes = (len(self.videos_BFHWC), len(self.prompts), len(self.metadata))
        if len(set(sizes)) != 1:
            raise ValueError(f"got {sizes[0]} videos, {sizes[1]} prompts, {sizes[2]} metadata; expected equal counts")

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int]) -> RewardBatch:
        """The samples at ``rows``, in that order."""
        return RewardBatch(
            videos_BFHWC=[self.videos_BFHWC[i] for i in rows],
            prompts=[self.prompts[i] for i in rows],
            metadata=[self.metadata[i] for i in rows],
        )


@dataclass(frozen=True)
class Scores:
    """One number a sample; NaN = failed, to be left out of every mean."""

    values: NDArray[np.float64]  # (B,)
    parts: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # name -> (B,); NaN = not asked or failed
    reasons: tuple[str, ...] = ()  # distinct reasons of the failures, for messages

    @property
    def failed(self) -> int:
        """How many samples have no score."""
        return int(np.isnan(self.values).sum())

    def metrics(self) -> dict[str, float]:
        """Mean of each part over the samples that have it, as ``reward/<part>``; NaN for a part that nobody has. A part
        called ``watch/...`` is not trained on and keeps its name."""
        return {
            name if name.startswith(WATCH) else f"reward/{name}": mean_known(values)
            for name, values in self.parts.items()
        }


class Reward(ABC):
    """Base of all rewards. Subclasses set ``name`` and ``version`` and implement ``score``."""

    name: str  # as logged and as in conf/reward/
    version: str  # changes whenever equal inputs may score differently; logged with the run
    learned = False  # whether a model that can be fooled says how good a sample is

    def check(self) -> None:  # noqa: B027 - optional by design: most rewards have no files to check
        """Raise ``UserError`` when this reward cannot work as configured. Cheap: loads no weights."""

    def cards(self) -> Mapping[str, ModelCard]:
        """Name -> card of the models that the run's engine loads for it; a model that it loads itself is not among
        them."""
        return {}

    def use_engine(self, engine: Engine) -> None:  # noqa: B027 - optional by design: most rewards need none
        """The run's engine, for rewards that are requests to a served model; called before :meth:`prepare`."""

    def prepare(self, device: str = "cpu") -> None:  # noqa: B027 - optional by design: rule-based rewards load nothing
        """Load weights onto ``device``, once. ``score`` calls it when nobody did."""

    def part_names(self) -> tuple[str, ...]:
        """Names of the parts that :meth:`score` gives, the same for every batch: processes gather them one by one."""
        return ()

    def settle(self, scores: Scores) -> NDArray[np.float64]:
        """Final values (B,) of a whole training step, whose ``scores`` were gathered from all processes. A reward whose
        values depend on what else is in the batch makes them anew of its parts."""
        return scores.values

    @abstractmethod
    def score(self, batch: RewardBatch) -> Scores:
        """Score every sample. One bad sample is NaN, not an exception; only misconfiguration raises ``UserError``."""


def mean_known(values: ArrayLike) -> float:
    """Mean of what is not NaN; NaN when nothing is known."""
    values = np.asarray(values, dtype=np.float64)
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def clean(values: ArrayLike) -> NDArray[np.float64]:
    """Float64 with every non-finite entry as NaN: an infinity is no score either."""
    values = np.array(values, dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    return values


def attempt(reward: str, samples: int, one: Callable[[int], T]) -> tuple[list[T | None], tuple[str, ...]]:
    """``one(i)`` for each sample; None where it raised. Failures are logged once a distinct reason and returned.

    ``UserError`` (misconfiguration) and running out of memory pass through: they are nobody's bad sample."""
    results: list[T | None] = []
    reasons: dict[str, None] = {}
    for i in range(samples):
        try:
            results.append(one(i))
        except (UserError, MemoryError):
            raise
        except Exception as error:  # whatever a bad sample can cause
            results.append(None)
            reasons[f"{type(error).__name__}: {error}"] = None
    for reason in reasons:
        log.warning("reward %s: sample not scored, masked: %s", reward, reason)
    return results, tuple(reasons)
