"""Classifier-free guidance as policies: which calls a step makes and how their results combine.

Convention "standard" everywhere: ``u + g (c - u)``, g = 1 is the conditional branch alone (Ho and Salimans 2022,
arXiv 2207.12598). ``sequential`` evaluates the branches one after the other, as WanPipeline does, bit for bit;
``batched`` evaluates both in one forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cards.errors import unknown_name
from loops.loop import ModelCall

Tensors = Mapping[str, Tensor]


def combine(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """``u + g (c - u)``."""
    return unconditional + scale * (conditional - unconditional)


class GuidancePolicy(ABC):
    """Turns one evaluation of the denoiser into calls, and their outputs into one velocity."""

    @abstractmethod
    def calls(
        self, component: str, shared: Tensors, text: Tensor, negative: Tensor, static: Mapping[str, Any]
    ) -> tuple[ModelCall, ...]:
        """``shared``: tensors of both branches; ``text`` and ``negative`` (1, L, D)."""

    @abstractmethod
    def combine(self, outputs: tuple[Tensor, ...], scale: float) -> Tensor:
        """Guided velocity (1, C, T, H, W)."""


class Sequential(GuidancePolicy):
    def calls(self, component, shared, text, negative, static):
        return (
            ModelCall(component, "velocity", {**shared, "text": text}, static, branch="conditional"),
            ModelCall(component, "velocity", {**shared, "text": negative}, static, branch="unconditional"),
        )

    def combine(self, outputs, scale):
        conditional, unconditional = outputs
        return combine(conditional, unconditional, scale)


class Batched(GuidancePolicy):
    def calls(self, component, shared, text, negative, static):
        doubled = {name: torch.cat([t, t]) for name, t in shared.items()}
        both = {**doubled, "text": torch.cat([text, negative])}
        return (ModelCall(component, "velocity", both, static, branch="conditional+unconditional"),)

    def combine(self, outputs, scale):
        conditional, unconditional = outputs[0].chunk(2)
        return combine(conditional, unconditional, scale)


POLICIES: dict[str, GuidancePolicy] = {"sequential": Sequential(), "batched": Batched()}


def guidance_policy(name: str) -> GuidancePolicy:
    """The policy called ``name``; raises ``UserError`` with the list of names."""
    if name not in POLICIES:
        raise unknown_name("guidance policy", name, POLICIES)
    return POLICIES[name]
