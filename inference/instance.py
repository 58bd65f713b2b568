"""ModelInstance: a card's components in memory, each with a version; those that nobody has needed yet are not there.

A role of a training run is a *view*: it replaces some components and shares the rest, object for object, so a frozen
text encoder and its cached embeddings belong to all roles. Nothing per-request is kept here.

A component is built at its first use (``inference.resident``) and may be put to sleep between two uses
(``inference.sleep``); a call on a sleeping one wakes it. Neither changes its version or a cached result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cards.card import Component, ModelCard
from cards.errors import UserError, unknown_name
from cards.needs import MODULE_KINDS, Needs, needed_components, optional_components, request_needs
from cards.registry import family
from cards.source import check_source, load_component, load_unchanged, plan_component, weights_stamp
from inference.resident import Once, Resident, adapter_context
from inference.scheduling.placement import Pool, pools_of, serving
from inference.sleep import state_of
from inference.storage import planned_bytes, resident_bytes
from loops.loop import ModelCall, Profile
from loops.registry import check_loop
from loops.solvers import solver_class

TOKENIZER_KINDS = ("tokenizer", "processor", "image_processor")
"""Kinds of what turns a request's words (and frames) into the tensors of a call."""

__all__ = ["ModelInstance", "Resident", "adapter_context"]


