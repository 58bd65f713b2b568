"""ModelInstance: a card's components in memory, each with a version.

A role of a training run is a *view*: it replaces some components and shares the rest, object for object, so a frozen
text encoder and its cached embeddings belong to all roles. Nothing per-request is kept here.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cards.card import ModelCard
from cards.registry import family
from cards.source import MODULE_KINDS, check_source, load_component, needed_components
from loops.loop import ModelCall, Profile
from loops.registry import check_loop
from loops.solvers import solver_class

_UIDS = itertools.count()


@dataclass
class Resident:
    """A component in memory."""

    module: nn.Module
    adapter: str | None = None
    """LoRA adapter that its calls use: a name, "" for the base with adapters off, None to leave the module alone."""
    version: int = 0
    """Grows with every change of the weights."""
    uid: int = field(default_factory=lambda: next(_UIDS))

    @contextlib.contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module with this resident's adapter switched on."""
        if self.adapter is None:
            yield self.module
        else:
            with adapter_context(self.module, self.adapter):
                yield self.module


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


class ModelInstance:
    """Loaded components of a card and the operations of its family."""

    def __init__(
        self,
        card: ModelCard,
        residents: Mapping[str, Resident],
        tokenizer: Any,
        device: torch.device | str = "cpu",
    ):
        self.card = card
        self.residents = dict(residents)
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        entry = family(card.family)
        self._operations = entry.operations()
        self._prepare = entry.prepare()

    @classmethod
    def load(cls, card: ModelCard, device: torch.device | str = "cpu") -> ModelInstance:
        """Checks the card, that this release runs it, and its source; then loads what its tasks need."""
        card.validate()
        family(card.family)
        for loop in card.loops.values():
            check_loop(loop, card)
            solver_class(loop.solver)
        folder = check_source(card)
        return cls.from_folder(card, folder, device)

    @classmethod
    def from_folder(cls, card: ModelCard, folder: Path, device: torch.device | str = "cpu") -> ModelInstance:
        """Loads from a folder that was checked already."""
        needed = needed_components(card)
        residents = {
            cid: Resident(load_component(component, folder, device))
            for cid, component in needed.items()
            if component.kind in MODULE_KINDS
        }
        tokenizer = next(load_component(c, folder) for c in needed.values() if c.kind == "tokenizer")
        return cls(card, residents, tokenizer, device)

    def view(self, residents: Mapping[str, Resident], card: ModelCard | None = None) -> ModelInstance:
        """An instance that replaces these components and shares all others."""
        merged = {**self.residents, **residents}
        return ModelInstance(self.card if card is None else card, merged, self.tokenizer, self.device)

    def module(self, component: str) -> nn.Module:
        return self.residents[component].module

    def dtype(self, component: str) -> torch.dtype:
        """dtype that the component computes in; a diffusers module may keep some parameters in float32 beside it."""
        module = self.residents[component].module
        declared = getattr(module, "dtype", None)
        return declared if isinstance(declared, torch.dtype) else next(module.parameters()).dtype

    def numerics(self, component: str) -> dict[str, Any]:
        """Static inputs of a denoiser's calls: the same for serving and training, so that equal calls may merge."""
        dtype = str(self.dtype(component)).removeprefix("torch.")
        return {"dtype": dtype, "text_padding": self.card.precision.text_padding}

    def versions(self) -> dict[str, int]:
        return {cid: resident.version for cid, resident in self.residents.items()}

    def bump(self, component: str) -> None:
        """Marks the component's weights as changed: results cached under the old version are not used again."""
        self.residents[component].version += 1

    def tokenize(self, prompt: str, max_sequence_length: int) -> dict[str, Tensor]:
        return self._prepare["tokenize"](self.tokenizer, prompt, max_sequence_length)

    def call(self, call: ModelCall, profile: Profile = Profile.SERVE) -> Tensor:
        """Runs one call; with gradient only under TRAIN."""
        resident = self.residents[call.component]
        operation = self._operations[(self.card.components[call.component].kind, call.method)]
        tensors = {name: tensor.to(self.device) for name, tensor in call.tensors.items()}
        with (
            torch.set_grad_enabled(profile is Profile.TRAIN),
            self._compute(call.component),
            resident.active() as module,
        ):
            return operation(module, tensors, call.static)

    def _compute(self, component: str) -> contextlib.AbstractContextManager[Any]:
        """Autocast when the card computes in another precision than it stores: one surface for serve and train."""
        wanted = getattr(torch, self.card.precision.serve)
        if wanted == torch.float32 or self.dtype(component) != torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=wanted)
