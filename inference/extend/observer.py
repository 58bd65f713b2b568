"""The contract of an observer: it is shown forwards and steps, and may refuse a step; it changes neither.

Enabled by the deployment (``Engine(observers=...)``), never by a request. An exception that an observer raises on a
step fails the request of that step alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inference.request import ResolvedRequest
from loops.loop import WorkPlan


@dataclass(frozen=True)
class Forward:
    """One forward of a component, whoever shared it."""

    component: str
    method: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(tensor, its shape without the batch dim)."""
    rows: int
    """Length of the batch dim."""
    seconds: float
    """Wall time, to the end of the device's work."""


@dataclass(frozen=True)
class Step:
    """One step of one request, before its loop takes the results."""

    request_id: str
    request: ResolvedRequest
    plan: WorkPlan
    number: int
    """Steps that the request had done before this one."""
    outputs: tuple[Tensor, ...]
    """Results of the plan's calls, in order. Not to be written to."""
    cached: bool
    """Whether the result came from a cache, without a forward."""


class Observer:
    """Base of all observers; each hook may be left out."""

    def on_forward(self, forward: Forward) -> None:
        """After a forward that ended well."""

    def on_step(self, step: Step) -> None:
        """Raises to fail the request of this step."""

    def on_finish(self, request_id: str, failure: BaseException | None) -> None:
        """The request is over; what was kept for it can go."""
