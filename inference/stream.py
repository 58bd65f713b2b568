"""What a request tells while it runs: one ordered stream of events, and scopes that cancel several requests at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["queued", "step", "frames", "completed", "failed", "cancelled"]
LAST: tuple[Kind, ...] = ("completed", "failed", "cancelled")
"""Kinds that end a stream."""


@dataclass(frozen=True, eq=False)
class Frames:
    """Frames of a clip, as soon as they are decoded."""

    first: int
    """Position of the first of them in the clip."""
    pixels_FHWC: np.ndarray
    """uint8, as ``Artifact.frames_FHWC`` has them."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a request."""

    number: int
    """Position in the request's stream, from 0 without gaps."""
    kind: Kind
    label: str
    """Of a step, e.g. ``denoise 3/20``; what went wrong of a failure; else empty."""
    done: int
    """Steps done."""
    total: int
    """Steps in all, as far as known."""
    seconds: float
    """Since the request was submitted."""
    frames: Frames | None = None
    """Of kind ``frames``."""


class EventStream:
    """The events of one request. Written by the engine, read from any thread and by any number of readers."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._changed = threading.Condition()
        self._began = time.monotonic()

    def put(self, kind: Kind, label: str, done: int, total: int, frames: Frames | None = None) -> None:
        """Appends an event; nothing may follow one of ``LAST``."""
        with self._changed:
            assert not self.closed
            seconds = time.monotonic() - self._began
            self._events.append(Event(len(self._events), kind, label, done, total, seconds, frames))
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return bool(self._events) and self._events[-1].kind in LAST

    def read(self, timeout: float | None = None) -> Iterator[Event]:
        """All events from the first to the last, waiting for those to come; each wait up to ``timeout`` seconds.

        Raises:
            TimeoutError: nothing came in time.
        """
        number = 0
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda n=number: len(self._events) > n, timeout):  # type: ignore[misc]
                    raise TimeoutError(f"no event {number} within {timeout} s")
                event = self._events[number]
            yield event
            if event.kind in LAST:
                return
            number += 1


class CancelScope:
    """Cancels every request that was submitted under it, or under a scope inside it, before its next step."""

    def __init__(self, parent: CancelScope | None = None):
        self.parent = parent
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._hears: dict[Callable[[], None], None] = {}

    def cancel(self) -> None:
        """Again is no harm."""
        with self._lock:
            self._cancelled.set()
            hears, self._hears = self._hears, {}
        for call in hears:
            call()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set() or (self.parent is not None and self.parent.cancelled)

    def on_cancel(self, call: Callable[[], None]) -> None:
        """``call`` is called on the thread that cancels this scope or one around it; at once when that was."""
        for scope in self._lineage():
            with scope._lock:
                cancelled = scope._cancelled.is_set()
                if not cancelled:
                    scope._hears[call] = None
            if cancelled:
                call()

    def forget(self, call: Callable[[], None]) -> None:
        """``call`` need not be called any more."""
        for scope in self._lineage():
            with scope._lock:
                scope._hears.pop(call, None)

    def _lineage(self) -> Iterator[CancelScope]:
        scope: CancelScope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent
