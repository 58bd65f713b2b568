"""Earliest feasible deadline first; everybody else shares what is left fairly.

On one device with steps that may be interleaved, earliest deadline first meets all deadlines whenever any order does
(Dertouzos 1974). A deadline that can no longer be met even alone would make others miss theirs for nothing: such an
entry counts as one without a deadline.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from inference.scheduling.fair import Fair
from inference.scheduling.policy import Entry, Policy


def feasible(entry: Entry, now: float) -> bool:
    """Whether the entry meets its deadline when it has the device to itself from now on."""
    return entry.deadline is not None and now + entry.remaining_seconds <= entry.deadline


class Deadline(Policy):
    """While a feasible deadline is in flight, entries without one step as riders or by the starvation bound alone."""

    name = "deadline"

    def __init__(self) -> None:
        self._fair = Fair()
        self._urgent: set[Hashable] = set()

    def rank(self, entry: Entry) -> tuple[float, ...]:
        deadline = entry.deadline
        if deadline is None or not feasible(entry, entry.arrival):
            deadline = math.inf
        return (deadline, *self._fair.rank(entry))

    def due(self, entries: Sequence[Entry], now: float) -> list[Entry]:
        urgent = [entry for entry in entries if feasible(entry, now)]
        self._urgent = {entry.id for entry in urgent}
        if urgent:
            return [min(urgent, key=lambda entry: (entry.deadline, -entry.priority, entry.arrival))]
        return self._fair.due(entries, now)

    def may_ride(self, entry: Entry) -> bool:
        return entry.id in self._urgent or self._fair.may_ride(entry)

    def served(self, entry: Entry, seconds: float) -> None:
        if entry.id not in self._urgent:
            self._fair.served(entry, seconds)
