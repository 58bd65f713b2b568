"""The engine thread: admits jobs, ticks the engine, hands finished artifacts to an encoder thread.

Up to ``max_running`` requests interleave, one step each a round; up to ``max_queue`` wait. Knows jobs and the engine;
knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from cards.errors import UserError
from inference.artifact import Artifact
from inference.engine import Cancelled, Engine
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
    """See the module's docstring. All public methods may be called from any thread."""

    def __init__(self, engine: Engine, instance: ModelInstance, store: JobStore, settings: Settings):
        self.engine = engine
        self.instance = instance
        self.store = store
        self.settings = settings
        self.metrics = Metrics()
        self.failure: BaseException | None = None
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._stopping = False
        self._round_started: float | None = None
        self._mean_seconds = 1.0
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step under way; unfinished jobs fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()
        self._encoder.shutdown()

    # -- what routes ask

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stalled(self) -> bool:
        """One round has taken longer than ``stall_seconds``."""
        began = self._round_started
        return began is not None and time.monotonic() - began > self.settings.stall_seconds

    @property
    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        with self._wake:
            return len(self._running), len(self._waiting)

    def enqueue(self, job: Job) -> None:
        """Takes a job in; raises :class:`QueueFull` or :class:`EngineDown`."""
        with self._wake:
            if self._stopping or self.failure is not None or not self.alive:
                raise EngineDown
            if len(self._waiting) >= self.settings.max_queue:
                self.metrics.rejected.inc()
                raise QueueFull
            self._waiting.append(job)
            self._gauge()
            self._wake.notify_all()

    def cancel(self, job: Job) -> None:
        """A waiting job fails at once, a running one before its next step; a finished one stays as it is."""
        with self._wake:
            if job in self._waiting:
                self._waiting.remove(job)
                self._fail(job, CANCELLED)
                self._gauge()
            elif job.handle is not None:
                job.cancelled = True
                job.handle.cancel()

    def seconds_left(self, job: Job) -> float:
        """Estimate, from the job's own pace or from that of the jobs before it."""
        if job.started_at is None or not job.steps_done:
            return self._mean_seconds
        return (time.time() - job.started_at) / job.steps_done * (job.steps_total - job.steps_done)

    def seconds_to_free_slot(self) -> float:
        """Estimate of when the queue takes a job again."""
        return self._mean_seconds / self.settings.max_running

    # -- the engine thread

    def _run(self) -> None:
        try:
            while self._admit():
                self._round_started = began = time.monotonic()
                self.engine.tick()
                self._round_started = None
                self.metrics.round_seconds.observe(time.monotonic() - began)
                self._collect()
        except BaseException as failure:
            self.failure = failure
            log.exception("the engine thread died")
        finally:
            self._abandon()

    def _admit(self) -> bool:
        """Waits for work and moves jobs into the engine; False when the server stops."""
        with self._wake:
            while not (self._stopping or self._waiting or self._running):
                self._wake.wait()
            while self._waiting and len(self._running) < self.settings.max_running and not self._stopping:
                job = self._waiting.popleft()
                try:
                    handle = self.engine.submit(job.order.resolved.request, self.instance)
                except UserError as error:
                    self._fail(job, JobError("invalid_request", str(error)))
                    continue
                job.start(handle)
                self._running.append(job)
                self.metrics.queue_seconds.observe(time.time() - job.created_at)
            self._gauge()
            return not self._stopping

    def _collect(self) -> None:
        """Notes progress; passes on what is done."""
        with self._wake:
            for job in list(self._running):
                handle = job.handle
                assert handle is not None
                job.steps_done, job.steps_total = handle.progress
                if not handle.done:
                    continue
                self._running.remove(job)
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
        with self._wake:
            error = STOPPED
            if self.failure is not None:
                error = JobError("engine_failed", f"the engine failed: {self.failure}")
            for job in (*self._running, *self._waiting):
                if job.handle is not None:
                    job.handle.cancel()
                self._fail(job, error)
            self._running.clear()
            self._waiting.clear()
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
        with self._wake:
            if job.cancelled:  # while it was encoded
                self.store.unlink(files)
                self._fail(job, CANCELLED)
                return
            job.complete(files, artifact.provenance.weights_versions)
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
        self.metrics.running.set(len(self._running))
        self.metrics.waiting.set(len(self._waiting))


def _error_of(failure: Exception) -> JobError:
    if isinstance(failure, UserError):
        return JobError("invalid_request", str(failure))
    if isinstance(failure, torch.OutOfMemoryError):
        return JobError("out_of_memory", "the device ran out of memory; ask for fewer frames or pixels")
    return JobError("server_error", f"{type(failure).__name__}: {failure}")
