"""Sleep of a module: its weights leave the device's memory and come back bit for bit.

On an accelerator they move to host memory. On a CPU, whose memory that is already, they move to a file in a temporary
folder (``TMPDIR`` says where; a folder in memory frees nothing), which is gone once they are back. A sleeping module
keeps its parameters as objects, so whoever refers to them (an optimizer, a view) sees them again after; until then they
are empty, and a forward that went around ``wake`` fails. Gradients and plain attributes stay where they are.

Belongs to the module, not to a resident or an instance: whoever shares the module shares its sleep. Thread-safe.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from cards.errors import UserError
from inference.storage import allocate, layout, own_tensors, resident_bytes

if TYPE_CHECKING:
    from inference.resident import Resident


class InUse(UserError):
    """The component is in the middle of a call."""


class _Asleep:
    """The weights of a sleeping module."""

    def __init__(self, module: nn.Module):
        """Saves everything first, then lets go: a failure (a full disk) leaves the module as it was."""
        tensors = own_tensors(module)
        if any(hasattr(tensor, "to_local") for tensor in tensors):
            raise UserError("sleep: got a sharded module; expected whole weights on one device")
        blocks, self._places = layout(tensors)
        self._blocks = [(block.size, block.residue, block.device) for block in blocks]
        self._host = [None if block.device.type == "cpu" else block.data().cpu() for block in blocks]
        self._file: Path | None = None
        if any(host is None for host in self._host):
            with tempfile.NamedTemporaryFile(prefix="fastvideo-asleep-", suffix=".bin", delete=False) as stream:
                self._file = Path(stream.name)
                self._forget = weakref.finalize(self, self._file.unlink, missing_ok=True)
                for block in blocks:
                    if block.device.type == "cpu":
                        stream.write(block.data().numpy().data)
        for place in self._places:
            place.tensor.data = torch.empty(0, dtype=place.tensor.dtype, device=place.tensor.device)

    @property
    def size(self) -> int:
        """Bytes that it will hold again."""
        return sum(size for size, _, _ in self._blocks)

    def restore(self) -> None:
        """Brings everything back first, then puts it in place."""
        blocks = []
        with contextlib.ExitStack() as stack:
            stream = None if self._file is None else stack.enter_context(self._file.open("rb"))
            for (size, residue, device), host in zip(self._blocks, self._host, strict=True):
                block = allocate(size, residue, device)
                if host is not None:
                    block.data().copy_(host)
                elif stream is None or stream.readinto(block.data().numpy().data) != size:
                    raise RuntimeError(f"{self._file} is shorter than it was written; the weights in it are lost")
                blocks.append(block)
        for place in self._places:
            place.tensor.data = place.view(blocks[place.block])
        if self._file is not None:
            self._forget()


class ModuleState:
    """What belongs to a module whoever shares it."""

    def __init__(self, module: nn.Module) -> None:
        self.residents: weakref.WeakSet[Resident] = weakref.WeakSet()
        """Who serves this module."""
        self.origin: object | None = None
        """Stands for what built the module, where something did."""
        self._module = weakref.ref(module)
        self._lock = threading.RLock()
        self._calls = 0
        self._asleep: _Asleep | None = None

    @property
    def asleep(self) -> bool:
        return self._asleep is not None

    @property
    def key(self) -> object:
        """Stands for the module in a budget of weights."""
        return self if self.origin is None else self.origin

    @property
    def size(self) -> int:
        """Bytes of weights and buffers that the module holds, or will hold when it wakes."""
        with self._lock:
            module = self._module()
            return 0 if module is None else resident_bytes(module) if self._asleep is None else self._asleep.size

    def sleep(self, module: nn.Module) -> None:
        """Again is no harm. Raises :class:`InUse` in the middle of a call."""
        with self._lock, torch.no_grad():
            if self._asleep is not None:
                return
            if self._calls:
                raise InUse(f"sleep: {type(module).__name__} is in the middle of a call; try between two steps")
            self._asleep = _Asleep(module)

    def try_sleep(self) -> bool:
        """False for a module that cannot: it is in the middle of a call, sharded, or gone."""
        module = self._module()
        if module is None:
            return False
        try:
            self.sleep(module)
        except UserError:
            return False
        return True

    def wake(self) -> None:
        """Again is no harm."""
        with self._lock:
            if self._asleep is None:  # of nearly every call: no grad modes for it
                return
            with torch.inference_mode(False), torch.no_grad():
                self._asleep.restore()
                self._asleep = None

    def __enter__(self) -> None:
        """Awake, and not to be put to sleep until the end."""
        with self._lock:
            self.wake()
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1


_STATES: weakref.WeakKeyDictionary[nn.Module, ModuleState] = weakref.WeakKeyDictionary()
_STATES_LOCK = threading.Lock()


def state_of(module: nn.Module) -> ModuleState:
    """The state of this module, one for all who share it."""
    state = _STATES.get(module)
    if state is None:
        with _STATES_LOCK:
            state = _STATES.setdefault(module, ModuleState(module))
    return state
