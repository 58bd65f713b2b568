"""The scheduler: which requests in flight take a step in this round.

Adds to a policy what all of them share: a bound on starvation, riders that share a forward, and the round's budget.
Sees opaque entries; knows nothing of loops, tensors or memory. Requests that wait for admission are not its business:
they are in ``inference.admission``'s line, ordered by ``rank``, and cost a round nothing. Not thread-safe: the
engine's thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cards.errors import unknown_name
from inference.scheduling.deadline import Deadline
from inference.scheduling.fair import Fair
from inference.scheduling.fifo import Fifo
from inference.scheduling.policy import Entry, Policy

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Fair, Fifo, Deadline)}


def policy_named(name: str) -> Policy:
    """A new policy of its name; raises ``UserError`` that lists the names."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    return POLICIES[name]()


@dataclass(frozen=True)
class RoundBudget:
    """What one round may hold. Its first step is always taken, whatever it costs."""

    seconds: float = math.inf
    """Predicted device seconds of all steps together."""
    steps: float = math.inf
    """Number of steps."""


class Scheduler:
    """See the module's docstring.

    Starvation bound, under every policy and budget: let ``m = max_wait_rounds``, and n the most entries that are in
    flight at once. When at least the first selected entry of every round takes its step, no entry is passed over in
    more than ``m + n - 1`` rounds in a row. So the others get at most ``m + n - 1`` rounds' worth of device time, each
    of at most the budget's seconds or one step, between two steps of any entry.

    Proof: an entry that was passed over m times is overdue, and the overdue come before all others, longest unserved
    first. Whoever is served, or joins, was unserved for less long than it (m >= 1) and is never again ahead of it
    until it is served. At most n - 1 entries are ahead when it becomes overdue, and every round serves the first. With
    an unlimited budget all overdue entries are served together, and the bound is m.

    Args:
        policy: a name of ``POLICIES``, or a policy.
        max_wait_rounds: rounds in a row that may pass an entry over before it is overdue, at least 1.
    """

    def __init__(self, policy: str | Policy = "fair", *, max_wait_rounds: int = 64):
        if max_wait_rounds < 1:
            raise ValueError(f"max_wait_rounds: got {max_wait_rounds}, expected at least 1")
        self.policy = policy if isinstance(policy, Policy) else policy_named(policy)
        self.max_wait_rounds = max_wait_rounds
        self._round = 0
        self._since: dict[Hashable, int] = {}
        """Entry id -> the round that served it last, or the one before it joined."""

    def rank(self, entry: Entry) -> tuple[float, ...]:
        """Order in the line of admission, smallest first; settled once, when the request arrives."""
        return self.policy.rank(entry)

    def select(self, entries: Sequence[Entry], now: float, budget: RoundBudget | None = None) -> list[Entry]:
        """Begins a round: the entries that take a step, in order; at least one of one or more.

        Args:
            entries: all requests in flight that have a next step. Whoever is missing is forgotten.
            now: seconds, on the clock of ``Entry.arrival``.

        The caller tells :meth:`served` of every step that was taken; a step that was selected and not taken costs its
        entry nothing and counts as a round that passed it over.
        """
        self._round += 1
        self._since = {entry.id: self._since.get(entry.id, self._round - 1) for entry in entries}
        if len(self._since) != len(entries):
            raise ValueError(f"got {len(entries)} entries with {len(self._since)} distinct ids, expected one id each")
        due = self.policy.due(entries, now)
        overdue = [entry for entry in entries if self._passed_over(entry) >= self.max_wait_rounds]
        overdue.sort(key=lambda entry: (self._since[entry.id], entry.arrival))
        selection = _Selection(RoundBudget() if budget is None else budget)
        for entry in (*overdue, *due):
            selection.offer(entry)
        groups = {entry.group for entry in selection.entries if entry.group is not None}
        for entry in entries:
            if entry.group in groups and self.policy.may_ride(entry):
                selection.offer(entry)
        return selection.entries

    def served(self, entry: Entry, seconds: float | None = None) -> None:
        """An entry took its step of this round. ``seconds`` is its share of what the device spent, by default what
        was predicted."""
        self._since[entry.id] = self._round
        self.policy.served(entry, entry.step_seconds if seconds is None else seconds)

    def _passed_over(self, entry: Entry) -> int:
        return self._round - 1 - self._since[entry.id]


class _Selection:
    """Distinct entries within a budget, in the order in which they were offered."""

    def __init__(self, budget: RoundBudget):
        self.budget = budget
        self.entries: list[Entry] = []
        self.seconds = 0.0
        self._ids: set[Hashable] = set()

    def offer(self, entry: Entry) -> None:
        seconds = self.seconds + entry.step_seconds
        full = seconds > self.budget.seconds or len(self.entries) >= self.budget.steps
        if entry.id in self._ids or (self.entries and full):
            return
        self._ids.add(entry.id)
        self.entries.append(entry)
        self.seconds = seconds
