"""The interleave gate: N requests interleaved step by step equal the same requests one after the other, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.artifact import Artifact
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request


@dataclass(frozen=True)
class GateReport:
    """Outcome of one level."""

    level: str
    what: str
    difference: float
    """Largest absolute difference found."""
    tolerance: float

    @property
    def passed(self) -> bool:
        """A NaN difference never passes."""
        return self.difference <= self.tolerance


def tensor_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; 0 only for equal bits, nan when either holds one, inf where shapes differ."""
    if ours.shape != theirs.shape:
        return math.inf
    if torch.equal(ours, theirs):
        return 0.0
    return (ours.double() - theirs.double()).abs().max().item()


def worst(differences: Iterable[float]) -> float:
    """The largest; nan when any is, which ``max`` alone would lose."""
    found = list(differences)
    return math.nan if any(math.isnan(d) for d in found) else max(found, default=0.0)


def largest_difference(ours: Sequence[Artifact], theirs: Sequence[Artifact]) -> float:
    """Largest absolute difference over latents and videos; inf where shapes differ or only one side has a video."""
    found = []
    for a, b in zip(ours, theirs, strict=True):
        found.append(tensor_difference(a.latents, b.latents))
        if a.video is not None and b.video is not None:
            found.append(tensor_difference(a.video, b.video))
        elif a.video is not b.video:
            found.append(math.inf)
    return worst(found)


def gate_requests(instance: ModelInstance, count: int = 4) -> list[Request]:
    """Requests that differ in prompt, seed, steps and guidance, small enough for a gate."""
    prompts = ("a red circle moves left", "two blue squares", "", "a green triangle stays still")
    ladder = next(iter(instance.card.loops.values())).schedule.ladder
    return [
        Request(
            prompt=prompts[i % len(prompts)],
            seed=100 + i,
            steps=len(ladder) if ladder is not None else 3 + i,
            guidance=(1.0, 3.0, 5.0, 1.0)[i % 4],
        )
        for i in range(count)
    ]


def interleave_gate(
    instance: ModelInstance, requests: Sequence[Request] | None = None, batching: str = "off"
) -> GateReport:
    """Serial against interleaved; with ``batching="shape"`` the same against merged forwards (C3)."""
    chosen = gate_requests(instance) if requests is None else list(requests)
    serial = Engine(instance.device, cache_bytes=0).run_serial(chosen, instance)
    engine = Engine(instance.device, batching=batching, cache_bytes=0)  # type: ignore[arg-type]
    together = engine.run_interleaved(chosen, instance)
    difference = largest_difference(serial, together)
    if batching == "off":
        return GateReport("interleave", f"{len(chosen)} requests interleaved == serial", difference, 0.0)
    tolerance = instance.card.parity.tolerances["C3"]
    return GateReport("C3", f"{len(chosen)} requests batched == serial", difference, tolerance)
