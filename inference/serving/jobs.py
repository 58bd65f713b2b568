"""Jobs: one a video, from the request to the files. In memory, bounded; the files are in a folder of their own.

Knows states and files; knows nothing of HTTP (``routes``) or of running steps (``worker``).
"""

from __future__ import annotations

import itertools
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from inference.engine import Handle
from inference.serving.schema import Order


class Status(StrEnum):
    """The only words that OpenAI's ``poll`` knows."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class JobError:
    """Why a job failed."""

    code: str
    message: str


@dataclass(eq=False)
class Job:
    """One video. The worker alone changes it; readers may look at any time: ``outcome`` is written last."""

    id: str
    order: Order
    model: str
    card_digest: str
    created_at: float = field(default_factory=time.time)
    """Unix seconds, as all times here."""
    started_at: float | None = None
    """When the engine let it in; set when it is over."""
    completed_at: float | None = None
    outcome: Status | None = None
    """COMPLETED or FAILED once it is over."""
    handle: Handle | None = None
    counted: bool = False
    """Its time in the queue was observed."""
    cancelled: bool = False
    """A client gave it up; it may still be finishing a step."""
    error: JobError | None = None
    weights_versions: dict[str, int] | None = None
    refined: str | None = None
    """The prompt as the model rewrote it, where it did."""
    files: dict[str, Path] = field(default_factory=dict)
    """Variant -> file."""

    @property
    def status(self) -> Status:
        handle = self.handle
        if self.outcome is not None:
            return self.outcome
        waits = handle is None or handle.admitted_at is None
        return Status.QUEUED if waits else Status.IN_PROGRESS

    @property
    def finished(self) -> bool:
        return self.outcome is not None

    @property
    def steps(self) -> tuple[int, int]:
        """(done, in all)."""
        handle = self.handle
        return (0, 1) if handle is None else handle.progress

    @property
    def progress(self) -> int:
        """Percent; 100 only when the files are there."""
        if self.status is Status.COMPLETED:
            return 100
        done, total = self.steps
        return min(99, 100 * done // total)

    @property
    def running_since(self) -> float | None:
        handle = self.handle
        return self.started_at if handle is None else handle.admitted_at

    def take(self, handle: Handle) -> None:
        """The engine has it."""
        self.handle = handle

    def complete(self, files: dict[str, Path], weights_versions: dict[str, int], refined: str | None = None) -> None:
        self.files = files
        self.weights_versions = weights_versions
        self.refined = refined
        self._finish(Status.COMPLETED)

    def fail(self, error: JobError) -> None:
        self.error = error
        self._finish(Status.FAILED)

    def _finish(self, outcome: Status) -> None:
        self.started_at = self.running_since
        self.handle = None  # with it goes the request's state: latents, video, solver
        self.completed_at = time.time()
        self.outcome = outcome

    def video(self) -> dict[str, Any]:
        """The video object of the API, and what else reproduces the video."""
        params = self.order.resolved.params
        return {
            "id": self.id,
            "object": "video",
            "created_at": int(self.created_at),
            "completed_at": None if self.completed_at is None else int(self.completed_at),
            "expires_at": None,
            "status": str(self.status),
            "progress": self.progress,
            "model": self.model,
            "prompt": self.order.resolved.request.prompt,
            "seconds": f"{self.order.seconds:.6g}",
            "size": f"{params.width}x{params.height}",
            "remixed_from_video_id": None,
            "error": None if self.error is None else {"code": self.error.code, "message": self.error.message},
            "negative_prompt": self.order.resolved.negative_prompt,
            "refined_prompt": self.refined,
            "seed": params.seed,
            "num_frames": params.frames,
            "fps": self.order.fps,
            "num_inference_steps": params.steps,
            "guidance_scale": params.guidance,
            "guidance_policy": params.guidance_policy,
            "solver": params.solver,
            "shift": params.shift,
            "card_digest": self.card_digest,
            "weights_versions": self.weights_versions,
            "inference_seconds": None
            if self.started_at is None or self.completed_at is None
            else round(self.completed_at - self.started_at, 3),
        }


class JobStore:
    """Jobs by id, oldest first; keeps the last ``max_kept`` finished ones and their files."""

    def __init__(self, max_kept: int):
        self.max_kept = max_kept
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._epoch = time.time_ns() // 10**6
        self._folder = tempfile.TemporaryDirectory(prefix="fastvideo-serve-")

    def create(self, order: Order, *, model: str, card_digest: str) -> Job:
        """A new job, not yet in the store. Ids grow with time, so that paging survives deletions."""
        number = next(self._numbers)
        return Job(f"video_{self._epoch:012x}{number:08x}{secrets.token_hex(6)}", order, model, card_digest)

    def add(self, job: Job) -> None:
        with self._lock:
            self._jobs[job.id] = job
            finished = [old for old in self._jobs.values() if old.finished]
            surplus = finished[: max(0, len(finished) - self.max_kept)]
            for old in surplus:
                del self._jobs[old.id]
        for old in surplus:
            self.unlink(old.files)

    def get(self, job_id: str) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def remove(self, job: Job) -> None:
        """Forgets a finished job and its files."""
        with self._lock:
            self._jobs.pop(job.id, None)
        self.unlink(job.files)

    def page(self, *, after: str | None, limit: int, newest_first: bool) -> tuple[list[Job], bool]:
        """Up to ``limit`` jobs behind ``after``, and whether there are more."""
        with self._lock:
            jobs = list(self._jobs.values())
        jobs.sort(key=lambda job: job.id, reverse=newest_first)
        if after is not None:
            jobs = [job for job in jobs if (job.id < after if newest_first else job.id > after)]
        return jobs[:limit], len(jobs) > limit

    def file(self, job: Job, suffix: str) -> Path:
        """Where a file of the job goes; made of the server's own id alone."""
        return Path(self._folder.name) / f"{job.id}{suffix}"

    def close(self) -> None:
        """Deletes all files."""
        self._folder.cleanup()

    @staticmethod
    def unlink(files: Mapping[str, Path]) -> None:
        for path in files.values():
            path.unlink(missing_ok=True)
