"""Handle: a submitted request as its caller sees it, and the errors that end one from outside."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from cards.errors import UserError
from inference.admission import Demand, Ticket, Waiting
from inference.artifact import Artifact
from inference.running import Running
from inference.stream import CancelScope, Event, EventStream

_NUMBERS = itertools.count(1)

State = Literal["waiting", "running", "suspended", "done"]


class Cancelled(UserError):
    """The request was cancelled at a step boundary."""


class EngineFault(RuntimeError):
    """The device, or the engine itself, failed: everything that was in flight is lost. Submit the request again."""


class Handle:
    """A submitted request: its progress, its events, and its result once complete. Any thread may call it."""

    def __init__(
        self,
        running: Running,
        demand: Demand,
        scope: CancelScope | None = None,
        changed: Callable[[Handle], None] | None = None,
        settled: Mapping[str, Any] | None = None,
    ):
        """``changed`` is called, on the caller's thread, when the request was cancelled, suspended or resumed;
        ``settled`` are the parameters of the interceptors that it asks for."""
        self.id = f"request-{next(_NUMBERS)}"
        self.arrival = time.monotonic()
        self.admitted_at: float | None = None
        """Unix seconds; None while it waits."""
        self.demand = demand
        self._running = running
        self._changed = changed
        self._settled = {} if settled is None else settled
        self._scope = CancelScope(scope)
        self._done = threading.Event()
        self._artifact: Artifact | None = None
        self._stream = EventStream()
        self._stream.put("queued", "", *self.progress)
        self._wants_rest = False
        # The engine's own, touched on its thread alone:
        self._state: State = "waiting"
        self._ticket: Ticket | None = None
        self._place: Waiting | None = None
        self._step_seconds = 0.0
        """Predicted, of the next step's forwards."""
        self._spent = 0.0
        """Predicted seconds of the steps taken."""
        if changed is not None:
            self._scope.on_cancel(self._tell)

    @property
    def seed(self) -> int:
        return self._running.resolved.params.seed

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def state(self) -> State:
        """waiting for admission | running | suspended | done."""
        return "done" if self.done else self._state

    @property
    def progress(self) -> tuple[int, int]:
        """(steps done, steps in all)."""
        return self._running.steps_done, self._running.steps_total

    def cancel(self) -> None:
        """Takes effect before the request's next step."""
        self._scope.cancel()

    def suspend(self) -> None:
        """Before its next step the request's state moves to host memory, and all that it was admitted with is free for
        others, until :meth:`resume`. The keys and values of a text stay where they are."""
        self._wants_rest = True
        self._tell()

    def resume(self) -> None:
        """The request asks for admission again, with its first arrival, and goes on where it was, bit for bit."""
        self._wants_rest = False
        self._tell()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """The request's events in order, from the first to its end; see :meth:`EventStream.read`."""
        return self._stream.read(timeout)

    def result(self, timeout: float | None = None) -> Artifact:
        """Waits up to ``timeout`` seconds; raises what the request failed with."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request is at step {self.progress[0]} of {self.progress[1]}")
        if self._running.failure is not None:
            raise self._running.failure
        assert self._artifact is not None
        return self._artifact

    def _tell(self) -> None:
        if self._changed is not None and not self.done:
            self._changed(self)

    def _finish(self, failure: BaseException | None) -> None:
        self._scope.forget(self._tell)
        try:
            if failure is None:
                self._artifact = self._running.artifact()
        except Exception as error:
            failure = error
        self._running.end(failure)
        if failure is None:
            self._stream.put("completed", "", *self.progress)
        else:
            self._stream.put("cancelled" if isinstance(failure, Cancelled) else "failed", str(failure), *self.progress)
        self._done.set()
