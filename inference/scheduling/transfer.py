"""Transfer: what must move before a step can run where it is placed, and how long that will take.

Weights come from disk or from where they sleep, and idle ones go to sleep for them; the inputs and outputs of a
component that runs on another pool than its request go there and back. Seconds are predicted from bytes and from how
fast earlier moves between the same two places were, in the currency of every other step. Moves nothing itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from inference.scheduling.placement import Piece, Placement
from loops.loop import WorkUnit

DISK = "disk"
"""Where the weights of a component are that was never built."""
ASLEEP = "asleep"
"""Where the weights of a sleeping component are, see ``inference.sleep``."""
PRIOR_BYTES_PER_SECOND = 1e9
"""Until a move between two places was measured."""
KEPT = 0.8
"""What an earlier move counts for beside the next one."""


@dataclass(frozen=True)
class Move:
    """Bytes on their way."""

    key: Hashable
    """Component whose weights, inputs or outputs they are."""
    size: int
    """Bytes."""
    source: str
    target: str
    """Names of pools, ``DISK`` or ``ASLEEP``."""


@dataclass(frozen=True)
class Transfer:
    """The moves of one step, as a unit of work."""

    moves: tuple[Move, ...]
    seconds: float
    """Predicted."""
    unit: WorkUnit = WorkUnit.TRANSFER

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(move.size for move in self.moves)


NOTHING = Transfer((), 0.0)


def moves_of(placement: Placement, pieces: Iterable[Piece]) -> tuple[Move, ...]:
    """The weights that go for a placement, then those that come; ``pieces`` are what it was made of."""
    known = {piece.key: piece for piece in pieces}
    go = [Move(key, known[key].size, str(known[key].at), ASLEEP) for key in placement.go]
    come = [Move(key, known[key].size, known[key].lies, placement.homes[key]) for key in placement.come]
    return (*go, *come)


class Bandwidths:
    """Bytes a second between two places, each way for itself, as measured; recent and large moves count more."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], tuple[float, float]] = {}
        """(source, target) -> (bytes, seconds)."""

    def observe(self, move: Move, seconds: float) -> None:
        """Takes the measured seconds of a move."""
        if move.size == 0 or seconds <= 0:
            return
        size, spent = self._totals.get((move.source, move.target), (0.0, 0.0))
        self._totals[move.source, move.target] = (KEPT * size + move.size, KEPT * spent + seconds)

    def rate(self, source: str, target: str) -> float:
        """Bytes a second."""
        size, seconds = self._totals.get((source, target), (PRIOR_BYTES_PER_SECOND, 1.0))
        return size / seconds

    def transfer(self, moves: tuple[Move, ...]) -> Transfer:
        """The moves as work, one after the other."""
        return Transfer(moves, sum(move.size / self.rate(move.source, move.target) for move in moves))

    def figures(self) -> list[dict[str, Any]]:
        """What was measured, ready for JSON."""
        return [{"source": a, "target": b, "bytes_per_second": self.rate(a, b)} for a, b in self._totals]
