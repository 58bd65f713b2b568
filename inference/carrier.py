"""Carrier: takes the inputs of a call to the pool where its component runs, and the result back to its request.

For components that run elsewhere than their requests' tensors are; the others never come here. Measures every move for
``scheduling.transfer``; knows nothing of who runs when.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inference.batching import Job, Outcome
from inference.instance import ModelInstance
from inference.scheduling.transfer import NOTHING, Bandwidths, Move, Transfer
from loops.loop import ModelCall


class Carrier:
    """See the module's docstring. Not thread-safe: the engine's thread owns it.

    Args:
        own: name of the engine's own pool, where the tensors of requests are.
    """

    def __init__(self, bandwidths: Bandwidths, own: str):
        self.bandwidths = bandwidths
        self.own = own
        self._row_bytes: dict[tuple[Hashable, str], float] = {}
        """(component, operation) -> bytes of its last result, a row."""

    def ahead(self, instance: ModelInstance, calls: Sequence[ModelCall]) -> Transfer:
        """What the calls of a step move, with predicted seconds; a first result is not known before it is there."""
        moves: list[Move] = []
        for call in calls:
            if call.component in instance.elsewhere:
                key = instance.resident(call.component).key
                back = int(self._row_bytes.get((key, call.method), 0) * call.rows)
                moves += [self._inputs(instance, call), self._output(instance, call, back)]
        return self.bandwidths.transfer(tuple(moves)) if moves else NOTHING

    def there(self, job: Job) -> Job:
        """The job with its inputs where its component is; as it was where they cannot be moved, which its forward
        then finds out."""
        call, instance = job.call, job.instance
        if call.component not in instance.elsewhere:
            return job
        target = instance.device_of(call.component)
        began = _now(instance.device)
        try:
            tensors = {name: tensor.to(target) for name, tensor in call.tensors.items()}
        except torch.OutOfMemoryError:
            return job
        self.bandwidths.observe(self._inputs(instance, call), _now(target) - began)
        return replace(job, call=replace(call, tensors=tensors))

    def back(self, job: Job, outcome: Outcome) -> Outcome:
        """The result where its request is."""
        call, instance = job.call, job.instance
        if call.component not in instance.elsewhere or isinstance(outcome, Exception):
            return outcome
        began = _now(instance.device_of(call.component))
        try:
            output = outcome.to(instance.device)
        except torch.OutOfMemoryError as failure:
            return failure
        size = _size({"": output})
        self.bandwidths.observe(self._output(instance, call, size), _now(instance.device) - began)
        self._row_bytes[instance.resident(call.component).key, call.method] = size / call.rows
        return output

    def _inputs(self, instance: ModelInstance, call: ModelCall) -> Move:
        pool = instance.elsewhere[call.component].name
        return Move(instance.resident(call.component).key, _size(call.tensors), self.own, pool)

    def _output(self, instance: ModelInstance, call: ModelCall, size: int) -> Move:
        pool = instance.elsewhere[call.component].name
        return Move(instance.resident(call.component).key, size, pool, self.own)


def _size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
