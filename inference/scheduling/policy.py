"""The interface of a policy, and the entry that it works on.

A policy ranks; ``inference.scheduler`` adds what all policies share: the starvation bound, riders and the budget.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

PRIORITY_RANGE = (-8, 8)
"""Priorities outside count as the nearest inside."""


def weight_of(priority: int) -> float:
    """Share of a priority: 0 is 1, every level doubles it."""
    low, high = PRIORITY_RANGE
    return 2.0 ** min(max(priority, low), high)


@dataclass(frozen=True, slots=True)
class Entry:
    """A request in flight, or about to be, as the scheduler sees it; made anew for every round."""

    id: Hashable
    arrival: float
    """Seconds, on the clock that ``now`` is read from."""
    step_seconds: float
    """Predicted device seconds of its next step, > 0."""
    remaining_seconds: float
    """Predicted device seconds until it is complete, the next step included."""
    priority: int = 0
    """Higher goes first, or gets the larger share."""
    deadline: float | None = None
    """Seconds, on the clock of ``arrival``."""
    group: Hashable | None = None
    """Steps of equal groups share a forward; None shares with none."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_seconds) and self.step_seconds > 0):
            raise ValueError(f"step_seconds of {self.id!r}: got {self.step_seconds}, expected a finite number > 0")

    @property
    def weight(self) -> float:
        return weight_of(self.priority)


class Policy(ABC):
    """Who is due. Its state is keyed by entry id and covers the entries of the last round alone."""

    name: ClassVar[str]

    @abstractmethod
    def rank(self, entry: Entry) -> tuple[float, ...]:
        """Order in which requests wait for admission, smallest first; settled once, when the request arrives."""

    @abstractmethod
    def due(self, entries: Sequence[Entry], now: float) -> list[Entry]:
        """The entries that are to take a step, best first; at least one of one or more."""

    def may_ride(self, entry: Entry) -> bool:
        """Whether an entry that is not due may take its step inside the forward of one that is."""
        return True

    def served(self, entry: Entry, seconds: float) -> None:  # noqa: B027  (most policies keep no account)
        """An entry took a step, at the cost of ``seconds``."""
