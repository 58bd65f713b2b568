"""WeightSyncController: new weights for a component of a running engine, with no request served by half of each.

First everything that can fail does: the weights are read into host memory while requests go on, and names, shapes and
dtypes are checked; all problems are told at once. Then, between two rounds, old and new change places tensor by tensor
in the memory that the module has; should that fail midway they change back. The version of the component grows, and
what was cached under its old weights is dropped; entries of every other component stay.

What becomes of the requests that are under way on the component is the ``mode``:

- ``drain``: nobody is admitted, they finish on the old weights, then the weights change. Costs a pause.
- ``freeze``: they go on with a copy of the old weights, those admitted later get the new. Costs memory for the copy
  until the last of them ends. The copy computes the same bits.
- ``boundary``: they fail with :class:`StoppedBySync` where they are, between two steps. Submitted again with its seed,
  a request is computed on the new weights whole; the controller does not do so itself: whoever asked may not want that.

Whoever shares the module (roles as views, LoRA roles on one base) gets the new weights, and their requests count as
under way. Knows how to move weights; knows nothing of trainers, ranks or transports.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from cards.errors import UserError, unknown_name
from inference.cache.manager import CacheManager
from inference.handle import Handle
from inference.instance import ModelInstance
from inference.resident import Resident
from inference.sleep import state_of
from inference.storage import duplicate

Mode = Literal["drain", "freeze", "boundary"]
MODES = ("drain", "freeze", "boundary")
SHOWN = 20
"""Problems of a kind that a message lists."""


class StoppedBySync(UserError):
    """The request was under way when its weights were replaced; submit it again."""


class SyncEngine(Protocol):
    """What the controller needs of an engine."""

    caches: CacheManager
    round_lock: Any
    """A lock that the same thread may take again; held while a round runs."""

    def hold(self) -> None:
        """Nobody is admitted until ``release``."""

    def release(self) -> None: ...

    def in_flight(self, instance: ModelInstance | None = None) -> list[Handle]:
        """Requests that have begun and are not over, suspended ones too."""

    def tick(self) -> bool:
        """One round; False when no request could move."""

    def fail(self, handle: Handle, failure: Exception) -> None:
        """Ends a request between two rounds."""


@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    component: str
    mode: Mode
    version: int
    """Of the component's weights now."""
    tensors: int
    bytes: int
    read_seconds: float
    """Reading and checking, while requests went on."""
    paused_seconds: float
    """From the end of admission to its beginning again."""
    finished: int
    """Requests that ended on the old weights before they changed (drain)."""
    frozen: int
    """Requests that go on with the old weights (freeze)."""
    stopped: int
    """Requests that failed with ``StoppedBySync`` (boundary)."""


