"""LiveWorld: a chunked rollout that outlives its requests: what it holds between two of them, and its place in the
ledger.

At most one request at a time goes on from it. When that completes the world is what it left; when it fails, is
cancelled or is lost with the engine, the world is to the bit what it was: the slab is rolled back, and nothing else is
written in place. Between two requests the world keeps the bytes that its last one was admitted with, so that the next
waits for a turn and not for memory, until it is put to rest in host memory: then the next asks for all of them again.

Every call is made under the engine's ``round_lock``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cards.program import Node
from inference.admission import Demand, Ticket
from inference.cache.manager import CacheManager
from inference.instance import ModelInstance
from inference.request import ResolvedRequest
from inference.slab_kv import PooledSlabs, world_slab
from loops.chunk_rollout import WORLD, World
from loops.slab import SlabHandle

_NAMES = itertools.count(1)
FLOAT_BYTES = 4


class LiveWorld:
    """See the module's docstring.

    Args:
        caches: of the engine, where the slab is held.
        idle: called when a request of it ended and left it holding bytes.
    """

    def __init__(self, caches: CacheManager, idle: Callable[[LiveWorld], None]):
        self.source = PooledSlabs(caches, ("world", next(_NAMES)))
        self.state = World()
        self.slots: dict[str, Any] = {}
        """What its requests need not work out again, such as the prompt's text."""
        self.frames = 0
        """Frames that have left, all requests together."""
        self.lost = False
        """True when it could not be rolled back; nothing goes on from it any more."""
        self.busy = False
        """Whether a request goes on from it now."""
        self.whole = Demand()
        """What its last request needs, with all that the world holds."""
        self._idle = idle
        self._ticket: Ticket | None = None

    @property
    def held(self) -> Demand | None:
        """What it holds in the ledger between its requests."""
        return None if self._ticket is None else self._ticket.held

    # -- a request begins and ends

    def demand(
        self, whole: Demand, resolved: ResolvedRequest, nodes: Sequence[Node], instance: ModelInstance
    ) -> Demand:
        """What a request of it is admitted with, of the ``whole`` that one for a clip of its own would be: without the
        bytes that the world holds already. One that needs more than these puts the world to rest and asks for all."""
        _, cache_bytes = world_slab(resolved, nodes, instance)
        params = resolved.params
        more = (instance.card.geometry.temporal - 1) * 3 * params.height * params.width if resolved.pixels else 0
        whole = replace(whole, cache_bytes=cache_bytes, resident_bytes=whole.resident_bytes + FLOAT_BYTES * more)
        self.whole = whole
        held = self.held
        if held is None:
            return whole
        if whole.cache_bytes <= held.cache_bytes and whole.resident_bytes <= held.resident_bytes:
            return replace(whole, cache_bytes=0, resident_bytes=0)
        self.rest()
        return whole

    def keep(self, ticket: Ticket) -> Ticket | None:
        """Takes over the bytes of an ending request's ticket where the world holds none; gives what is left of it."""
        if self._ticket is not None:
            return ticket
        ticket.keep_bytes()
        self._ticket = ticket
        return None

    def settle(self, slots: Mapping[str, Any] | None, frames: int) -> None:
        """The request is over: ``slots`` that it filled when it completed, None when it did not."""
        if slots is not None:
            self.state = slots[WORLD]
            assert self.state.kv is not None
            self.state.kv.commit()
            self.frames = frames
            self.slots = {"text": slots["text"]}
        elif self.state.kv is None:
            self.source.close_slab()
        elif not self.state.kv.rollback():
            self.lost = True
            self.close()
        if self.state.kv is None:
            self._refund()
        elif self.state.kv.resting:  # the request was suspended
            self.rest()
        self.busy = False
        if self._ticket is not None:
            self._idle(self)

    # -- between two requests, while no round runs

    def rest(self) -> None:
        """Moves it to host memory and gives its bytes back; again is no harm."""
        if self.state.kv is not None:
            if not self.state.kv.resting:
                self.state.kv.rest()
            self.state = replace(self.state, features=_on_cpu(self.state.features))
        self.slots = {name: value.cpu() for name, value in self.slots.items()}
        self._refund()

    def close(self) -> None:
        """Lets go of everything; again is no harm."""
        self.source.close_slab()
        self.state, self.slots = World(), {}
        self._refund()

    # -- copies

    def contents(self) -> dict[str, Any]:
        """All that it is made of, in host memory: plain values and tensors, for :meth:`fill`."""
        kv = self.state.kv
        return {
            "chunks": self.state.chunks,
            "kv": None if kv is None else kv.contents(),
            "features": _on_cpu(self.state.features),
            "generator": self.state.generator,
            "slots": {name: value.cpu() for name, value in self.slots.items()},
            "frames": self.frames,
        }

    def fill(self, contents: Mapping[str, Any], slab: Callable[[], Any]) -> None:
        """Takes what :meth:`contents` of another gave, at rest. ``slab``: the spec of its slab."""
        kv = contents["kv"]
        self.state = World(
            contents["chunks"],
            None if kv is None else SlabHandle.at_rest(slab(), self.source, kv),
            contents["features"],
            contents["generator"],
        )
        self.slots, self.frames = dict(contents["slots"]), contents["frames"]

    def _refund(self) -> None:
        if self._ticket is not None:
            self._ticket.refund()
            self._ticket = None


def _on_cpu(features: list[Any] | None) -> list[Any] | None:
    return None if features is None else [item.cpu() if isinstance(item, Tensor) else item for item in features]
