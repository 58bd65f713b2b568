"""CacheManager: every cache of an engine over one budget in bytes.

A request gets a :class:`RequestCaches`, which reaches its own entries alone; ``free`` returns all of it, whatever the
request opened. Knows requests as opaque names; the engine decides when they begin and end. Not thread-safe: the
engine's loop is its only caller.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cards.errors import UserError
from inference.cache.budget import ByteBudget
from inference.cache.feature import FeatureCache
from inference.cache.keys import CacheKey, FeatureKey, PrefixRoot
from inference.cache.paged import PagedEntry, PagedPool, PagedSpec
from inference.cache.residual import ResidualCache
from inference.cache.slab import Slab, SlabKV, SlabPool, SlabSpec
from inference.instance import ModelInstance


@dataclass(frozen=True)
class CacheStats:
    """What the caches hold and did."""

    capacity_bytes: int
    reserved_bytes: int
    """Bytes of memory taken: features, residuals, slabs, and the paged pools whole."""
    feature_bytes: int
    residual_bytes: int
    slab_bytes: int
    paged_bytes: int
    """Blocks of paged pools that entries reference."""
    paged_blocks: int
    paged_blocks_in_use: int
    paged_blocks_cached: int
    """Blocks kept for later prefixes; they give way when an entry needs them."""
    requests: int
    feature_hits: int
    feature_misses: int
    residual_hits: int
    residual_misses: int
    prefix_hit_tokens: int
    prefix_missed_tokens: int

    @property
    def request_bytes(self) -> int:
        """Bytes that live requests hold: 0 when there is none."""
        return self.residual_bytes + self.slab_bytes + self.paged_bytes


class RequestCaches:
    """The caches as one request sees them."""

    def __init__(self, manager: CacheManager, request: Hashable):
        self._manager = manager
        self.request = request

    def keep_residual(self, branch: str, name: str, tensor: Tensor, *, tag: Hashable) -> None:
        """See ``ResidualCache.put``."""
        self._check()
        self._manager.residual.put(self.request, branch, name, tensor, tag=tag)

    def residual(self, branch: str, name: str, *, tag: Hashable) -> Tensor | None:
        """See ``ResidualCache.get``."""
        self._check()
        return self._manager.residual.get(self.request, branch, name, tag=tag)

    def slab(self, branch: str, spec: SlabSpec, *, training: bool = False) -> SlabKV:
        """An empty slab of a guidance branch."""
        self._check()
        return self._manager.slabs.open(self.request, branch, spec, training=training)

    def paged(self, pool: PagedPool, branch: str, prompt_token_ids: Sequence[int], *, root: str | None) -> PagedEntry:
        """An entry of a guidance branch in one of the manager's pools."""
        self._check()
        return pool.open(self.request, branch, prompt_token_ids, root=root)

    def _check(self) -> None:
        if not self._manager.holds(self):
            raise UserError(f"caches: request {self.request!r} was freed; allocate it again")


