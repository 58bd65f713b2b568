"""Keys and values of requests: of texts in a pool a language model, of chunked clips in a slab each.

Prefixes are shared only where batching may change last bits anyway: a prompt that finds its prefix in the pool
prefills less, in a forward of another shape.
"""

from __future__ import annotations

import itertools
from typing import Any

from cards.card import ModelCard
from cards.errors import UserError
from cards.program import Node
from inference.cache.manager import CacheManager
from inference.cache.paged import PagedPool, PagedSpec
from inference.cache.paged_source import PagedSource
from inference.cache.paged_transformers import paged_spec
from inference.instance import ModelInstance
from inference.peak import text_parts
from inference.request import ResolvedRequest
from inference.slab_kv import PooledSlabs, rolls_out, slab_bytes
from loops.loop import KVSource, SamplingParams

BLOCK_TOKENS = 16
MOST_BYTES = 2**30
"""Of a pool that nobody gave a size."""
_NAMESPACES = itertools.count(1)


def pool_bytes(instance: ModelInstance, texts: int) -> int:
    """A size of the pools of a card's language models that lets so many requests be in flight, at most ``MOST_BYTES``.

    0, which gives every text a cache of its own, where the card has none, or one request alone may need more than that.
    A request's own prompt is taken to be no longer than what is said of it; of a text that a later model reads nothing
    is known but that the context holds it.
    """
    limits = instance.card.sampling.text
    models = [component for component in language_models(instance.card) if component in instance.residents]
    if limits is None or not models:
        return 0
    sizes = [_spec(instance, component, blocks=1) for component in models]
    most = sum(size.blocks_for(limits.context) * size.block_bytes for size in sizes)
    tokens = [min(2 * limits.max_tokens, limits.context), *[limits.context] * (len(models) - 1)]
    usual = sum(size.blocks_for(n) * size.block_bytes for size, n in zip(sizes, tokens, strict=True))
    return 0 if most > MOST_BYTES else max(most, min(texts * usual, MOST_BYTES))


def language_models(card: ModelCard) -> list[str]:
    """Components that decode text, one for each loop that does."""
    return [loop.components["lm"] for loop in card.loops.values() if "lm" in loop.components]


def _spec(instance: ModelInstance, component: str, *, blocks: int) -> PagedSpec:
    config: Any = instance.config(component)
    return paged_spec(
        config,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        dtype=instance.dtype(component),
        device=instance.device_of(component),
    )


class TextKV:
    """See the module's docstring.

    Args:
        kv_bytes: size of each pool; 0 makes none, and every request has a cache of its own.
    """

    def __init__(self, caches: CacheManager, kv_bytes: int, *, share_prefixes: bool):
        if kv_bytes < 0:
            raise UserError(f"kv_bytes: got {kv_bytes}, expected a number of bytes >= 0")
        self._caches = caches
        self._kv_bytes = kv_bytes
        self._share = share_prefixes

    def source(self, instance: ModelInstance) -> KVSource | PooledSlabs | None:
        """Where a new request opens its keys and values; to be closed when it is over."""
        caches = self._caches
        if rolls_out(tuple(instance.card.loops.values())):
            return PooledSlabs(caches, ("slab", next(_NAMESPACES)))
        if self._kv_bytes == 0:
            return None

        def pool_of(component: str) -> tuple[PagedPool, str | None]:
            root = caches.prefix_root(instance, component) if self._share else None
            return self.pool(instance, component), root

        return PagedSource(next(_NAMESPACES), pool_of)

    def pool(self, instance: ModelInstance, component: str) -> PagedPool:
        """The pool of a component, made at its first use."""
        name = (component, instance.residents[component].uid)
        one = _spec(instance, component, blocks=1)
        blocks = self._kv_bytes // one.block_bytes
        if blocks < 1:
            raise UserError(f"kv_bytes: got {self._kv_bytes}, but one block of {component!r} takes {one.block_bytes}")
        return self._caches.own_pool(name, _spec(instance, component, blocks=blocks))

    def bytes_of(self, resolved: ResolvedRequest, nodes: tuple[Node, ...], instance: ModelInstance) -> int:
        """What a request fills at most: the blocks of its prompt and of all tokens that it may add, or its slab."""
        slabs = slab_bytes(resolved, nodes, instance) if isinstance(resolved.params, SamplingParams) else 0
        if self._kv_bytes == 0:
            return slabs
        parts = text_parts(resolved, nodes, instance).values()
        specs = [(self.pool(instance, part.component).spec, part.tokens) for part in parts]
        return slabs + sum(spec.blocks_for(tokens) * spec.block_bytes for spec, tokens in specs)

    def close(self, source: KVSource | PooledSlabs | None) -> None:
        """Frees what a request opened."""
        if isinstance(source, PooledSlabs):
            source.close_slab()
        if isinstance(source, PagedSource):
            self._caches.close_pools(source.namespace)
