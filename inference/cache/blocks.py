"""Who owns which block: reference counts, the free list, and blocks kept by content for later prefixes.

Knows block numbers and hashes; knows nothing about tensors, tokens or requests. A block is in exactly one state:
free (no reference, nothing worth keeping), in use (one reference or more), or cached (no reference, found by its hash,
evicted least recently used first).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

from inference.cache.budget import CacheExhausted


class PoolExhausted(CacheExhausted):
    """The block pool has too few blocks that nobody references."""


class BlockAllocator:
    """Blocks ``0 .. total - 1``."""

    def __init__(self, total: int):
        self.total = total
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def in_use(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        """Blocks that only a later prefix would use."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that an allocation may take: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def published(self, block: int) -> bool:
        """Whether the block is found by its content's hash."""
        return block in self._hash_of

    def allocate(self, count: int, purpose: str) -> list[int]:
        """Blocks with one reference each, all or none; raises :class:`PoolExhausted`."""
        if count > self.available:
            raise PoolExhausted(
                f"{purpose}: got a need of {count} blocks, expected at most {self.available} "
                f"({self.in_use} of {self.total} are in use); wait for a request to end or give the pool more blocks"
            )
        taken = []
        for _ in range(count):
            if not self._free:
                self.evict(1)
            block = self._free.pop()
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, cached ones included."""
        for block in blocks:
            assert self._references[block] or block in self._cached, f"block {block} is free"
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; the first of ``blocks`` that becomes cached is the first to be evicted."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} has no reference"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # -- blocks by content

    def publish(self, block: int, digest: bytes) -> None:
        """Lets later prefixes find the block; an equal block that is found already stays the one that is found."""
        if digest not in self._by_hash and block not in self._hash_of:
            self._by_hash[digest] = block
            self._hash_of[block] = digest

    def find(self, digest: bytes) -> int | None:
        return self._by_hash.get(digest)

    def withdraw(self, block: int) -> None:
        """No later prefix finds the block; it is free at once when nobody references it."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._by_hash[digest]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def evict(self, count: int) -> int:
        """Frees up to ``count`` cached blocks, least recently used first; gives how many."""
        victims = list(itertools.islice(self._cached, count))
        for block in victims:
            self.withdraw(block)
        return len(victims)
