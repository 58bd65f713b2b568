"""Feature cache: results of component operations, least recently used out first, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torch import Tensor


class FeatureCache:
    """LRU map of tensors within ``capacity_bytes``; a capacity of 0 keeps nothing."""

    def __init__(self, capacity_bytes: int = 256 * 2**20):
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, Tensor] = OrderedDict()

    def get(self, key: Hashable) -> Tensor | None:
        value = self._entries.get(key)
        if value is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return value

    def put(self, key: Hashable, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        if size > self.capacity_bytes or key in self._entries:
            return
        self._entries[key] = value
        self.bytes += size
        while self.bytes > self.capacity_bytes:
            _, old = self._entries.popitem(last=False)
            self.bytes -= old.numel() * old.element_size()

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)
