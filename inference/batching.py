"""Evaluating the plans of several requests: one call at a time, or equal calls merged into one forward.

A call that raises gives its exception as its outcome, so that it fails its own request (with merged calls: those that
shared its forward) and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference.instance import ModelInstance
from loops.loop import ModelCall, Profile


@dataclass(frozen=True)
class Job:
    """A call to evaluate: whose module, under which profile."""

    instance: ModelInstance
    call: ModelCall
    profile: Profile


Outcome = Tensor | Exception
"""What a call gave, or what it failed with."""


def _attempt(job: Job, call: ModelCall) -> Outcome:
    try:
        return job.instance.call(call, job.profile)
    except Exception as failure:
        return failure


def evaluate_solo(jobs: Sequence[Job]) -> list[Outcome]:
    """Every call by itself, in order."""
    return [_attempt(job, job.call) for job in jobs]


def evaluate_merged(jobs: Sequence[Job], max_rows: int) -> list[Outcome]:
    """Calls with equal keys on the same component share forwards of up to ``max_rows`` rows; order is kept."""
    outcomes: dict[int, Outcome] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, job in enumerate(jobs):
        resident = job.instance.residents.get(job.call.component)
        uid = None if resident is None else resident.uid
        precision = job.instance.card.precision.serve
        groups.setdefault((uid, precision, job.profile, job.call.merge_key()), []).append(index)
    for members in groups.values():
        for chunk in _chunks(members, [jobs[i].call.rows for i in members], max_rows):
            first = jobs[chunk[0]]
            calls = [jobs[i].call for i in chunk]
            outcome = _attempt(first, first.call if len(calls) == 1 else _merge(calls))
            if len(calls) == 1 or isinstance(outcome, Exception):
                outcomes.update(dict.fromkeys(chunk, outcome))
            else:
                outcomes.update(zip(chunk, outcome.split([call.rows for call in calls]), strict=True))
    return [outcomes[index] for index in range(len(jobs))]


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


def _merge(calls: Sequence[ModelCall]) -> ModelCall:
    """One call over the rows of all."""
    first = calls[0]
    tensors = {name: torch.cat([call.tensors[name] for call in calls]) for name in first.tensors}
    return ModelCall(first.component, first.method, tensors, first.static, branch="merged")