class ModelInstance:
    """Components of a card and the operations of its family. Any thread may use it."""

    def __init__(
        self,
        card: ModelCard,
        residents: Mapping[str, Resident],
        tokenizer: Any,
        device: torch.device | str = "cpu",
        elsewhere: Mapping[str, Pool] | None = None,
        tokenizers: Mapping[str, Once[Any]] | None = None,
    ):
        """``tokenizer``: the object, or a :class:`Once` that makes it; ``elsewhere``: pools of the components that are
        not on ``device``; ``tokenizers``: those that loops bind as their own, by component."""
        self.card = card
        self.residents = dict(residents)
        self._tokenizer = tokenizer
        self._tokenizers = {} if tokenizers is None else dict(tokenizers)
        self.device = torch.device(device)
        self.elsewhere = {} if elsewhere is None else dict(elsewhere)
        """Component -> its pool, of those that run elsewhere than the request's own tensors are."""
        self._devices = {cid: torch.device(pool.device) for cid, pool in self.elsewhere.items()}
        entry = family(card.family)
        self._operations = entry.operations()
        self._prepare = entry.prepare()

    @classmethod
    def load(
        cls,
        card: ModelCard,
        device: torch.device | str = "cpu",
        *,
        tasks: Collection[str] = (),
        pools: Sequence[Pool] | None = None,
    ) -> ModelInstance:
        """Checks the card, that this release runs it, and its source, before any weight loads.

        What the ``tasks`` require is built now, every other component when a request first needs it. Each goes to the
        first of the ``pools`` that serves its placement: by default ``device`` and, where that is another, the CPU.
        """
        card.validate()
        family(card.family)
        for loop in card.loops.values():
            check_loop(loop, card)
            solver_class(loop.solver)
        needed_components(card, tasks)
        folder = check_source(card)
        return cls.from_folder(card, folder, device, tasks=tasks, pools=pools)

    @classmethod
    def from_folder(
        cls,
        card: ModelCard,
        folder: Path,
        device: torch.device | str = "cpu",
        *,
        tasks: Collection[str] | None = None,
        pools: Sequence[Pool] | None = None,
    ) -> ModelInstance:
        """Loads from a folder that was checked already: what the ``tasks`` (all by default) require now, the rest when
        it is first needed."""
        pools = pools_of(str(device)) if pools is None else pools
        now = needed_components(card, tasks)
        known = {**needed_components(card), **optional_components(card)}
        residents: dict[str, Resident] = {}
        elsewhere: dict[str, Pool] = {}
        for cid, component in card.components.items():
            if component.kind not in MODULE_KINDS or cid not in known:
                continue
            pool = serving(component.placement, pools)[0]
            if pool.name != pools[0].name:
                elsewhere[cid] = pool
            where = pool.device if cid in elsewhere else device
            if cid in now:
                residents[cid] = Resident(load_component(component, folder, where))
            else:
                stamp = weights_stamp(component, folder)
                residents[cid] = Resident(
                    Once(partial(load_unchanged, component, folder, stamp, where)),
                    blueprint=Once(partial(plan_component, component, folder, stamp)),
                )
        bound = {loop.components["tokenizer"] for loop in card.loops.values() if "tokenizer" in loop.components}
        own = {cid: Once(partial(load_component, known[cid], folder)) for cid in known if cid in bound}
        tokenizers = [c for cid, c in known.items() if c.kind in TOKENIZER_KINDS and cid not in bound]
        return cls(card, residents, Once(_tokenizer_of(card, tokenizers, folder)), device, elsewhere, own)

    def view(self, residents: Mapping[str, Resident], card: ModelCard | None = None) -> ModelInstance:
        """An instance that replaces these components, by ones on its device, and shares all others."""
        merged = {**self.residents, **residents}
        elsewhere = {cid: pool for cid, pool in self.elsewhere.items() if cid not in residents}
        ours = self.card if card is None else card
        return ModelInstance(ours, merged, self._tokenizer, self.device, elsewhere, self._tokenizers)

    @property
    def tokenizer(self) -> Any:
        """Read at its first use; ``UserError`` where the card has none."""
        return self._tokenizer.get() if isinstance(self._tokenizer, Once) else self._tokenizer

    def tokenizer_of(self, component: str | None) -> Any:
        """The tokenizer that a loop binds as its own; None is the card's first."""
        if component is None:
            return self.tokenizer
        if component not in self._tokenizers:
            raise unknown_name(f"tokenizer of a loop of card {self.card.name!r}", component, self._tokenizers)
        return self._tokenizers[component].get()

    # -- what is in memory

    def needs(self, task: str, *, guided: bool, pixels: bool, refined: bool = True) -> Needs:
        """Nodes and components of such a request: what a runner runs and what admission counts."""
        return request_needs(self.card, task, guided=guided, pixels=pixels, refined=refined)

    def build(self, components: Collection[str]) -> None:
        """Builds and wakes these components now; raises what their building raised."""
        for component in components:
            self.resident(component).module  # noqa: B018

    def built(self, component: str) -> bool:
        """Whether the component was ever needed."""
        return self.resident(component).built

    def sleep(self, component: str) -> None:
        """Moves a component's weights out of the device's memory: to host memory, on a CPU to a temporary file.

        Whoever shares the module shares its sleep. Versions and caches stay. A call, or :meth:`module`, wakes it, with
        the same bits. One that is not built sleeps already. Raises ``InUse`` in the middle of a call, ``UserError`` for
        a sharded module.
        """
        resident = self.resident(component)
        if resident.built:
            module = resident.peek()
            state_of(module).sleep(module)

    def wake(self, component: str) -> None:
        """Brings a sleeping component back before it is needed; one that was never built stays unbuilt."""
        resident = self.resident(component)
        if resident.built:
            state_of(resident.peek()).wake()

    def asleep(self, component: str) -> bool:
        resident = self.resident(component)
        return resident.built and state_of(resident.peek()).asleep

    def resident_bytes(self, component: str) -> int:
        """Bytes of weights and buffers that the component holds in memory now; 0 while unbuilt or asleep."""
        resident = self.resident(component)
        return resident_bytes(resident.peek()) if resident.built else 0

    def weights_bytes(self, component: str) -> int:
        """Bytes of weights and buffers that the component holds when it is in memory, whether or not it is there now;
        before it is built, at most."""
        resident = self.resident(component)
        if resident.built:
            return state_of(resident.peek()).size
        return planned_bytes(resident.plan(), getattr(torch, self.card.components[component].dtype))

    def config(self, component: str) -> Any:
        """The library's config of a component, without building or waking it; None for a module that has none."""
        return getattr(self.resident(component).plan(), "config", None)

    def resident(self, component: str) -> Resident:
        if component not in self.residents:
            raise unknown_name(f"component of card {self.card.name!r}", component, self.residents)
        return self.residents[component]

    def module(self, component: str) -> nn.Module:
        """The component with its weights in place."""
        return self.residents[component].module

    def device_of(self, component: str) -> torch.device:
        """Where the component runs; decided when it was loaded."""
        return self._devices.get(component, self.device)

    def dtype(self, component: str) -> torch.dtype:
        """dtype that the component computes in; a diffusers module may keep some parameters in float32 beside it."""
        if not self.residents[component].built:
            return getattr(torch, self.card.components[component].dtype)  # type: ignore[no-any-return]
        module = self.residents[component].peek()
        first = next(module.parameters()).dtype
        known = _DTYPES.get(module)
        if known is None or known[0] != first:
            declared = getattr(module, "dtype", None)
            known = _DTYPES[module] = (first, declared if isinstance(declared, torch.dtype) else first)
        return known[1]

    def numerics(self, component: str) -> dict[str, Any]:
        """Static inputs of a denoiser's calls: the same for serving and training, so that equal calls may merge."""
        dtype = str(self.dtype(component)).removeprefix("torch.")
        return {"dtype": dtype, "text_padding": self.card.precision.text_padding}

    def versions(self) -> dict[str, int]:
        return {cid: resident.version for cid, resident in self.residents.items()}

    def bump(self, component: str) -> None:
        """Marks the component's weights as changed: results cached under the old version are not used again."""
        self.residents[component].version += 1

    def tokenize(self, prompt: Any, max_sequence_length: int, component: str | None = None) -> dict[str, Tensor]:
        """The tensors of a prompt; ``component``: the tokenizer that a text loop binds as its own."""
        if component is None:
            return self._prepare["tokenize"](self.tokenizer, prompt, max_sequence_length)
        return self._prepare["tokenize_text"](self.tokenizer_of(component), prompt, max_sequence_length)

    def pixels(self, frames_NHWC: Tensor) -> Tensor:
        """(N, 3, S, S) of uint8 frames, as the card's image processor prepares them."""
        return self._prepare["pixels"](self.tokenizer, frames_NHWC)

    def prepared(self, operation: str, value: Any, params: Any) -> dict[str, Tensor] | None:
        """The tensors of a call that the family prepares from a slot's value and a request's settled ``params``; None
        for an operation that takes the value as it is."""
        prepare = self._prepare.get(operation)
        return None if prepare is None else prepare(self.tokenizer, value, params)

    def call(self, call: ModelCall, profile: Profile = Profile.SERVE) -> Tensor:
        """Runs one call, with gradient only under TRAIN; the result is on the instance's device."""
        output = self.compute(call, profile)
        return output.to(self.device) if call.component in self.elsewhere else output

    def compute(self, call: ModelCall, profile: Profile = Profile.SERVE) -> Tensor:
        """As :meth:`call`; the result is where the component is."""
        resident = self.residents[call.component]
        operation = self._operations[(self.card.components[call.component].kind, call.method)]
        device = self.device_of(call.component)
        tensors = {name: tensor.to(device) for name, tensor in call.tensors.items()}
        with (
            torch.set_grad_enabled(profile is Profile.TRAIN),
            self._compute(call.component),
            resident.active() as module,
        ):
            if resident.compiled != "graphs":
                return operation(module, tensors, call.static)
            torch.compiler.cudagraph_mark_step_begin()
            return operation(module, tensors, call.static).clone()  # the next replay writes over it

    def _compute(self, component: str) -> contextlib.AbstractContextManager[Any]:
        """Autocast when the card computes in another precision than it stores: one surface for serve and train."""
        wanted = getattr(torch, self.card.precision.serve)
        if wanted == torch.float32 or self.dtype(component) != torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device_of(component).type, dtype=wanted)


_DTYPES: WeakKeyDictionary[nn.Module, tuple[torch.dtype, torch.dtype]] = WeakKeyDictionary()
"""Module -> (dtype of its first parameter, its dtype): a library goes through all parameters to tell it."""


def _tokenizer_of(card: ModelCard, tokenizers: list[Component], folder: Path) -> Callable[[], Any]:
    """What reads the card's tokenizer, its first where it has several; all by subfolder where one is of images."""

    def read() -> Any:
        if not tokenizers:
            raise UserError(f"card {card.name!r} has no tokenizer, which this request needs")
        if any(component.kind == "image_processor" for component in tokenizers):
            return {component.subfolder: load_component(component, folder) for component in tokenizers}
        return load_component(tokenizers[0], folder)

    return read
