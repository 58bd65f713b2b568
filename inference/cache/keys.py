"""What a cached result depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inference.instance import ModelInstance

CONTRACT_VERSION = 1
"""Grows when an operation's meaning changes, so that old entries are never read again."""


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
    """Digest of the input tensors."""
    contract: int = CONTRACT_VERSION


def feature_key(instance: ModelInstance, cache_key: tuple[Any, ...]) -> FeatureKey:
    """The key of a plan's ``(component, operation, input digest)`` on this instance, as its weights are now."""
    component, operation, inputs = cache_key
    resident = instance.residents[component]
    return FeatureKey(
        component_uid=resident.uid,
        component=component,
        version=resident.version,
        adapter=resident.adapter,
        precision=f"{instance.dtype(component)}, computed in {instance.card.precision.serve}",
        operation=operation,
        inputs=inputs,
    )