class WeightSyncController:
    """See the module's docstring. Call it from the engine's own thread between rounds, or from any other thread."""

    def __init__(self, engine: SyncEngine):
        self.engine = engine

    def sync(
        self,
        instance: ModelInstance,
        component: str,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        mode: Mode = "drain",
        partial: bool = False,
        timeout: float | None = None,
    ) -> SyncReport:
        """Replaces the weights of ``component``, for ``instance`` and all who share its module.

        Args:
            weights: tensors by their name in the module's state dict, on any device; or an iterator of (name, tensor),
                which is read once, one tensor at a time. Of names tied to one tensor any is enough.
            partial: True replaces what is given, such as one adapter's tensors, and leaves the rest.
            timeout: seconds that ``drain`` waits for the requests under way.

        Raises ``UserError`` that lists every wrong name, shape and dtype, or says which request did not end in time,
        and whatever ``weights`` or the device raise. After any of them the old weights are whole and their version and
        caches as before. A component that slept is awake after.
        """
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
        resident = instance.resident(component)
        began = time.monotonic()
        module = resident.module
        staged = _read(module, component, weights, partial=partial)
        read = time.monotonic()
        self.engine.hold()
        finished = 0
        try:
            while True:
                if mode == "drain":
                    finished += self._drain(module, timeout)
                with self.engine.round_lock:
                    under_way = self._under_way(module)
                    if mode != "drain" or not under_way:  # a run may have begun past the line
                        self._change(instance, component, module, staged, under_way, mode)
                        break
        finally:
            self.engine.release()
        return SyncReport(
            component=component,
            mode=mode,
            version=resident.version,
            tensors=len(staged),
            bytes=sum(new.numel() * new.element_size() for _, new in staged),
            read_seconds=read - began,
            paused_seconds=time.monotonic() - read,
            finished=finished,
            frozen=len(under_way) if mode == "freeze" else 0,
            stopped=len(under_way) if mode == "boundary" else 0,
        )

    def _change(
        self,
        instance: ModelInstance,
        component: str,
        module: nn.Module,
        staged: list[tuple[Tensor, Tensor]],
        under_way: Sequence[Handle],
        mode: Mode,
    ) -> None:
        """Between two rounds: the new weights take their place, and the requests under way go where the mode says."""
        freeze = mode == "freeze" and bool(under_way)
        with state_of(module):
            frozen = duplicate(module) if freeze else None
            _exchange(staged)
        if frozen is not None:
            _freeze(under_way, module, frozen)
        for resident in list(state_of(module).residents):
            resident.version += 1
            if not freeze:  # else requests under way may still read what they cached; nobody else can, by the version
                self.engine.caches.invalidate(instance.view({component: resident}), component)
        if mode == "boundary":
            for handle in under_way:
                self.engine.fail(handle, _stopped(handle, component))

    def _under_way(self, module: nn.Module) -> list[Handle]:
        """Requests that have begun on an instance that has this module among its components."""
        residents = state_of(module).residents
        return [
            handle
            for handle in self.engine.in_flight()
            if any(resident in residents for resident in handle._running.instance.residents.values())
        ]

    def _drain(self, module: nn.Module, timeout: float | None) -> int:
        """Runs rounds until no request is under way on the module; gives how many there were."""
        began = time.monotonic()
        first: int | None = None
        while True:
            with self.engine.round_lock:
                left = self._under_way(module)
            first = len(left) if first is None else first
            if not left:
                return first
            if timeout is not None and time.monotonic() - began > timeout:
                raise UserError(
                    f"sync: {_names(left)} did not end within {timeout:g} s; "
                    "wait longer, or use mode='freeze' or mode='boundary'"
                )
            if self.engine.tick():
                continue
            if not any(handle.state in ("running", "done") for handle in left):
                raise UserError(
                    f"sync: {_names(left)} is suspended, or was and waits, and would go on with other weights; "
                    "resume it and let it end, cancel it, or use mode='freeze'"
                )
            time.sleep(0.001)  # another thread's run moves them


# -- reading


def _targets(module: nn.Module) -> dict[str, Tensor]:
    """The live tensors by their names in the state dict; tied names have one object."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


class _Problems:
    """What is wrong with given weights, by kind."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        self._kinds.setdefault(kind, []).append(text)

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def raise_for(self, component: str, module: nn.Module) -> None:
        """Raises ``UserError`` with all of them, if there are any."""
        if not self._kinds:
            return
        rows = []
        for kind, texts in self._kinds.items():
            more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
            rows.append(f"{kind}: {', '.join(texts[:SHOWN])}{more}")
        raise UserError(
            f"sync: the weights do not fit {component!r} ({type(module).__name__}); nothing was changed:\n  "
            + "\n  ".join(rows)
        )


