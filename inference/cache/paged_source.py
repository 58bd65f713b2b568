"""Where text requests keep their keys and values: entries of a paged pool, behind the loop's KV contract."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from inference.cache.paged import PagedEntry, PagedPool
from inference.cache.paged_transformers import PagedCache


class PagedKV:
    """One request's entry of a pool. Entries of one pool may be rows of one forward, whatever their lengths."""

    def __init__(self, pool: PagedPool, entry: PagedEntry):
        self.pool = pool
        self.entry = entry
        self.cache = PagedCache(pool, [entry])

    @property
    def length(self) -> int:
        return self.entry.length

    @property
    def padded_length(self) -> int:
        """Tokens that its past is padded to at most, in a forward with others of its pool."""
        return self.pool.longest

    @property
    def batch_key(self) -> int:
        return id(self.pool)

    def together(self, handles: Sequence[PagedKV]) -> PagedCache:
        return PagedCache(self.pool, [handle.entry for handle in handles])

    def record(self, token_ids: Sequence[int]) -> None:
        self.pool.record(self.entry, token_ids)


class PagedSource:
    """Opens the entries of one request; whoever made it closes its ``namespace`` in the pool when the request ends.

    Args:
        namespace: the request, as the pool knows it.
        pool_of: component id -> (pool, root of the prefixes that may be shared; None shares nothing).
    """

    def __init__(self, namespace: Hashable, pool_of: Callable[[str], tuple[PagedPool, str | None]]):
        self.namespace = namespace
        self._pool_of = pool_of

    def open(self, component: str, token_ids: tuple[int, ...]) -> PagedKV:
        pool, root = self._pool_of(component)
        return PagedKV(pool, pool.open(self.namespace, "main", token_ids, root=root))
