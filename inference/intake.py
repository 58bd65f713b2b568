"""Intake: requests between submission and their first step, and what those in flight hold.

Callers put requests and changes of mind in from any thread; the engine's thread takes them in between two rounds.
Knows the ledger and the order of the line; runs no step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

from cards.errors import UserError
from inference.admission import Ledger, Ticket, Waiting
from inference.handle import Cancelled, Handle
from inference.scheduler import Scheduler
from inference.scheduling.policy import Entry

Ended = tuple[Handle, BaseException]


class Intake:
    """See the module's docstring."""

    def __init__(self, ledger: Ledger, scheduler: Scheduler):
        self.ledger = ledger
        self.scheduler = scheduler
        self.arrived = threading.Event()
        """Something was put in since the last round began."""
        self.held = False
        """While it is True nobody is admitted."""
        self.in_flight: dict[Handle, None] = {}
        """Admitted and not over, in order of admission."""
        self.resting: dict[Handle, None] = {}
        """Suspended."""
        self._inbox: deque[Handle] = deque()
        self._changes: deque[Handle] = deque()
        self._line: dict[Waiting, Handle] = {}

    @property
    def waiting(self) -> int:
        """Requests that were submitted and not admitted yet."""
        return len(self._inbox) + len(self._line)

    # -- from any thread

    def put(self, handle: Handle) -> None:
        """Takes a request in; raises ``AdmissionInfeasible`` for one that can never fit."""
        self.ledger.check(handle.demand)
        self._inbox.append(handle)
        self.arrived.set()

    def change(self, handle: Handle) -> None:
        """A request was cancelled, suspended or resumed."""
        self._changes.append(handle)
        self.arrived.set()

    # -- on the engine's thread

    def settle(self) -> Iterator[Ended]:
        """Follows the changes and admits whoever may go; gives the requests that are over by it."""
        self.arrived.clear()
        while self._changes:
            yield from self._follow(self._changes.popleft())
        if self.held:
            return
        while self._inbox:
            yield from self._admit(self._inbox.popleft())
        for place in self.ledger.ready():
            handle = self._line.pop(place)
            handle._place = None
            if place.failure is not None:
                yield handle, place.failure
            else:
                assert place.ticket is not None
                self._let_in(handle, place.ticket)

    def drop(self, handle: Handle) -> None:
        """The request is over: everything that it held or waited for is returned."""
        self.in_flight.pop(handle, None)
        self.resting.pop(handle, None)
        if handle._place is not None:
            handle._place.withdraw()
            self._line.pop(handle._place, None)
            handle._place = None
        if handle._ticket is not None:
            handle._ticket.refund()
            handle._ticket = None

    def again(self, handle: Handle) -> None:
        """A request in line asks anew, for its demand as it is now."""
        assert handle._place is not None
        handle._place.withdraw()
        del self._line[handle._place]
        handle._place = None
        self._inbox.append(handle)

    @property
    def in_line(self) -> list[Handle]:
        """Requests that wait for admission and were looked at."""
        return list(self._line.values())

    def everybody(self) -> list[Handle]:
        """All requests that are not over, those in flight first."""
        return [*self.in_flight, *self.resting, *self._line.values(), *self._inbox]

    def _follow(self, handle: Handle) -> Iterator[Ended]:
        if handle.done:
            return
        if handle._scope.cancelled:
            if handle._state != "running":  # one that runs hears of it before its next step
                yield handle, Cancelled("the request was cancelled")
            return
        if handle._wants_rest and handle in self.in_flight:
            self._suspend(handle)
        elif not handle._wants_rest and handle in self.resting:
            del self.resting[handle]
            handle._state = "waiting"
            self._inbox.append(handle)

    def _admit(self, handle: Handle) -> Iterator[Ended]:
        if handle.done:  # it was failed or cancelled while it was in the inbox
            return
        if handle._scope.cancelled:
            yield handle, Cancelled("the request was cancelled")
            return
        try:
            place = self.ledger.admit(handle.demand, self.scheduler.rank(_arriving(handle)))
        except UserError as failure:  # what was reserved since leaves no room
            yield handle, failure
            return
        if isinstance(place, Ticket):
            self._let_in(handle, place)
        else:
            handle._place = place
            self._line[place] = handle

    def _let_in(self, handle: Handle, ticket: Ticket) -> None:
        handle._ticket = ticket
        handle._state = "running"
        if handle.admitted_at is None:
            handle.admitted_at = time.time()
        self.in_flight[handle] = None
        if handle._wants_rest:
            self._suspend(handle)
        elif handle._running.resting:
            handle._running.resume()

    def _suspend(self, handle: Handle) -> None:
        if not handle._running.resting:
            handle._running.suspend()
        self.drop(handle)
        handle._state = "suspended"
        self.resting[handle] = None


def _arriving(handle: Handle) -> Entry:
    request, seconds = handle._running.resolved.request, handle.demand.seconds
    return Entry(
        id=handle.id,
        arrival=handle.arrival,
        step_seconds=max(seconds, 1e-9),
        remaining_seconds=seconds,
        priority=request.priority,
        deadline=None if request.deadline is None else handle.arrival + request.deadline,
    )
