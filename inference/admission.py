"""Admission: what is in flight never exceeds the budget, and whoever waits is let in within a stated bound.

A request is admitted as a whole (device seconds, resident bytes, cache bytes, slots, the weights that it computes with,
for its worst case), so it never waits for more while it holds something. Each of its steps then takes a ticket for its
peak bytes and returns it right after. Knows amounts; knows nothing of requests, tensors or policies: the order of the
line is a ``rank`` that the caller passes. The engine's thread owns a ledger; :meth:`Ledger.check` alone may be called
from any thread.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cards.errors import UserError

Weights = tuple[tuple[Hashable, int], ...]
"""(whose, bytes) of each component; whoever it is that claims one, its bytes count once."""


@dataclass(frozen=True)
class Demand:
    """What a request needs for its worst case, from admission to its end."""

    seconds: float = 0.0
    """Predicted device seconds until it is complete."""
    resident_bytes: int = 0
    """Held from step to step: latents, conditioning, solver state."""
    peak_bytes: int = 0
    """Largest of its steps' peaks. Checked at admission, taken step by step."""
    cache_bytes: int = 0
    """Keys and values, in whole blocks."""
    slots: int = 1
    """Places in flight, or sinks of its stream."""
    weights: Weights = ()
    """Of the components that must be in the device's memory together for it."""

    def __post_init__(self) -> None:
        for name in (*KINDS, "weights_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a demand: got {value}, expected a finite number >= 0")

    @property
    def weights_bytes(self) -> int:
        return sum(size for _, size in self.weights)


