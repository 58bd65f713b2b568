"""The interleave gate: N requests interleaved step by step equal the same requests one after the other, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from inference.artifact import Artifact
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.requests import gate_requests
from inference.request import Request
from loops.ar_decode import Completion
from loops.loop import BehaviourRecord, TokenBehaviour
from loops.score import Score

Kept = Tensor | Mapping[str, Tensor] | None
"""A field of what a request leaves."""


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


def completion_difference(ours: Completion | None, theirs: Completion | None) -> float:
    """Largest difference of two completions' log-probs; 0 where neither side kept any, inf where what was said differs
    or only one side said or kept anything."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if replace(ours, logprobs=None) != replace(theirs, logprobs=None):
        return math.inf
    return _optional_difference(ours.logprobs, theirs.logprobs)


def score_difference(ours: Score | None, theirs: Score | None) -> float:
    """Largest difference of two scores, frame by frame; inf where they are of other frames or one is missing."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return tensor_difference(ours.frames_F, theirs.frames_F) if ours.indices == theirs.indices else math.inf


def _optional_difference(ours: Kept, theirs: Kept) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if isinstance(ours, Mapping) or isinstance(theirs, Mapping):
        if not (isinstance(ours, Mapping) and isinstance(theirs, Mapping) and set(ours) == set(theirs)):
            return math.inf
        return worst(tensor_difference(ours[name], theirs[name]) for name in ours)
    return tensor_difference(ours, theirs)


def behaviour_difference(ours: BehaviourRecord | None, theirs: BehaviourRecord | None) -> float:
    """Largest difference over all that two rollouts kept; inf where one kept what the other did not."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return worst(_optional_difference(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(BehaviourRecord))


def tokens_difference(ours: TokenBehaviour | None, theirs: TokenBehaviour | None) -> float:
    """Largest difference of two texts' log-probs; inf where they are of other tokens, or one is missing."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.temperature != theirs.temperature:
        return math.inf
    same = worst(tensor_difference(getattr(ours, n), getattr(theirs, n)) for n in ("prompt_ids", "token_ids", "mask"))
    return math.inf if same else tensor_difference(ours.logprobs, theirs.logprobs)


def _by_node(ours: Artifact, theirs: Artifact) -> Iterable[float]:
    """Differences of the texts that two artifacts' nodes made."""
    for node in (*ours.completions, *theirs.completions):
        yield completion_difference(ours.completions.get(node), theirs.completions.get(node))
        yield tokens_difference(ours.tokens.get(node), theirs.tokens.get(node))
    yield 0.0 if ours.refined == theirs.refined else math.inf


def artifact_difference(ours: Artifact, theirs: Artifact) -> float:
    """Largest absolute difference over all that two artifacts hold; inf where shapes differ or one lacks a part."""
    return worst(
        (
            tensor_difference(ours.latents, theirs.latents),
            _optional_difference(ours.video, theirs.video),
            completion_difference(ours.completion, theirs.completion),
            *_by_node(ours, theirs),
            score_difference(ours.score, theirs.score),
            behaviour_difference(ours.behaviour, theirs.behaviour),
        )
    )


def largest_difference(ours: Sequence[Artifact], theirs: Sequence[Artifact]) -> float:
    """The largest :func:`artifact_difference` of pairs."""
    return worst(artifact_difference(a, b) for a, b in zip(ours, theirs, strict=True))


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
