"""Counts the bytes of tensors that operations make and that live at once: the activations of what runs under it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``now`` and ``peak`` in bytes. Scratch memory inside a kernel is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **({} if kwargs is None else kwargs))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in given:
                self._take(tensor.untyped_storage())
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._known:
            return
        self._known[address] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, address)

    def _drop(self, address: int) -> None:
        self.now -= self._known.pop(address, 0)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
