"""First in, first out: the oldest request of the highest priority steps until it is complete."""

from __future__ import annotations

from collections.abc import Sequence

from inference.scheduling.policy import Entry, Policy


class Fifo(Policy):
    """See the module's docstring."""

    name = "fifo"

    def rank(self, entry: Entry) -> tuple[float, ...]:
        return (-entry.priority, entry.arrival)

    def due(self, entries: Sequence[Entry], now: float) -> list[Entry]:
        return [min(entries, key=self.rank)] if entries else []
