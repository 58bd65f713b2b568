"""Residency: which components are in memory while requests come and go, and on which pool.

Requests claim the weights that they compute with when they are admitted (``inference.admission``), so all that is
claimed fits together. What nobody claims stays where it is until its room is needed: then the component that was needed
longest ago goes to sleep first. Whoever runs a module outside the engine gives the engine no budget of weights.

The engine's thread owns it. Carries out what ``scheduling.placement`` decides and measures it for
``scheduling.transfer``; knows nothing of loops or policies.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Hashable
from weakref import WeakKeyDictionary

from inference.admission import Demand, Ledger, Weights
from inference.instance import ModelInstance
from inference.scheduling.placement import NoRoom, Piece, Placement, Pool, place
from inference.scheduling.transfer import ASLEEP, DISK, NOTHING, Bandwidths, Move, Transfer, moves_of
from inference.sleep import ModuleState, state_of


class Residency:
    """See the module's docstring.

    Args:
        ledger: its budget of ``weights_bytes`` bounds the engine's own pool, the first; without one nothing is counted.
        pools: the engine's own, then the others that its components may run on.
    """

    def __init__(self, ledger: Ledger, pools: tuple[Pool, ...], bandwidths: Bandwidths):
        self.ledger = ledger
        self.pools = pools
        self.bandwidths = bandwidths
        self._clock = itertools.count()
        self._needed: WeakKeyDictionary[ModuleState, tuple[int, str]] = WeakKeyDictionary()
        """When a module that the engine needed was needed last, and its pool."""

    @property
    def limit(self) -> int | None:
        return self.ledger.budget.weights_bytes

    @property
    def awake_bytes(self) -> int | None:
        """Weights in the engine's own pool, of those components that it has needed; None when nothing is counted."""
        if self.limit is None:
            return None
        known = list(self._needed.items())
        return sum(state.size for state, (_, pool) in known if not state.asleep and pool == self.pools[0].name)

    def claims(self, instance: ModelInstance, components: Collection[str]) -> Weights:
        """What a request that needs these components claims of the engine's own pool; nothing loads for it."""
        if self.limit is None:
            return ()
        own = [cid for cid in components if cid not in instance.elsewhere]
        return tuple({instance.resident(cid).key: instance.weights_bytes(cid) for cid in own}.items())

    def check(self, instance: ModelInstance, components: Collection[str]) -> None:
        """Raises ``AdmissionInfeasible`` when these components do not fit together, whatever else sleeps."""
        self.ledger.check(Demand(slots=0, weights=self.claims(instance, components)))

    def ahead(self, instance: ModelInstance, components: Collection[str]) -> Transfer:
        """What :meth:`bring` would move for these components, with predicted seconds."""
        if _here(instance, components):
            return NOTHING
        step, others = self._pieces(instance, components)
        try:
            placement = self._place(instance, step, others)
        except NoRoom:  # told when the step's turn comes
            return NOTHING
        return self.bandwidths.transfer(moves_of(placement, [*step, *others]))

    def bring(self, instance: ModelInstance, components: Collection[str], *, strict: bool = True) -> None:
        """Builds and wakes what is not there, after idle components went to sleep for it.

        Raises ``NoRoom`` when too few of them can; without ``strict`` it goes beyond the budget then, as a run does
        that passes by the line. Raises what building raises.
        """
        if not _here(instance, components):
            self._bring(instance, components, strict=strict)
        if self.limit is not None:
            now = next(self._clock)
            for cid in components:
                self._needed[state_of(instance.resident(cid).peek())] = (now, self._pool(instance, cid))

    def _bring(self, instance: ModelInstance, components: Collection[str], *, strict: bool) -> None:
        component = {instance.resident(cid).key: cid for cid in components}
        stay: set[Hashable] = set()
        while True:
            step, others = self._pieces(instance, components, stay)
            try:
                placement = self._place(instance, step, others)
            except NoRoom as error:
                if strict:
                    raise NoRoom(f"{', '.join(components)}: {error}") from None
                placement = _at_any_rate(step, others)
            moves = moves_of(placement, [*step, *others])
            left = {move.key for move in moves if move.target == ASLEEP and not self._sleep(move)}
            if not left or not strict:
                break
            stay |= left  # and what is left is placed again around them
        for move in moves:
            if move.target != ASLEEP:
                began = time.perf_counter()
                instance.build([component[move.key]])
                self.bandwidths.observe(move, time.perf_counter() - began)

    def _sleep(self, move: Move) -> bool:
        """Puts an idle module to sleep; False for one that cannot now."""
        state = next(state for state in list(self._needed) if state.key == move.key)
        began = time.perf_counter()
        asleep = state.try_sleep()
        if asleep:
            self.bandwidths.observe(move, time.perf_counter() - began)
        return asleep

    def _pieces(
        self, instance: ModelInstance, components: Collection[str], stay: Collection[Hashable] = ()
    ) -> tuple[list[Piece], list[Piece]]:
        """The components of a step, and all others that this engine has needed and counts."""
        step = {
            (resident := instance.resident(cid)).key: Piece(
                key=resident.key,
                size=instance.weights_bytes(cid),
                wish=instance.card.components[cid].placement,
                at=self._pool(instance, cid),
                here=resident.here,
                lies=ASLEEP if resident.built else DISK,
            )
            for cid in components
        }
        others = [
            Piece(
                key=state.key,
                size=state.size,
                at=pool,
                here=not state.asleep,
                pinned=self.ledger.claimed(state.key) or state.key in stay,
                needed=needed,
            )
            for state, (needed, pool) in list(self._needed.items())
        ]
        return list(step.values()), others

    def _pool(self, instance: ModelInstance, component: str) -> str:
        return instance.elsewhere.get(component, self.pools[0]).name

    def _place(self, instance: ModelInstance, step: list[Piece], others: list[Piece]) -> Placement:
        pools = {pool.name: pool for pool in (*self.pools, *instance.elsewhere.values())}
        return place(step, others, list(pools.values()))


def _here(instance: ModelInstance, components: Collection[str]) -> bool:
    """Asked twice before each step, and nothing else is in the common case."""
    return all(instance.resident(cid).here for cid in components)


def _at_any_rate(step: Collection[Piece], others: Collection[Piece]) -> Placement:
    """All that is idle goes, and the step comes though it may not fit."""
    go = tuple(piece.key for piece in others if piece.here and not piece.pinned)
    return Placement({p.key: str(p.at) for p in step}, tuple(p.key for p in step if not p.here), go)
