"""WorldModelSession: a clip that goes on as long as somebody acts on it.

A session holds a world (``inference.live_world``): the window of keys and values, what the decoder keeps, the state of
the generator. Each act is a request like any other, for some chunks more: it waits for admission, shares rounds with
other requests by the engine's policy, streams its frames and can be cancelled before any of its steps. N acts without
actions are the request of N chunks with the same seed, bit for bit; an act that does not complete never was.

Somebody moves the engine, as for :meth:`Engine.submit`. Any thread may call a session.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from cards.errors import UserError, unknown_name
from inference.engine import Engine
from inference.handle import Cancelled, Handle
from inference.instance import ModelInstance
from inference.request import Request
from inference.resolve import CHUNK_LOOP, denoise_spec, resolve
from inference.slab_kv import world_slab
from inference.stream import CancelScope
from loops.chunk_rollout import ChunkOptions
from loops.options import read_options
from loops.slab import SlabSpec

FORMAT = 1
"""Of what :meth:`WorldModelSession.save` writes."""
SETTINGS = ("prompt", "seed", "height", "width", "output")
"""Fields of a request that stay what they are for a session's whole life."""


class WorldModelSession:
    """See the module's docstring.

    Args:
        engine: what runs it, together with all else.
        instance: a model whose plain task rolls out in chunks within a bounded window.
        prompt, seed, height, width, output: as in a ``Request``, for the whole life of the session. ``seed`` None draws
            one, see :attr:`seed`.
        priority: of every act, as in a ``Request``.

    Raises ``UserError`` where the card makes no world, or one without a bound, and for what a request refuses.
    """

    def __init__(
        self,
        engine: Engine,
        instance: ModelInstance,
        prompt: str,
        seed: int | None = None,
        *,
        height: int | None = None,
        width: int | None = None,
        output: Literal["video", "latents"] = "video",
        priority: int = 0,
    ):
        spec = denoise_spec(instance.card, Request.task)
        if spec.kind != CHUNK_LOOP:
            raise UserError(
                f"a session needs a card that rolls out in chunks, got {instance.card.name!r}, whose loop is "
                f"{spec.kind}; use a causal card, such as wan_causal"
            )
        self.engine = engine
        self.instance = instance
        self._options = read_options(ChunkOptions, spec, instance.card)
        self._request = Request(
            prompt=prompt,
            seed=seed,
            height=height,
            width=width,
            output=output,
            priority=priority,
            frames=self._frames(1),
        )
        resolved = resolve(self._request, instance.card)
        self._request = replace(resolved.request, height=resolved.params.height, width=resolved.params.width)
        self._slab()
        self._world = engine.new_world()
        self._act: Handle | None = None
        self._state: Literal["open", "suspended", "closed"] = "open"

    # -- what it is

    @property
    def actions(self) -> tuple[str, ...]:
        """Names that :meth:`act` takes, the first meaning none; () of a card without actions."""
        return self._options.actions

    @property
    def latent_frames(self) -> int:
        """Latent frames a chunk."""
        return self._options.chunk

    @property
    def prompt(self) -> str:
        return self._request.prompt

    @property
    def seed(self) -> int:
        assert self._request.seed is not None
        return self._request.seed

    @property
    def chunks(self) -> int:
        """Chunks of the world so far."""
        return self._world.state.chunks

    @property
    def frames(self) -> int:
        """Frames of the world so far; 0 of one in latents."""
        return self._world.frames

    @property
    def state(self) -> Literal["open", "acting", "suspended", "closed"]:
        return "acting" if self._acting else self._state

    # -- acting

    def act(self, action: str | None = None, chunks: int = 1, *, scope: CancelScope | None = None) -> Handle:
        """The world goes on by some chunks under one action; None is the card's first.

        The handle's events bring the new frames as they are decoded, each with its place in the whole clip, and its
        result has all of them with their latents. Cancelled, failed or lost with the engine, it leaves the world as it
        was. Raises ``UserError`` for an action that the card does not have, for a session that is closed or suspended,
        and while another act is under way.
        """
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise UserError(f"chunks: got {chunks!r}, expected a whole number of at least 1")
        if action is not None and not self.actions:
            raise UserError(
                f"action: got {action!r}, expected none: card {self.instance.card.name!r} has no actions; give a causal"
                " card some with card.actions=[none,left,...] and train them with method=causal_init"
            )
        if action is not None and action not in self.actions:
            raise unknown_name(f"action of card {self.instance.card.name!r}", str(action), self.actions)
        with self.engine.round_lock:
            self._check("act", open_only=True)
            request = replace(
                self._request,
                frames=self._frames(chunks),
                actions=None if action is None else (action,) * chunks,
            )
            self._act = self.engine.submit(request, self.instance, scope=scope, world=self._world)
            return self._act

    # -- between two acts

    def suspend(self) -> None:
        """Moves the world to host memory and frees its slab and its place in the budget, until :meth:`resume`. Idle
        sessions are moved there too, when others need the room, and come back with their next act."""
        with self.engine.round_lock:
            self._check("suspend")
            self.engine.forget(self._world)
            self._world.rest()
            self._state = "suspended"

    def resume(self) -> None:
        """Acts are taken again; the next one waits until the budget has room for the world, and goes on bit for bit."""
        with self.engine.round_lock:
            self._check("resume")
            self._state = "open"

    def fork(self) -> WorldModelSession:
        """Another session from here, in host memory until its first act. What either does the other does not see."""
        with self.engine.round_lock:
            self._check("fork")
            twin = self._twin()
            twin._world.fill(self._world.contents(), twin._slab)
            return twin

    def save(self) -> bytes:
        """The session as bytes, for :meth:`load`: tensors and plain values, no code. It stays as it is."""
        with self.engine.round_lock:
            self._check("save")
            data = {
                "format": FORMAT,
                "card": self.instance.card.digest,
                "settings": {name: getattr(self._request, name) for name in SETTINGS},
                "world": self._world.contents(),
            }
        stream = io.BytesIO()
        torch.save(data, stream)
        return stream.getvalue()

    @classmethod
    def load(cls, data: bytes, engine: Engine, instance: ModelInstance, *, priority: int = 0) -> WorldModelSession:
        """A saved session on an engine, in host memory until its first act. Runs no code of the bytes; raises
        ``UserError`` for bytes that are no session, or one of another card."""
        saved = _read(data)
        if saved["card"] != instance.card.digest:
            raise UserError(
                f"the session was saved on the card {saved['card'][:12]}, got {instance.card.digest[:12]} "
                f"({instance.card.name}): load the model that it ran on"
            )
        session = cls(engine, instance, priority=priority, **saved["settings"])
        session._world.fill(saved["world"], session._slab)
        return session

    def close(self) -> None:
        """Cancels an act that is under way and lets go of everything; again is no harm."""
        with self.engine.round_lock:
            if self._acting:
                assert self._act is not None
                self.engine.fail(self._act, Cancelled("the session was closed"))
            self.engine.forget(self._world)
            self._world.close()
            self._state = "closed"

    def __enter__(self) -> WorldModelSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    @property
    def _acting(self) -> bool:
        return self._world.busy

    def _check(self, what: str, *, open_only: bool = False) -> None:
        """Raises ``UserError`` where the session's state does not allow it."""
        if self._state == "closed":
            raise UserError(f"{what}: got a session that is closed; open another, or load a saved one")
        if self._world.lost:
            raise UserError(f"{what}: the session's world was lost in a fault that could not be undone; open another")
        if self._acting:
            raise UserError(
                f"{what}: got a session with an act under way, expected none; wait for its result or cancel it"
            )
        if open_only and self._state == "suspended":
            raise UserError(f"{what}: got a session that is suspended; call resume() first")

    def _frames(self, chunks: int) -> int:
        """Frames of a clip of so many chunks."""
        return (chunks * self._options.chunk - 1) * self.instance.card.geometry.temporal + 1

    def _slab(self) -> SlabSpec:
        resolved = resolve(self._request, self.instance.card)
        nodes = self.instance.needs(self._request.task, guided=False, pixels=resolved.pixels).nodes
        return world_slab(resolved, nodes, self.instance)[0]

    def _twin(self) -> WorldModelSession:
        settings: dict[str, Any] = {name: getattr(self._request, name) for name in SETTINGS}
        return type(self)(self.engine, self.instance, priority=self._request.priority, **settings)


def _read(data: bytes) -> Mapping[str, Any]:
    try:
        saved = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise UserError(f"got bytes that are no saved session: {type(error).__name__}") from None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise UserError(f"got bytes that are no session of format {FORMAT}; save it again by this release")
    return saved
