"""The engine thread: ticks the engine, notes what became of its jobs, hands finished artifacts to an encoder thread.

The engine admits: up to ``max_running`` requests are in flight, up to ``max_queue`` wait. Knows jobs and the engine;
knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from cards.errors import UserError
from inference.artifact import Artifact
from inference.engine import Cancelled, Engine, EngineFault
from inference.engine_thread import EngineThread
from inference.instance import ModelInstance
from inference.media import write_video
from inference.serving.jobs import Job, JobError, JobStore, Status
from inference.serving.metrics import Metrics
from inference.serving.settings import Settings

log = logging.getLogger("fastvideo.serve")
CANCELLED = JobError("cancelled", "the request was cancelled")
STOPPED = JobError("server_stopped", "the server stopped before the video was complete")


class QueueFull(Exception):
    """The queue is at its bound."""


class EngineDown(Exception):
    """The engine thread is not running."""


class EngineWorker:
    """See the module's docstring. All public methods may be called from any thread.

    The engine's budget is that of ``Settings.budget``.
    """

    def __init__(self, engine: Engine, instance: ModelInstance, store: JobStore, settings: Settings):
        if engine.ledger.budget.slots != settings.max_running:
            raise UserError(
                f"got an engine with {engine.ledger.budget.slots} slots and max_running={settings.max_running}; "
                "make it with Engine(budget=settings.budget())"
            )
        self.engine = engine
        self.instance = instance
        self.store = store
        self.settings = settings
        self.metrics = Metrics()
        self._lock = threading.Lock()
        self._jobs: dict[Job, None] = {}
        """With the engine, in order of arrival."""
        self._round_started: float | None = None
        self._mean_seconds = 1.0
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._thread = EngineThread(engine, before=self._begin, after=self._note, over=self._abandon)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step under way; unfinished jobs fail."""
        self._thread.stop()
        self._encoder.shutdown()
        self.engine.close()

    # -- what routes ask

    @property
    def alive(self) -> bool:
        return self._thread.alive

    @property
    def stalled(self) -> bool:
        """One round has taken longer than ``stall_seconds``."""
        began = self._round_started
        return began is not None and time.monotonic() - began > self.settings.stall_seconds

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        with self._lock:
            return self._counts()

    def _counts(self) -> tuple[int, int]:
        waiting = sum(job.status is Status.QUEUED for job in self._jobs)
        return len(self._jobs) - waiting, waiting

    def enqueue(self, job: Job) -> None:
        """Takes a job in; raises :class:`QueueFull`, :class:`EngineDown`, or ``UserError`` for what can never run."""
        with self._lock:
            if self._thread.stopping or not self.alive:
                raise EngineDown
            if self._counts()[1] >= self.settings.max_queue:
                self.metrics.rejected.inc()
                raise QueueFull
            job.take(self.engine.submit(job.order.resolved.request, self.instance))
            self._jobs[job] = None
            self._gauge()

    def cancel(self, job: Job) -> None:
        """A waiting job fails at once, a running one before its next step; a finished one stays as it is."""
        with self._lock:
            if job.handle is None or job.finished:
                return
            waited = job.status is Status.QUEUED
            job.cancelled = True
            job.handle.cancel()
            if waited:
                self._jobs.pop(job, None)
                self._fail(job, CANCELLED)
                self._gauge()

    def seconds_left(self, job: Job) -> float:
        """Estimate, from the job's own pace or from that of the jobs before it."""
        since, (done, total) = job.running_since, job.steps
        if since is None or not done:
            return self._mean_seconds
        return (time.time() - since) / done * (total - done)

    def seconds_to_free_slot(self) -> float:
        """Estimate of when the queue takes a job again."""
        return self._mean_seconds / self.settings.max_running

    # -- the engine thread

    def _begin(self) -> None:
        self._round_started = time.monotonic()

    def _note(self, worked: bool) -> None:
        began, self._round_started = self._round_started, None
        if worked and began is not None:
            self.metrics.round_seconds.observe(time.monotonic() - began)
        self._collect()

    def _collect(self) -> None:
        """Notes progress; passes on what is done."""
        with self._lock:
            for job in list(self._jobs):
                handle = job.handle
                assert handle is not None
                if not job.counted and handle.admitted_at is not None:
                    job.counted = True
                    self.metrics.queue_seconds.observe(handle.admitted_at - job.created_at)
                if not handle.done:
                    continue
                del self._jobs[job]
                try:
                    artifact = handle.result()
                except Cancelled:
                    self._fail(job, CANCELLED)
                except Exception as failure:
                    log.error("%s failed", job.id, exc_info=failure)
                    self._fail(job, _error_of(failure))
                else:
                    self._encoder.submit(self._encode, job, artifact)
            self._gauge()

    def _abandon(self) -> None:
        with self._lock:
            error = STOPPED
            if self._thread.failure is not None:
                error = JobError("engine_failed", f"the engine failed: {self._thread.failure}")
            for job in self._jobs:
                if job.handle is not None:
                    job.handle.cancel()
                self._fail(job, error)
            self._jobs.clear()
            self._gauge()

    # -- the encoder thread

    def _encode(self, job: Job, artifact: Artifact) -> None:
        try:
            if not torch.isfinite(artifact.latents).all():
                self._fail(job, JobError("not_finite", "the model gave values that are not finite (NaN or infinite)"))
                return
            frames_FHWC = artifact.frames_FHWC()
            files = {
                "video": write_video(self.store.file(job, ".mp4"), frames_FHWC, job.order.fps),
                "thumbnail": write_video(self.store.file(job, ".png"), frames_FHWC[:1], job.order.fps),
            }
        except Exception as failure:
            log.error("%s could not be encoded", job.id, exc_info=failure)
            self._fail(job, _error_of(failure))
            return
        with self._lock:
            if job.cancelled:  # while it was encoded
                self.store.unlink(files)
                self._fail(job, CANCELLED)
                return
            job.complete(files, artifact.provenance.weights_versions, artifact.refined)
        assert job.started_at is not None and job.completed_at is not None
        seconds = job.completed_at - job.started_at
        self._mean_seconds += 0.3 * (seconds - self._mean_seconds)
        self.metrics.request_seconds.observe(seconds)
        self.metrics.finished.labels("completed").inc()
        log.info("%s completed in %.2f s", job.id, seconds)

    def _fail(self, job: Job, error: JobError) -> None:
        if job.status is Status.FAILED:
            return
        job.fail(error)
        self.metrics.finished.labels(error.code).inc()
        log.info("%s failed: %s", job.id, error.code)

    def _gauge(self) -> None:
        running, waiting = self._counts()
        self.metrics.running.set(running)
        self.metrics.waiting.set(waiting)


def _error_of(failure: Exception) -> JobError:
    if isinstance(failure, EngineFault):
        return JobError("engine_failed", str(failure))
    if isinstance(failure, UserError):
        return JobError("invalid_request", str(failure))
    if isinstance(failure, torch.OutOfMemoryError):
        return JobError("out_of_memory", "the device ran out of memory; ask for fewer frames or pixels")
    return JobError("server_error", f"{type(failure).__name__}: {failure}")
