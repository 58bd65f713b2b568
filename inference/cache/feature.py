"""Feature cache: results of component operations, least recently used out first, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from torch import Tensor

from inference.cache.budget import ByteBudget


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class FeatureCache:
    """LRU map of tensors within ``capacity_bytes``; a capacity of 0 keeps nothing.

    With a ``budget`` its bytes count there too, and its oldest entries make way when another cache needs the room.
    """

    def __init__(self, capacity_bytes: int = 256 * 2**20, budget: ByteBudget | None = None):
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._budget = budget
        if budget is not None:
            budget.on_pressure(self.shrink)

    def get(self, key: Hashable) -> Tensor | None:
        value = self._entries.get(key)
        if value is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return value

    def put(self, key: Hashable, value: Tensor) -> None:
        size = tensor_bytes(value)
        if size > self.capacity_bytes or key in self._entries:
            return
        self.shrink(size - (self.capacity_bytes - self.bytes))
        if self._budget is not None:
            if size > self._budget.free_bytes + self.bytes:
                return
            self._budget.reserve(size, "feature cache")
        self._entries[key] = value
        self.bytes += size

    def shrink(self, size_bytes: int) -> int:
        """Drops the least recently used entries until ``size_bytes`` are free or none is left; gives bytes dropped."""
        dropped = 0
        while self._entries and dropped < size_bytes:
            dropped += self._drop(next(iter(self._entries)))
        return dropped

    def drop(self, stale: Callable[[Hashable], bool]) -> int:
        """Drops the entries whose key is ``stale``; gives bytes dropped."""
        return sum(self._drop(key) for key in [key for key in self._entries if stale(key)])

    def clear(self) -> None:
        self.drop(lambda key: True)

    def _drop(self, key: Hashable) -> int:
        size = tensor_bytes(self._entries.pop(key))
        self.bytes -= size
        if self._budget is not None:
            self._budget.release(size)
        return size

    def __len__(self) -> int:
        return len(self._entries)
