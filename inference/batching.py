"""Evaluating the plans of several requests: one call at a time, or equal calls merged into one forward.

A call that raises gives its exception as its outcome, so that it fails its own request and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.instance import ModelInstance
from inference.timing import Span
from loops.loop import ModelCall, Profile


@dataclass(frozen=True)
class Job:
    """A call to evaluate: whose module, under which profile."""

    instance: ModelInstance
    call: ModelCall
    profile: Profile
    alone: bool = False
    """Never merged: a result that outlives its step must not depend on who else was in the forward."""


Outcome = Tensor | Exception
"""What a call gave, or what it failed with."""


Listener = Callable[[Job, ModelCall, Span], None]
"""Hears of every forward that ended well: a job of it, the call (merged or not), and how long it took."""


class PoolFault(RuntimeError):
    """The device or the worker that runs a component is gone, and with it everything that is in flight there."""


FATAL = (PoolFault, torch.AcceleratorError)
"""Failures that are no request's own."""


def _attempt(job: Job, calls: Sequence[ModelCall], listener: Listener | None) -> Outcome:
    """One forward for all of ``calls``; raises what is fatal for all requests alike."""
    try:
        call = calls[0] if len(calls) == 1 else ModelCall.merged(calls)
        span = Span(job.instance.device_of(call.component))
        output = job.instance.compute(call, job.profile)
        span.stop()
        if listener is not None:
            listener(job, call, span)
        return output
    except FATAL:
        raise
    except Exception as failure:
        return failure


def evaluate_solo(jobs: Sequence[Job], listener: Listener | None = None) -> list[Outcome]:
    """Every call by itself, in order."""
    return [_attempt(job, (job.call,), listener) for job in jobs]


def evaluate_merged(jobs: Sequence[Job], max_rows: int, listener: Listener | None = None) -> list[Outcome]:
    """Calls with equal keys on the same component share forwards of up to ``max_rows`` rows; order is kept.

    A merged forward that raises is looked into: each of its calls runs by itself, those that raise again fail alone,
    and the rest are merged anew as if the others had never been there, so that their results are the same bits. When
    none raises by itself (the device ran out of memory for all of them together) the group goes on in halves. Calls
    that carry a state run once only: theirs are the results of running by themselves.
    """
    outcomes: dict[int, Outcome] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, job in enumerate(jobs):
        resident = job.instance.residents.get(job.call.component)
        uid = None if resident is None else resident.uid
        precision = job.instance.card.precision.serve
        key = (uid, precision, job.profile, job.call.merge_key(), index if job.alone else None)
        groups.setdefault(key, []).append(index)
    for members in groups.values():
        outcomes.update(_evaluate_group(jobs, members, max_rows, listener))
    return [outcomes[index] for index in range(len(jobs))]


def _evaluate_group(
    jobs: Sequence[Job], members: list[int], max_rows: int, listener: Listener | None
) -> dict[int, Outcome]:
    """Outcomes of members that may share forwards."""
    outcomes: dict[int, Outcome] = {}
    for chunk in _chunks(members, [jobs[i].call.rows for i in members], max_rows):
        calls = [jobs[i].call for i in chunk]
        outcome = _attempt(jobs[chunk[0]], calls, listener)
        if len(chunk) == 1:
            outcomes[chunk[0]] = outcome
            continue
        if not isinstance(outcome, Exception):
            outcomes.update(zip(chunk, outcome.split([call.rows for call in calls]), strict=True))
            continue
        del outcome  # its traceback holds the forward's activations
        alone = {i: _attempt(jobs[i], (jobs[i].call,), None) for i in chunk}
        if calls[0].state is not None:
            outcomes.update(alone)
            continue
        failed = {i: result for i, result in alone.items() if isinstance(result, Exception)}
        if failed:
            return failed | _evaluate_group(jobs, [i for i in members if i not in failed], max_rows, listener)
        return _evaluate_group(jobs, members, max(1, sum(call.rows for call in calls) // 2), listener)
    return outcomes


def _chunks(members: Sequence[int], rows: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Runs of members whose rows fit into one forward; a call larger than that goes alone."""
    chunk: list[int] = []
    used = 0
    for member, n in zip(members, rows, strict=True):
        if chunk and used + n > max_rows:
            yield chunk
            chunk, used = [], 0
        chunk.append(member)
        used += n
    if chunk:
        yield chunk