def _read(
    module: nn.Module, component: str, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, partial: bool
) -> list[tuple[Tensor, Tensor]]:
    """(live tensor, its new value in host memory), all checked; raises ``UserError`` with everything that is wrong."""
    targets = _targets(module)
    problems = _Problems()
    sharded = [name for name, target in targets.items() if hasattr(target, "to_local")]
    for name in sharded:
        problems.add("sharded in this process, expected whole tensors on one device", name)
    problems.raise_for(component, module)
    if isinstance(weights, Mapping):
        for name, tensor in weights.items():
            _check(name, tensor, targets, problems)
        _check_missing(weights, targets, problems, partial)
        problems.raise_for(component, module)
    given: dict[str, Tensor] = {}
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if name in given:
            problems.add("given twice", name)
        elif not isinstance(weights, Mapping):
            _check(name, tensor, targets, problems)
        # What is wrong is read to its end, so that every problem is told, but not kept.
        given[name] = torch.empty(0) if problems else tensor.detach().to("cpu", copy=True)
    _check_missing(given, targets, problems, partial)
    staged: dict[int, tuple[Tensor, Tensor]] = {}
    for name in () if problems else given:
        first = staged.setdefault(id(targets[name]), (targets[name], given[name]))
        if not torch.equal(first[1], given[name]):
            problems.add("tied to another name, which was given another value", name)
    problems.raise_for(component, module)
    return list(staged.values())


def _check(name: str, tensor: Any, targets: Mapping[str, Tensor], problems: _Problems) -> None:
    target = targets.get(name)
    if target is None:
        problems.add("no such name", name)
    elif not isinstance(tensor, Tensor):
        problems.add("not a tensor", f"{name} ({type(tensor).__name__})")
    elif hasattr(tensor, "to_local"):
        problems.add("sharded, expected a whole tensor (gather it first)", name)
    else:
        if tensor.shape != target.shape:
            problems.add("wrong shape", f"{name}: got {list(tensor.shape)}, expected {list(target.shape)}")
        if tensor.dtype != target.dtype:
            problems.add("wrong dtype", f"{name}: got {tensor.dtype}, expected {target.dtype} (convert it first)")


def _check_missing(
    given: Mapping[str, Tensor], targets: Mapping[str, Tensor], problems: _Problems, partial: bool
) -> None:
    """A name may be missing where one that is tied to it was given."""
    if partial:
        if not given:
            problems.add("nothing given", "expected at least one tensor")
        return
    covered = {id(targets[name]) for name in given if name in targets}
    for name, target in targets.items():
        if id(target) not in covered:
            problems.add("missing", name)


# -- changing


@torch.no_grad()
def _exchange(staged: list[tuple[Tensor, Tensor]]) -> None:
    """Live and staged values change places; raises with every live value as it was."""
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        for index, (live, new) in enumerate(staged):
            old = live.detach().to("cpu", copy=True)
            changed.append((live, old))
            _write(live, new)
            staged[index] = (live, old)
    except BaseException:
        for live, old in changed:
            _write(live, old)
        raise


def _write(live: Tensor, value: Tensor) -> None:
    """In place, so that the tensor keeps its address, strides and whoever refers to it."""
    live.detach().copy_(value)


def _freeze(handles: Sequence[Handle], module: nn.Module, copy: nn.Module) -> None:
    """Moves requests to ``copy``, which goes when the last of them is over: nobody else holds it.

    Requests that shared forwards still do: there is one new resident for each old one.
    """
    frozen: dict[int, Resident] = {}
    views: dict[int, ModelInstance] = {}
    for handle in handles:
        instance = handle._running.instance
        if id(instance) not in views:
            own: dict[str, Resident] = {}
            for cid, resident in instance.residents.items():
                if resident.built and resident.peek() is module:
                    if resident.uid not in frozen:
                        frozen[resident.uid] = Resident(copy, resident.adapter, resident.version)
                    own[cid] = frozen[resident.uid]
            views[id(instance)] = instance.view(own)
        handle._running.instance = views[id(instance)]


def _stopped(handle: Handle, component: str) -> StoppedBySync:
    done, total = handle.progress
    return StoppedBySync(
        f"the weights of {component!r} were replaced while {handle.id} was at step {done} of {total}; "
        f"submit it again (seed {handle.seed}) to have it computed on the new weights"
    )


def _names(handles: Sequence[Handle]) -> str:
    return ", ".join(handle.id for handle in handles)
