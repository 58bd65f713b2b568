"""A lock that whoever waits gets, in the order in which they came.

``threading.RLock`` goes back to a thread that releases it and asks again at once, so beside an engine whose rounds
follow each other without a pause somebody who wants in between would wait until there is no work left.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """Reentrant; first come, first served."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._line: deque[tuple[int, threading.Lock]] = deque()
        """(thread, what it waits on)."""
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner in (None, me):
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._line.append((me, turn))
        try:
            turn.acquire()
        except BaseException:  # an interrupt: step out of the line, or pass on what was just handed over
            with self._guard:
                waits = (me, turn) in self._line
                if waits:
                    self._line.remove((me, turn))
            if not waits:
                self.release()
            raise

    def release(self) -> None:
        """Hands the lock to the next in line; ``RuntimeError`` in a thread that does not hold it."""
        with self._guard:
            if self._owner != threading.get_ident():
                raise RuntimeError("this thread does not hold the lock")
            self._depth -= 1
            if self._depth:
                return
            self._owner = None
            if self._line:
                self._owner, turn = self._line.popleft()
                self._depth = 1
                turn.release()

    def __enter__(self) -> FairLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
