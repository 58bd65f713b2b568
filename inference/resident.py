"""Resident: one component in memory, built at its first use, with a version and, under LoRA, an adapter.

A module may stand behind several residents (LoRA roles share one); what belongs to the module itself, its sleep and its
calls in progress, is in ``inference.sleep``. Knows nothing of cards, requests or engines.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import nn

from inference.sleep import ModuleState, state_of

T = TypeVar("T")
_UIDS = itertools.count()


class Once(Generic[T]):
    """A value that the first who asks makes while others wait. A failure goes to who asked; the next tries anew."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._lock = threading.Lock()
        self._value: list[T] = []
        self.token = object()
        """Stands for the value, made or not."""

    @property
    def made(self) -> bool:
        return bool(self._value)

    def get(self) -> T:
        if not self._value:
            with self._lock:
                if not self._value:
                    self._value.append(self._make())
        return self._value[0]


@dataclass(eq=False)
class Resident:
    """A component in memory, or one that will be there when it is needed."""

    source: nn.Module | Once[nn.Module]
    """The module, or what builds it."""
    adapter: str | None = None
    """LoRA adapter that its calls use: a name, "" for the base with adapters off, None to leave the module alone."""
    version: int = 0
    """Grows with every change of the weights."""
    uid: int = field(default_factory=lambda: next(_UIDS))
    compiled: str = ""
    """How the module was compiled: "" | regional | graphs; see ``inference.compiling``."""
    blueprint: Once[nn.Module] | None = None
    """Makes the module without storage, for who asks of its config or size before it is built."""

    _state: ModuleState | None = field(default=None, init=False, repr=False)
    """Of the module, once it is built."""

    def __post_init__(self) -> None:
        if isinstance(self.source, nn.Module):
            self._state = state_of(self.source)
            self._state.residents.add(self)

    @property
    def built(self) -> bool:
        return isinstance(self.source, nn.Module) or self.source.made

    @property
    def here(self) -> bool:
        """Whether the module is built and awake."""
        return self._state is not None and not self._state.asleep

    @property
    def key(self) -> object:
        """Stands for the module in a budget of weights: the same before and after it is built, for all who share it."""
        return state_of(self.source).key if isinstance(self.source, nn.Module) else self.source.token

    def peek(self) -> nn.Module:
        """The module, built if need be but not woken: its settings are there, its weights may sleep."""
        if isinstance(self.source, nn.Module):
            return self.source
        module = self.source.get()
        if self._state is None:
            self._state = state_of(module)
            self._state.origin = self.source.token
            self._state.residents.add(self)
        return module

    def plan(self) -> nn.Module:
        """The module for its config and shapes alone: without storage where it is not built, asleep where it sleeps."""
        return self.peek() if self.built or self.blueprint is None else self.blueprint.get()

    @property
    def module(self) -> nn.Module:
        """The module with its weights in place: builds it at the first use, wakes it when it sleeps."""
        module = self.peek()
        state_of(module).wake()
        return module

    def renew(self) -> None:
        """A new identity: what was cached or is computed under the old one stays with whoever holds that."""
        self.uid = next(_UIDS)

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module for one call: awake as long as it lasts, with this resident's adapter switched on."""
        module = self.peek()
        with state_of(module):
            if self.adapter is None:
                yield module
            else:
                with adapter_context(module, self.adapter):
                    yield module


@contextlib.contextmanager
def adapter_context(module: nn.Module, adapter: str) -> Iterator[None]:
    """Switches every LoRA layer of ``module`` to ``adapter`` ("" = off), and back."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    before = [(layer, list(layer.active_adapters), layer.disable_adapters) for layer in layers]
    try:
        for layer in layers:
            # Set the fields, not set_adapter(): that one also flips requires_grad of the adapters.
            layer._disable_adapters = adapter == ""
            if adapter:
                layer._active_adapter = [adapter]
        yield
    finally:
        for layer, active, disabled in before:
            layer._active_adapter = active
            layer._disable_adapters = disabled
