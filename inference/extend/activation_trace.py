"""ActivationTrace: what every submodule of a component gave, in the order in which they ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Activation:
    """One output of one submodule."""

    name: str
    """Dotted path inside the component; "" is the component itself. Outputs of several tensors add ``[i]``."""
    call: int
    """How many times the submodule had run before."""
    mean: float
    std: float
    largest: float
    """Largest absolute value; NaN or infinity shows here."""
    value: Tensor | None
    """The output itself, detached; None when only statistics are kept."""


class ActivationTrace:
    """Records while its context is open.

    Args:
        module: the component.
        names: regular expression over dotted paths; None takes all.
        keep: whether values are kept, and not their statistics alone. They stay where they were computed.
    """

    def __init__(self, module: nn.Module, names: str | None = None, *, keep: bool = False):
        self.module = module
        self.pattern = None if names is None else re.compile(names)
        self.keep = keep
        self.activations: list[Activation] = []

    @contextmanager
    def recording(self) -> Iterator[list[Activation]]:
        """The list fills while the block runs."""
        calls: dict[str, int] = {}
        handles = [
            submodule.register_forward_hook(self._hook(name, calls))
            for name, submodule in self.module.named_modules()
            if self.pattern is None or self.pattern.search(name)
        ]
        try:
            yield self.activations
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str, calls: dict[str, int]) -> Callable[[nn.Module, Any, Any], None]:
        def record(_: nn.Module, args: Any, output: Any) -> None:
            call = calls.get(name, 0)
            calls[name] = call + 1
            for path, tensor in _tensors(name, output):
                wide = tensor.detach().float()
                mean, std = (float(wide.mean()), float(wide.std(correction=0))) if wide.numel() else (0.0, 0.0)
                largest = float(wide.abs().max()) if wide.numel() else 0.0
                value = tensor.detach().clone() if self.keep else None
                self.activations.append(Activation(path, call, mean, std, largest, value))

        return record


def _tensors(name: str, output: Any) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors of a module's output, each with a path."""
    if isinstance(output, Tensor):
        if torch.is_floating_point(output):
            yield name, output
    elif isinstance(output, tuple | list):
        for i, item in enumerate(output):
            yield from _tensors(f"{name}[{i}]", item)
