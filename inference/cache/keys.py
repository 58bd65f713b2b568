"""What a cached result depends on.

Three keys, by what is cached: :class:`FeatureKey` for one component operation that depends on nothing but its weights
and inputs; :class:`CacheKey` for a result inside a request's loop, which carries every field that can change it;
:class:`PrefixRoot` for KV blocks that are shared by content. All of them name the component's own weights version, so
a sync of one component leaves the entries of the others alive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from inference.instance import ModelInstance, Resident, adapter_context
from loops.component import tensors_digest
from loops.loop import SamplingParams, WorkPlan

CONTRACT_VERSION = 1
"""Grows when an operation's meaning changes, so that old entries are never read again."""

AdapterSet = tuple[tuple[str, tuple[float, ...]], ...]
"""(adapter, its strength in each layer that has it; one figure when all are equal), sorted by name."""


@dataclass(frozen=True)
class FeatureKey:
    """Key of one result of a component operation."""

    component_uid: int
    component: str
    version: int
    """Weights version of the component alone: a sync of another component leaves the entry alive."""
    adapter: str | None
    precision: str
    operation: str
    inputs: Any
    """Digest of the input tensors, and the call's static inputs."""
    contract: int = CONTRACT_VERSION


def feature_key(instance: ModelInstance, cache_key: tuple[Any, ...]) -> FeatureKey:
    """The key of a plan's ``(component, operation, inputs)`` on this instance, as its weights are now."""
    component, operation, inputs = cache_key
    resident = instance.residents[component]
    return FeatureKey(
        component_uid=resident.uid,
        component=component,
        version=resident.version,
        adapter=resident.adapter,
        precision=f"{instance.dtype(component)}, computed in {instance.card.precision.serve}{_compiled(resident)}",
        operation=operation,
        inputs=inputs,
    )


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Key of a result inside a request's loop. No field has a default: whoever makes one says them all."""

    model: str
    """Digest of the card."""
    component: str
    component_uid: int
    """Which object in memory: two roles of a run may hold different weights under one component id."""
    version: int
    """Weights version of the component alone."""
    adapters: AdapterSet
    precision: tuple[tuple[str, str], ...]
    """Every field of the card's precision, text padding among them, and the dtype that the weights are in."""
    loop: str
    """Loop id on the card; its semantics are in the card's digest."""
    plan: str
    """:func:`plan_hash` of the step."""
    shapes: tuple[tuple[str, int], ...]
    """Frames and pixels of the request."""
    schedule: tuple[tuple[str, str], ...]
    """Steps, solver, shift and every other sampling parameter, then the card's schedule of this loop."""
    guidance: tuple[tuple[str, str], ...]
    """Scale, policy and convention."""
    branch: str
    """Guidance branch: main, conditional or unconditional."""
    seed: int
    inputs: str
    """Digest of the input tensors."""
    step: int
    contract: int

    @classmethod
    def of(
        cls,
        instance: ModelInstance,
        *,
        component: str,
        loop: str,
        plan: WorkPlan,
        branch: str,
        params: SamplingParams,
        inputs: Mapping[str, Tensor],
        step: int,
    ) -> CacheKey:
        """The key on this instance as its weights, adapters and numerics are now.

        It reads the card and walks the component's layers: make it once a request and branch, then use :meth:`at`.
        """
        resident = instance.residents[component]
        card, spec = instance.card, instance.card.loops[loop]
        rest = asdict(params)
        seed = rest.pop("seed")
        shapes = {name: rest.pop(name) for name in ("frames", "height", "width")}
        guidance = {name: rest.pop(name) for name in ("guidance", "guidance_policy")}
        return cls(
            model=card.digest,
            component=component,
            component_uid=resident.uid,
            version=resident.version,
            adapters=adapter_set(resident),
            precision=_precision(instance, component),
            loop=loop,
            plan=plan_hash(plan),
            shapes=tuple(sorted(shapes.items())),
            schedule=(*_texts(rest), *_texts(spec.schedule)),
            guidance=(*_texts(guidance), *_texts(spec.guidance)),
            branch=branch,
            seed=seed,
            inputs=tensors_digest(dict(inputs)),
            step=step,
            contract=CONTRACT_VERSION,
        )

    def at(self, step: int, inputs: Mapping[str, Tensor]) -> CacheKey:
        """The same request's key at another step."""
        return replace(self, step=step, inputs=tensors_digest(dict(inputs)))


@dataclass(frozen=True, kw_only=True)
class PrefixRoot:
    """What KV blocks depend on besides their tokens: the start of their hash chain."""

    component_uid: int
    version: int
    adapters: AdapterSet
    precision: tuple[tuple[str, str], ...]
    contract: int

    @classmethod
    def of(cls, instance: ModelInstance, component: str) -> PrefixRoot:
        resident = instance.residents[component]
        return cls(
            component_uid=resident.uid,
            version=resident.version,
            adapters=adapter_set(resident),
            precision=_precision(instance, component),
            contract=CONTRACT_VERSION,
        )

    @property
    def digest(self) -> str:
        """sha256 (hex): the ``root`` that a paged pool is opened with."""
        return _digest(asdict(self))


def adapter_set(resident: Resident) -> AdapterSet:
    """The LoRA adapters that a call of this resident runs with, and how strongly; empty for the base alone."""
    if resident.adapter is None:
        return _active_adapters(resident.module)
    with adapter_context(resident.module, resident.adapter):
        return _active_adapters(resident.module)


def _active_adapters(module: nn.Module) -> AdapterSet:
    from peft.tuners.tuners_utils import BaseTunerLayer

    strengths: dict[str, list[float]] = {}
    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer) and not layer.disable_adapters:
            scaling: Mapping[str, float] = getattr(layer, "scaling", {})
            for name in layer.active_adapters:
                if name in scaling:
                    strengths.setdefault(name, []).append(float(scaling[name]))
    return tuple(
        (name, (values[0],) if len(set(values)) == 1 else tuple(values)) for name, values in sorted(strengths.items())
    )


def plan_hash(plan: WorkPlan) -> str:
    """sha256 (hex) of what a step runs: unit, and of each call component, method, static inputs, branch and shapes.

    Values of tensors and the label are left out: the first are in the key's ``inputs``, the second names the step.
    """
    calls = [
        [
            call.component,
            call.method,
            call.branch,
            dict(call.static),
            {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in call.tensors.items()},
        ]
        for call in plan.calls
    ]
    return _digest([str(plan.unit), calls])


def _digest(data: Any) -> str:
    """sha256 (hex) of canonical JSON; a value that JSON cannot hold is a ``TypeError``, never its address."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _texts(fields: Mapping[str, Any] | BaseModel) -> tuple[tuple[str, str], ...]:
    """Fields in a form that hashes, sorted by name."""
    values = fields.model_dump(mode="json") if isinstance(fields, BaseModel) else fields
    return tuple((name, json.dumps(value, sort_keys=True)) for name, value in sorted(values.items()))


def _precision(instance: ModelInstance, component: str) -> tuple[tuple[str, str], ...]:
    weights = str(instance.dtype(component)) + _compiled(instance.residents[component])
    return (*_texts(instance.card.precision), ("weights", weights))


def _compiled(resident: Resident) -> str:
    """A compiled module gives other last bits."""
    return f", compiled {resident.compiled}" if resident.compiled else ""
