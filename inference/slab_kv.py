"""What chunked rollouts hold, counted before a request is admitted: a slab each, in the engine's slab pool, and what
the decoder keeps. One that goes on later keeps both."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from cards.card import LoopSpec
from cards.chunks import chunk_count
from cards.memory import ForwardSize
from cards.program import Node
from cards.registry import family
from inference.cache.manager import CacheManager
from inference.instance import ModelInstance
from inference.request import ResolvedRequest
from inference.resolve import CHUNK_LOOP
from loops.chunk_rollout import ChunkOptions, slab_spec
from loops.options import read_options
from loops.slab import Slab, SlabSpec

BRANCH = "main"


class PooledSlabs:
    """Opens one request's slab in the pool; whoever made it closes it when the request ends."""

    def __init__(self, caches: CacheManager, namespace: Hashable):
        self._caches = caches
        self.namespace = namespace

    def open_slab(self, spec: SlabSpec) -> Slab:
        return self._caches.own_slab(self.namespace, BRANCH, spec)

    def close_slab(self) -> None:
        """Frees it; again is no harm."""
        self._caches.close_own_slabs(self.namespace)


def rolls_out(loops: Sequence[LoopSpec]) -> bool:
    """Whether any of the loops holds a slab."""
    return any(loop.kind == CHUNK_LOOP for loop in loops)


def slab_bytes(resolved: ResolvedRequest, nodes: Sequence[Node], instance: ModelInstance) -> int:
    """What the slabs of a request's rollouts hold from their first step on."""
    return sum(spec.slab_bytes for spec, _ in _slabs(resolved, nodes, instance, goes_on=False))


def world_slab(resolved: ResolvedRequest, nodes: Sequence[Node], instance: ModelInstance) -> tuple[SlabSpec, int]:
    """The slab of a request whose rollout may go on later, and the bytes of that and of the chunks that it keeps so
    that they can come back. Raises ``UserError`` where the card sets no bound."""
    ((spec, chunks),) = _slabs(resolved, nodes, instance, goes_on=True)
    return spec, spec.slab_bytes + spec.layers * min(chunks, spec.window_chunks) * spec.chunk_bytes


def _slabs(
    resolved: ResolvedRequest, nodes: Sequence[Node], instance: ModelInstance, *, goes_on: bool
) -> Iterator[tuple[SlabSpec, int]]:
    """Of each rollout: its slab, and its chunks."""
    card = instance.card
    for node in nodes:
        if node.loop is None or card.loops[node.loop].kind != CHUNK_LOOP:
            continue
        spec, params = card.loops[node.loop], resolved.params_of(node.id)
        options, component = read_options(ChunkOptions, spec, card), spec.components["denoiser"]
        channels, _, height, width = card.geometry.latent_shape(params.frames, params.height, params.width)
        chunks = chunk_count(params.frames, options.chunk, card.geometry)
        slab = slab_spec(
            instance.config(component),
            options,
            chunks=None if goes_on else chunks,
            shape=(1, channels, options.chunk, height, width),
            dtype=instance.dtype(component),
            device=instance.device_of(component),
        )
        yield slab, chunks


def features_bytes(resolved: ResolvedRequest, nodes: Sequence[Node], instance: ModelInstance) -> int:
    """What a request's rollouts hold of their decoders from chunk to chunk."""
    card, total = instance.card, 0
    known = family(card.family).kept_bytes()
    for node in nodes if resolved.pixels else ():
        if node.loop is None or card.loops[node.loop].kind != CHUNK_LOOP:
            continue
        params, component = resolved.params_of(node.id), card.loops[node.loop].components["decoder"]
        _, _, height, width = card.geometry.latent_shape(params.frames, params.height, params.width)
        count = known.get((card.components[component].kind, "decode_chunk"))
        total += 0 if count is None else count(instance.config(component), ForwardSize(1, 1, height, width))
    return total