class CacheManager:
    """See the module's docstring.

    Args:
        capacity_bytes: bound of all caches together.
        feature_bytes: bound of the feature cache within it; all of it by default.
    """

    def __init__(self, capacity_bytes: int, *, feature_bytes: int | None = None):
        self.budget = ByteBudget(capacity_bytes)
        self.features = FeatureCache(capacity_bytes if feature_bytes is None else feature_bytes, self.budget)
        self.residual = ResidualCache(self.budget)
        self.slabs = SlabPool(self.budget)
        self._pools: dict[Hashable, PagedPool] = {}
        self._roots: dict[int, set[str]] = {}
        self._requests: dict[Hashable, RequestCaches] = {}

    # -- paged pools

    def paged_pool(self, name: Hashable, spec: PagedSpec) -> PagedPool:
        """The pool of this name, such as a component's id on a card; made at its first use.

        Its memory is taken whole at that moment, so make pools when a model is loaded. Raises ``CacheExhausted``.
        """
        pool = self._pools.get(name)
        if pool is None:
            self.budget.reserve(spec.pool_bytes, f"paged KV pool {name!r} of {spec.blocks} blocks")
            try:
                pool = PagedPool(spec)
            except BaseException:
                self.budget.release(spec.pool_bytes)
                raise
            self._pools[name] = pool
        elif pool.spec != spec:
            raise UserError(f"paged KV pool {name!r}: got {spec}, expected {pool.spec}, as it was made")
        return pool

    def own_pool(self, name: Hashable, spec: PagedSpec) -> PagedPool:
        """:meth:`paged_pool` in memory beside that of all other caches, which makes room for it."""
        if name not in self._pools:
            self.budget.grow(spec.pool_bytes)
        return self.paged_pool(name, spec)

    def close_pools(self, namespace: Hashable) -> None:
        """Frees the entries of a namespace in every pool."""
        for pool in self._pools.values():
            pool.close(namespace)

    def drop_pool(self, name: Hashable) -> None:
        """Gives a pool's memory back, for a model that is unloaded; refused while an entry is open."""
        if name not in self._pools:
            raise UserError(f"paged KV: got pool {name!r}, expected one of {sorted(map(repr, self._pools))}")
        if len(self._pools[name]):
            raise UserError(f"paged KV pool {name!r}: {len(self._pools[name])} entries are open; free their requests")
        self.budget.release(self._pools.pop(name).spec.pool_bytes)

    def prefix_root(self, instance: ModelInstance, component: str) -> str:
        """What a paged entry of this component is opened with, as its weights are now."""
        root = PrefixRoot.of(instance, component)
        self._roots.setdefault(root.component_uid, set()).add(root.digest)
        return root.digest

    # -- slabs

    def own_slab(self, namespace: Hashable, branch: str, spec: SlabSpec) -> Slab:
        """A slab for inference in memory beside that of all other caches, whose bytes its request was admitted with."""
        self.budget.grow(spec.slab_bytes)
        try:
            slab = self.slabs.open(namespace, branch, spec)
        except BaseException:
            self.budget.shrink(spec.slab_bytes)
            raise
        assert isinstance(slab, Slab)
        return slab

    def close_own_slabs(self, namespace: Hashable) -> None:
        """Frees what :meth:`own_slab` opened, with its memory; again is no harm."""
        self.budget.shrink(self.slabs.close(namespace))

    # -- requests

    def allocate(self, request: Hashable) -> RequestCaches:
        """The caches of a request that begins."""
        if request in self._requests:
            raise UserError(f"caches: request {request!r} has its caches already; free it first")
        self._requests[request] = RequestCaches(self, request)
        return self._requests[request]

    def holds(self, caches: RequestCaches) -> bool:
        """Whether the request has not been freed."""
        return self._requests.get(caches.request) is caches

    def free(self, request: Hashable) -> None:
        """Returns everything of a request, whether it completed, failed or was cancelled; freeing twice is no error."""
        self._requests.pop(request, None)
        self.residual.close(request)
        self.slabs.close(request)
        for pool in self._pools.values():
            pool.close(request)

    # -- weights

    def invalidate(self, instance: ModelInstance, component: str) -> None:
        """Drops what any weights of one component left behind; entries of other components stay.

        Call it after the component's version was bumped and its requests were drained: KV that a live request holds is
        its own and stays.
        """
        uid = instance.residents[component].uid

        def stale(key: Hashable) -> bool:
            return isinstance(key, CacheKey | FeatureKey) and key.component_uid == uid

        self.features.drop(stale)
        self.residual.drop(stale)
        for root in self._roots.pop(uid, set()):
            for pool in self._pools.values():
                pool.forget_root(root)

    def stats(self) -> CacheStats:
        pools = self._pools.values()
        return CacheStats(
            capacity_bytes=self.budget.capacity_bytes,
            reserved_bytes=self.budget.used_bytes,
            feature_bytes=self.features.bytes,
            residual_bytes=self.residual.bytes,
            slab_bytes=self.slabs.bytes,
            paged_bytes=sum(pool.bytes for pool in pools),
            paged_blocks=sum(pool.blocks.total for pool in pools),
            paged_blocks_in_use=sum(pool.blocks.in_use for pool in pools),
            paged_blocks_cached=sum(pool.blocks.cached for pool in pools),
            requests=len(self._requests),
            feature_hits=self.features.hits,
            feature_misses=self.features.misses,
            residual_hits=self.residual.hits,
            residual_misses=self.residual.misses,
            prefix_hit_tokens=sum(pool.hit_tokens for pool in pools),
            prefix_missed_tokens=sum(pool.missed_tokens for pool in pools),
        )