@dataclass(frozen=True)
class Budget:
    """What may be in flight at once; None is no bound."""

    seconds: float | None = None
    """Predicted device seconds of all admitted requests."""
    resident_bytes: int | None = None
    peak_bytes: int | None = None
    """Activations of the steps that run at once."""
    cache_bytes: int | None = None
    slots: int | None = None
    weights_bytes: int | None = None
    """Weights in the device's memory: of the components that requests in flight need, each counted once. What is idle
    goes to sleep when its room is needed, see ``inference.residency``."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a budget: got {value}, expected a finite number >= 0, or None")


KINDS = tuple(field.name for field in fields(Demand) if field.name != "weights")
PEAK = KINDS.index("peak_bytes")
BYTES_HELD = ("resident_bytes", "cache_bytes")
"""Kinds that are memory and held from step to step."""
Amounts = tuple[int, ...]
"""One whole number a kind, in the order of KINDS; seconds as nanoseconds, so that sums come back to exactly 0."""
NONE: Amounts = (0,) * len(KINDS)
NANO = 10**9


class AdmissionInfeasible(UserError):
    """A demand that can never fit, with the figures.

    ``shortfalls`` are (kind, needed, budget), in the units of :class:`Demand`.
    """

    def __init__(self, shortfalls: Sequence[tuple[str, float, float]]):
        self.shortfalls = tuple(shortfalls)
        figures = "; ".join(
            f"{kind}: needs {_text(kind, need)}, budget {_text(kind, budget)}" for kind, need, budget in shortfalls
        )
        super().__init__(
            f"the request can never be admitted: {figures}. Ask for fewer frames, pixels or steps, or raise the budget"
        )


class Ticket:
    """Amounts that are in use until they are refunded."""

    def __init__(self, ledger: Ledger, held: Amounts, weights: Weights = (), *, standing: bool = False):
        self._ledger = ledger
        self._held = held
        self._weights = weights
        self._standing = standing
        self._open = True

    @property
    def open(self) -> bool:
        return self._open

    @property
    def held(self) -> Demand:
        return _demand(self._held, self._weights)

    def release(self, *, seconds: float = 0.0, resident_bytes: int = 0, cache_bytes: int = 0) -> None:
        """Returns a part before the end, such as the seconds of a step that was taken; at most what is still held."""
        part = _amounts(Demand(seconds=seconds, resident_bytes=resident_bytes, cache_bytes=cache_bytes, slots=0))
        self._return(tuple(map(min, self._held, part)))

    def keep_bytes(self) -> None:
        """Returns all but resident and cache bytes: seconds, places and claims on weights."""
        kept = {KINDS.index(kind) for kind in BYTES_HELD}
        self._ledger._unclaim(self._weights)
        self._weights = ()
        self._return(tuple(0 if kind in kept else amount for kind, amount in enumerate(self._held)))

    def refund(self) -> None:
        """Returns all that is still held; a second time does nothing."""
        if self._open:
            self._open = False
            self._ledger._tickets -= 1
            self._ledger._unclaim(self._weights)
            self._weights = ()
            self._return(self._held)

    def _return(self, part: Amounts) -> None:
        self._held = _minus(self._held, part)
        self._ledger._take_back(part, self._standing)


class Waiting:
    """A place in the line: it has a ``ticket`` once :meth:`Ledger.ready` let it in, or a ``failure``."""

    def __init__(self, ledger: Ledger, demand: Demand, rank: tuple[float, ...], number: int):
        self.demand = demand
        self.rank = rank
        self.ticket: Ticket | None = None
        self.failure: AdmissionInfeasible | None = None
        self._ledger = ledger
        self._need = _request_amounts(demand)
        self._number = number
        self._in_line = True

    @property
    def waiting(self) -> bool:
        return self._in_line

    def withdraw(self) -> bool:
        """Leaves the line; False when it is not in it any more."""
        return self._ledger._withdraw(self)

    @property
    def _place(self) -> tuple[tuple[float, ...], int]:
        return (self.rank, self._number)


class Ledger:
    """What is in use, and the line of those who wait.

    The line is in order of (rank, arrival). Whoever fits may pass others who do not fit yet, within this bound: while
    a request waits, at most ``max_bypass`` requests that arrived after it are admitted. Proof: let o be the oldest in
    line. Every admission of a request younger than any waiting w is one of a request younger than o, so o was passed
    by at least as many as w; and once o was passed by ``max_bypass``, nobody but o is admitted. Since admitted
    requests end and each request fits an empty ledger, o is admitted. Arrivals are numbered, so the count costs O(1):
    of the numbers given out after o's, those not in line were admitted (or withdrawn, which counts too).

    No deadlock: admitted requests hold all that they will ever hold but the peak of a step, and when no step runs, any
    step that fits the budget gets its ticket.

    Args:
        max_bypass: later arrivals that may be admitted before a request that waits.
        lookahead: places from the front of the line that are looked at when something was returned.
    """

    def __init__(self, budget: Budget, *, max_bypass: int = 64, lookahead: int = 32):
        if max_bypass < 0 or lookahead < 1:
            raise ValueError(f"got max_bypass={max_bypass}, lookahead={lookahead}; expected >= 0 and >= 1")
        self.budget = budget
        self.max_bypass = max_bypass
        self.lookahead = lookahead
        self._budget = tuple(
            None if (limit := getattr(budget, kind)) is None else _whole(kind, limit) for kind in KINDS
        )
        self._used = NONE
        self._standing = NONE
        """The part of ``_used`` that is reserved."""
        self._claims: dict[Hashable, tuple[int, int]] = {}
        """Component -> (bytes, tickets that claim it)."""
        self._claimed = 0
        """Bytes of ``_claims``."""
        self._tickets = 0
        self._numbers = 0
        """Arrivals so far."""
        self._line: list[tuple[tuple[tuple[float, ...], int], Waiting]] = []
        self._by_age: deque[Waiting] = deque()
        """In order of arrival; those who left the line are dropped when they come to the front."""
        self._failed: list[Waiting] = []
        self._changed = False
        """Something was returned since the line was last looked at."""

    # -- what is in use

    @property
    def used(self) -> Demand:
        return _demand(self._used, tuple((key, size) for key, (size, _) in self._claims.items()))

    def claimed(self, key: Hashable) -> bool:
        """Whether a ticket that is not refunded claims this component's weights."""
        return key in self._claims

    @property
    def tickets(self) -> int:
        """Tickets that are not refunded."""
        return self._tickets

    @property
    def waiting(self) -> int:
        """Length of the line."""
        return len(self._line)

    @property
    def short_of_bytes(self) -> bool:
        """Whether the first in line waits for memory that is held from step to step."""
        if not self._line:
            return False
        need = self._line[0][1]._need
        return any(
            (limit := self._budget[kind]) is not None and self._used[kind] + need[kind] > limit
            for kind in map(KINDS.index, BYTES_HELD)
        )

    # -- requests

    def check(self, demand: Demand) -> None:
        """Raises :class:`AdmissionInfeasible` for what does not fit an empty ledger. Any thread may call it."""
        failure = self._infeasible(demand)
        if failure is not None:
            raise failure

    def admit(self, demand: Demand, rank: tuple[float, ...] = ()) -> Ticket | Waiting:
        """A ticket now, or a place in the line by ``rank`` (smallest first).

        Raises :class:`AdmissionInfeasible` for what can never fit.
        """
        self.check(demand)
        need = _request_amounts(demand)
        may_pass = not self._line or (not self._changed and self._bypasses() < self.max_bypass)
        number = self._numbers
        self._numbers += 1
        if may_pass and self._fits(need, demand.weights):
            return self._grant(need, demand.weights)
        place = Waiting(self, demand, rank, number)
        bisect.insort(self._line, (place._place, place))
        self._by_age.append(place)
        return place

    def ready(self) -> list[Waiting]:
        """Those of the line who now have a ticket, or a failure, in order. To be called once a round; O(1) when nothing
        was returned since the last call."""
        out, self._failed = self._failed, []
        if not self._changed:
            return out
        self._changed = False
        index = looked = 0
        while index < len(self._line) and looked < self.lookahead:
            if self._bypasses() >= self.max_bypass:
                place = self._oldest()
                if not self._fits(place._need, place.demand.weights):
                    break
                at = self._index(place)
            else:
                place, at = self._line[index][1], index
                looked += 1
                if not self._fits(place._need, place.demand.weights):
                    index += 1
                    continue
            self._leave(at)  # never before index: what did not fit when it was looked at does not fit now
            place.ticket = self._grant(place._need, place.demand.weights)
            out.append(place)
        return out

    def reserve(self, *, resident_bytes: int = 0, cache_bytes: int = 0) -> Ticket | None:
        """Takes amounts for as long as the ticket is open: feasibility no longer counts on them, and those of the line
        who can no longer fit fail (:meth:`ready` tells them). None when they are in use now.

        Raises :class:`AdmissionInfeasible` for more than the budget less what is reserved already.
        """
        demand = Demand(resident_bytes=resident_bytes, cache_bytes=cache_bytes, slots=0)
        self.check(demand)
        need = _amounts(demand)
        if not self._fits(need):
            return None
        self._standing = _plus(self._standing, need)
        for _, place in list(self._line):
            place.failure = self._infeasible(place.demand)
            if place.failure is not None:
                self._leave(self._index(place))
                self._failed.append(place)
                self._changed = True
        return self._grant(need, standing=True)

    # -- steps

    def step(self, peak_bytes: int) -> Ticket | None:
        """A ticket for one step, to be refunded when the step has run; None when it must wait for steps that run now.
        When none runs, every step that fits the budget gets one.

        Raises :class:`AdmissionInfeasible` for a step that the whole budget cannot hold.
        """
        demand = Demand(peak_bytes=peak_bytes, slots=0)
        self.check(demand)
        need = _amounts(demand)
        return self._grant(need) if self._fits(need) else None

    # -- inside

    def _infeasible(self, demand: Demand) -> AdmissionInfeasible | None:
        need, standing = _amounts(demand), self._standing
        short = [
            (kind, _unit(kind, n), _unit(kind, limit - s))
            for kind, n, limit, s in zip(KINDS, need, self._budget, standing, strict=True)
            if limit is not None and n > limit - s
        ]
        room = self.budget.weights_bytes
        if room is not None and demand.weights_bytes > room:
            short.append(("weights_bytes", demand.weights_bytes, room))
        return AdmissionInfeasible(short) if short else None

    def _fits(self, need: Amounts, weights: Weights = ()) -> bool:
        """Whether it fits beside what is in use. What does not fit now does not fit either once others were granted
        theirs, though they claim the same weights: the weights of all together never become less."""
        for used, n, limit in zip(self._used, need, self._budget, strict=True):
            if limit is not None and used + n > limit:
                return False
        room = self.budget.weights_bytes
        return room is None or not weights or self._claimed + self._unclaimed(weights) <= room

    def _unclaimed(self, weights: Weights) -> int:
        """Bytes of those that nobody claims yet."""
        return sum(size for key, size in weights if key not in self._claims)

    def _grant(self, need: Amounts, weights: Weights = (), *, standing: bool = False) -> Ticket:
        self._used = _plus(self._used, need)
        self._tickets += 1
        self._claimed += self._unclaimed(weights)
        for key, size in weights:
            known, tickets = self._claims.get(key, (size, 0))
            self._claims[key] = (known, tickets + 1)
        return Ticket(self, need, weights, standing=standing)

    def _unclaim(self, weights: Weights) -> None:
        for key, _ in weights:
            size, tickets = self._claims.pop(key)
            if tickets > 1:
                self._claims[key] = (size, tickets - 1)
            else:
                self._claimed -= size
                self._changed = True

    def _take_back(self, part: Amounts, standing: bool) -> None:
        self._used = _minus(self._used, part)
        if standing:
            self._standing = _minus(self._standing, part)
        # The peak of a step is nothing that the line waits for.
        if any(amount for kind, amount in enumerate(part) if kind != PEAK):
            self._changed = True

    def _oldest(self) -> Waiting:
        while not self._by_age[0]._in_line:
            self._by_age.popleft()
        return self._by_age[0]

    def _bypasses(self) -> int:
        """How many who arrived after the oldest in line are no longer in it."""
        return self._numbers - self._oldest()._number - len(self._line)

    def _index(self, place: Waiting) -> int:
        return bisect.bisect_left(self._line, (place._place,))

    def _leave(self, index: int) -> None:
        _, place = self._line.pop(index)
        place._in_line = False
        if not self._line:
            self._by_age.clear()

    def _withdraw(self, place: Waiting) -> bool:
        if not place._in_line:
            return False
        self._leave(self._index(place))
        self._changed = True
        return True


def _whole(kind: str, value: float) -> int:
    return round(value * NANO) if kind == "seconds" else int(value)


def _unit(kind: str, amount: int) -> float:
    """A whole number back in its unit."""
    return amount / NANO if kind == "seconds" else amount


def _amounts(demand: Demand) -> Amounts:
    return tuple(_whole(kind, getattr(demand, kind)) for kind in KINDS)


def _request_amounts(demand: Demand) -> Amounts:
    """What a request holds between its steps: all but the peak."""
    amounts = _amounts(demand)
    return (*amounts[:PEAK], 0, *amounts[PEAK + 1 :])


def _demand(amounts: Amounts, weights: Weights = ()) -> Demand:
    values: dict[str, Any] = {kind: _unit(kind, amount) for kind, amount in zip(KINDS, amounts, strict=True)}
    return Demand(**values, weights=weights)


def _plus(a: Amounts, b: Amounts) -> Amounts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Amounts, b: Amounts) -> Amounts:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _text(kind: str, value: float) -> str:
    if kind == "seconds":
        return f"{value:.3g} s"
    if kind.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"
    return f"{value:g}"
