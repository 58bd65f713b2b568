"""SlabPool: the slabs of all requests over one budget in bytes. The stores themselves are in ``loops.slab``."""

from __future__ import annotations

from collections.abc import Hashable

from cards.errors import UserError
from inference.cache.budget import ByteBudget
from loops.slab import Slab, SlabKV, SlabSpec, Snapshot, TrainingSlab

__all__ = ["Slab", "SlabKV", "SlabPool", "SlabSpec", "Snapshot", "TrainingSlab"]


class SlabPool:
    """The slabs of all requests, addressed by (namespace, label): request or session, and guidance branch."""

    def __init__(self, budget: ByteBudget):
        self._budget = budget
        self._slabs: dict[tuple[Hashable, str], SlabKV] = {}

    @property
    def bytes(self) -> int:
        return sum(slab.bytes for slab in self._slabs.values())

    def open(self, namespace: Hashable, label: str, spec: SlabSpec, *, training: bool = False) -> SlabKV:
        """An empty store; raises ``CacheExhausted`` where the budget has no room for it."""
        if (namespace, label) in self._slabs:
            raise UserError(f"slab KV: {label!r} of {namespace!r} is open already; close the namespace first")
        slab: SlabKV
        if training:
            slab = TrainingSlab(spec, self._budget)
        else:
            self._budget.reserve(spec.slab_bytes, f"slab KV, {label!r} of {namespace!r}")
            try:
                slab = Slab(spec)
            except BaseException:
                self._budget.release(spec.slab_bytes)
                raise
        self._slabs[namespace, label] = slab
        return slab

    def close(self, namespace: Hashable) -> int:
        """Frees the slabs of a namespace, none if it has none; gives the bytes."""
        freed = 0
        for key in [key for key in self._slabs if key[0] == namespace]:
            slab = self._slabs.pop(key)
            slab.closed = True
            freed += slab.bytes
        self._budget.release(freed)
        return freed

    def __len__(self) -> int:
        return len(self._slabs)
