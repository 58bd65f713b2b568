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

from cards.errors import UserError

log = logging.getLogger(__name__)

T = TypeVar("T")


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

    def means(self) -> dict[str, float]:
        """Mean over the scored samples of each part, for logging; a part that nobody has is left out."""
        known = {name: values[~np.isnan(values)] for name, values in self.parts.items()}
        return {name: float(values.mean()) for name, values in known.items() if values.size}


class Reward(ABC):
    """Base of all rewards. Subclasses set ``name`` and ``version`` and implement ``score``."""

    name: str  # as logged and as in conf/reward/
    version: str  # changes whenever equal inputs may score differently; logged with the run

    def check(self) -> None:  # noqa: B027 - optional by design: most rewards have no files to check
        """Raise ``UserError`` when this reward cannot work as configured. Cheap: loads no weights."""

    def prepare(self, device: str = "cpu") -> None:  # noqa: B027 - optional by design: rule-based rewards load nothing
        """Load weights onto ``device``, once. ``score`` calls it when nobody did."""

    @abstractmethod
    def score(self, batch: RewardBatch) -> Scores:
        """Score every sample. One bad sample is NaN, not an exception; only misconfiguration raises ``UserError``."""


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
