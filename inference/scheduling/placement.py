"""Placement: the pool that each component of a step runs on, and which weights come and go for it.

Pure data in, pure data out: knows pools and sizes; knows nothing of modules, tensors or devices that exist. A component
stays on the pool that it was placed on first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cards.errors import UserError

Wish = Literal["device", "cpu"]
"""``placement`` of a card's component."""


class NoRoom(UserError):
    """No pool has room for a component that a step needs."""


@dataclass(frozen=True)
class Pool:
    """Memory, and what computes in it."""

    name: str
    device: str
    """As torch names it."""
    serves: frozenset[Wish]
    limit: int | None = None
    """Bytes of weights; None is no bound."""


@dataclass(frozen=True)
class Piece:
    """A component, as far as its place goes."""

    key: Hashable
    size: int
    """Bytes of its weights."""
    wish: Wish = "device"
    at: str | None = None
    """Pool that it was placed on; None before its first use."""
    here: bool = False
    """Its weights are in that pool now."""
    lies: str = ""
    """Where they are otherwise."""
    pinned: bool = False
    """Must not go: requests in flight need it, or it cannot sleep."""
    needed: int = 0
    """When it was needed last; smaller is longer ago."""


@dataclass(frozen=True)
class Placement:
    """What a step needs before it can run."""

    homes: Mapping[Hashable, str]
    """Component of the step -> name of its pool."""
    come: tuple[Hashable, ...]
    """Components of the step whose weights are not there."""
    go: tuple[Hashable, ...]
    """Idle components that make room, in the order in which they go."""


def pools_of(device: str, limit: int | None = None) -> tuple[Pool, ...]:
    """The pools of a process whose engine runs on ``device``: that one, and host memory where it is another."""
    if device.split(":")[0] == "cpu":
        return (Pool(device, device, frozenset({"device", "cpu"}), limit),)
    return (Pool(device, device, frozenset({"device"}), limit), Pool("cpu", "cpu", frozenset({"cpu"})))


def serving(wish: Wish, pools: Sequence[Pool]) -> list[Pool]:
    """The pools that a component may be placed on; raises ``UserError`` when there is none."""
    found = [pool for pool in pools if wish in pool.serves]
    if not found:
        names = ", ".join(f"{pool.name} ({', '.join(sorted(pool.serves))})" for pool in pools)
        raise UserError(f"placement: got a component for {wish!r}, expected a pool that serves it; the pools: {names}")
    return found


def place(step: Sequence[Piece], others: Collection[Piece], pools: Sequence[Pool]) -> Placement:
    """Places the components of a step.

    One that has no pool yet goes where it fits with the most room left and nobody has to go, else where it fits once
    idle ones have gone; the first of equals. Idle ones go longest unneeded first, and no more than must.

    Args:
        step: the components that its calls name, each once.
        others: what else is placed; those of ``step`` among them are passed over.

    Raises :class:`NoRoom` with figures.
    """
    own = {piece.key for piece in step}
    held = {pool.name: [p for p in others if p.here and p.at == pool.name and p.key not in own] for pool in pools}
    used = {name: sum(piece.size for piece in pieces) for name, pieces in held.items()}
    homes: dict[Hashable, str] = {}
    come: list[Hashable] = []
    go: list[Hashable] = []
    for piece in step:  # what is there already takes its room first
        if piece.here and piece.at is not None:
            homes[piece.key] = piece.at
            used[piece.at] += piece.size
    for piece in step:
        if piece.key in homes:
            continue
        candidates = [pool for pool in serving(piece.wish, pools) if piece.at in (None, pool.name)]
        idle = {pool.name: sum(p.size for p in held[pool.name] if not p.pinned) for pool in candidates}
        room = {p.name: float("inf") if p.limit is None else p.limit - used[p.name] for p in candidates}
        fitting = [p for p in candidates if piece.size <= room[p.name]]
        made = [p for p in candidates if piece.size <= room[p.name] + idle[p.name]]
        if not made:
            figures = "; ".join(f"{p.name} holds {used[p.name]} of {p.limit}, {idle[p.name]} idle" for p in candidates)
            raise NoRoom(
                f"no room for a component of {piece.size} bytes of weights: {figures}; "
                "wait until what is in use can sleep, or raise the budget's weights_bytes"
            )
        chosen = max(fitting if fitting else made, key=lambda pool: room[pool.name])
        for other in sorted((p for p in held[chosen.name] if not p.pinned), key=lambda p: p.needed):
            if chosen.limit is None or used[chosen.name] + piece.size <= chosen.limit:
                break
            go.append(other.key)
            held[chosen.name].remove(other)
            used[chosen.name] -= other.size
        homes[piece.key] = chosen.name
        used[chosen.name] += piece.size
        come.append(piece.key)
    return Placement(homes, tuple(come), tuple(go))
