"""One bound in bytes that several caches share.

Knows amounts and who may give some back; knows nothing about tensors. Not thread-safe: the engine's loop is its only
caller.
"""

from __future__ import annotations

from collections.abc import Callable

from cards.errors import UserError


class CacheExhausted(UserError):
    """A cache has no room for what a request needs; the message has the figures."""


class ByteBudget:
    """Bytes held by all owners together never exceed ``capacity_bytes``."""

    def __init__(self, capacity_bytes: int):
        if capacity_bytes < 0:
            raise UserError(f"cache budget: got {capacity_bytes} bytes, expected 0 or more")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._reclaimers: list[Callable[[int], object]] = []

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def on_pressure(self, reclaim: Callable[[int], object]) -> None:
        """``reclaim(n)`` is asked to release n bytes, or what it can, before a reservation is refused."""
        self._reclaimers.append(reclaim)

    def reserve(self, size_bytes: int, purpose: str) -> None:
        """Takes bytes or raises :class:`CacheExhausted`; takes nothing when it raises."""
        if size_bytes <= self.capacity_bytes:
            for reclaim in self._reclaimers:
                if size_bytes <= self.free_bytes:
                    break
                reclaim(size_bytes - self.free_bytes)
        if size_bytes > self.free_bytes:
            raise CacheExhausted(
                f"{purpose}: got {size_bytes} bytes to keep, expected at most {self.free_bytes} "
                f"({self.used_bytes} of {self.capacity_bytes} are in use); "
                "wait for a request to end or raise the cache budget"
            )
        self.used_bytes += size_bytes

    def grow(self, size_bytes: int) -> None:
        """More memory is there to be taken."""
        self.capacity_bytes += size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Inverse of :meth:`grow`, of bytes that are free."""
        assert 0 <= size_bytes <= self.free_bytes, (size_bytes, self.free_bytes)
        self.capacity_bytes -= size_bytes

    def release(self, size_bytes: int) -> None:
        assert 0 <= size_bytes <= self.used_bytes, (size_bytes, self.used_bytes)
        self.used_bytes -= size_bytes
