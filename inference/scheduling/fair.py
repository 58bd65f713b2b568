"""Fair shares of device time: deficit round robin in predicted seconds, weighted by priority.

Shreedhar & Varghese, "Efficient Fair Queueing using Deficit Round Robin" (1995), with a quantum that is chosen every
round as the least that makes somebody due: no round is idle, and no quantum has to be tuned to the sizes of steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from inference.scheduling.policy import Entry, Policy

ROUNDING = 1e-9
"""Entries whose need differs by less than this share of the quantum are due together."""


class Fair(Policy):
    """Every entry has a credit in seconds, 0 when it joins. A round adds ``quantum * weight`` to every credit; an entry
    whose credit covers its step is due; a step takes its seconds off. An entry without debt may ride on credit.

    Fairness bound: with s the largest step (predicted or charged), every credit stays within [-s, s]. So, of two
    entries that have been in flight all along, with weights v and w and services S and T in seconds,
    ``|S / v - T / w| <= s / v + s / w`` after every round, however long it goes on. Proof: both got the same sum of
    quanta Q, and a credit is ``Q * weight - service``. The quantum is at most what the neediest lacks, so credits
    stay at or below a step; without a step at credit < 0 they stay at or above minus one. A step that the starvation
    bound forces on an entry in debt is a gift beyond minus one step, and the only exception.
    """

    name = "fair"

    def __init__(self) -> None:
        self._credit: dict[Hashable, float] = {}

    def rank(self, entry: Entry) -> tuple[float, ...]:
        """Short requests first, with ageing: nobody who arrives ``remaining_seconds / weight`` later overtakes."""
        return (entry.arrival + entry.remaining_seconds / entry.weight,)

    def due(self, entries: Sequence[Entry], now: float) -> list[Entry]:
        if not entries:
            self._credit = {}
            return []
        credit = self._credit = {entry.id: self._credit.get(entry.id, 0.0) for entry in entries}
        needs = [(entry.step_seconds - credit[entry.id]) / entry.weight for entry in entries]
        quantum = max(0.0, min(needs))
        due = []
        for entry, need in zip(entries, needs, strict=True):
            credit[entry.id] += quantum * entry.weight
            if need <= quantum * (1 + ROUNDING):
                due.append(entry)
        return sorted(due, key=lambda entry: (-entry.priority, entry.arrival))

    def may_ride(self, entry: Entry) -> bool:
        return self._credit.get(entry.id, 0.0) >= 0.0

    def served(self, entry: Entry, seconds: float) -> None:
        if entry.id in self._credit:
            self._credit[entry.id] = max(self._credit[entry.id] - seconds, -seconds)
