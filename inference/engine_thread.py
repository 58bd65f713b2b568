"""EngineThread: an engine's rounds in a thread of their own, asleep while there is nothing to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from inference.engine import Engine

log = logging.getLogger("fastvideo.engine")


class EngineThread:
    """Ticks an engine from :meth:`start` to :meth:`stop`; any thread may submit meanwhile. Also a context manager.

    Args:
        before: called in the thread before every round.
        after: called in the thread after every round, with what ``tick`` gave.
        over: called in the thread when it ends, whether it was stopped or died.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[bool], None] | None = None,
        over: Callable[[], None] | None = None,
    ):
        self.engine = engine
        self.failure: BaseException | None = None
        """What the thread died of."""
        self._before, self._after, self._over = before, after, over
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the round under way; requests that are not over stay as they are."""
        self._stopping.set()
        self.engine.wake()
        self._thread.join()

    def __enter__(self) -> EngineThread:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            while not self.stopping:
                if self._before is not None:
                    self._before()
                worked = self.engine.tick()
                if self._after is not None:
                    self._after(worked)
                if not worked and not self.stopping:
                    self.engine.wait()
        except BaseException as failure:
            self.failure = failure
            log.exception("the engine thread died")
        finally:
            if self._over is not None:
                self._over()
