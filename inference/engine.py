"""The engine: runs the steps of all requests' loops under one scheduler and one budget.

It sees plans, never the maths; loops never see the engine. With ``batching="off"`` every call is evaluated by itself
and N requests interleaved step by step give what they give one after the other, bit for bit. With ``"shape"`` equal
calls of different requests share a forward. Training rollouts and the server use this same object.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from cards.needs import needed_components
from inference.admission import KINDS, AdmissionInfeasible, Budget, Ledger
from inference.artifact import Artifact
from inference.batching import Job
from inference.books import Books
from inference.cache.feature import FeatureCache
from inference.cache.manager import CacheManager
from inference.carrier import Carrier
from inference.estimate import demand_of, step_seconds
from inference.extend.chain import Chain
from inference.extend.interceptor import Interceptor
from inference.extend.observer import Observer
from inference.fair_lock import FairLock
from inference.handle import Cancelled, EngineFault, Handle
from inference.instance import ModelInstance
from inference.intake import Intake
from inference.live_world import LiveWorld
from inference.load import card_of
from inference.peak import step_peak_bytes
from inference.request import Request
from inference.residency import Residency
from inference.resolve import resolve
from inference.rounds import Rounds, encode_prompts
from inference.running import Running, StepListener
from inference.scheduler import Scheduler
from inference.scheduling.placement import pools_of
from inference.scheduling.policy import Entry
from inference.scheduling.transfer import Bandwidths
from inference.stream import CancelScope
from inference.text_kv import TextKV
from inference.timing import Span
from inference.workflow import Flowing, T, Workflow
from loops.loop import ModelCall, WorkPlan

__all__ = ["Cancelled", "Engine", "EngineFault", "Handle"]

log = logging.getLogger("fastvideo.engine")
BATCHING = ("off", "shape")


class Engine:
    """See the module's docstring.

    One thread calls :meth:`tick` (or a ``run``); any thread may submit, cancel, suspend and resume.

    Args:
        device: where components are loaded.
        batching: ``off`` | ``shape``.
        policy: ``fair`` shares device seconds by priority; ``fifo`` finishes the oldest first; ``deadline`` serves the
            earliest deadline that can still be met.
        budget: what may be in flight at once; what does not fit waits. No bounds by default. With ``weights_bytes``
            idle components go to sleep when others need their room.
        max_rows: rows of the largest merged forward.
        cache_bytes: bound of the feature cache.
        kv_bytes: size of the pool of keys and values of each language model; 0 gives every text a cache of its own
            that grows, and no two texts share a forward.
        share_prefixes: texts that begin alike share keys and values where batching is on. False where a result must not
            depend on the texts before it, as when a resumed run is to repeat an uninterrupted one.
        observers: see every forward and step, in this order; a step that one refuses fails its request alone.
        interceptors: change calls and results of the requests whose ``extensions`` name them.
        exact: True refuses whatever may change a result's bits: batching, and interceptors that are not exact.
        costs: folder where measured costs are kept from run to run, one file a card and device.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        batching: Literal["off", "shape"] = "off",
        policy: Literal["fair", "fifo", "deadline"] = "fair",
        budget: Budget | None = None,
        max_rows: int = 32,
        cache_bytes: int = 256 * 2**20,
        kv_bytes: int = 0,
        share_prefixes: bool = True,
        observers: Sequence[Observer] = (),
        interceptors: Sequence[Interceptor] = (),
        exact: bool = False,
        costs: Path | None = None,
    ):
        if batching not in BATCHING:
            raise unknown_name("batching", batching, BATCHING)
        if exact and batching != "off":
            raise UserError(
                f'got exact=True with batching={batching!r}, expected batching="off": merged forwards differ'
            )
        self.device = torch.device(device)
        self.batching = batching
        self.scheduler = Scheduler(policy)
        budget = Budget() if budget is None else budget
        if kv_bytes and budget.cache_bytes is None:
            budget = replace(budget, cache_bytes=kv_bytes)
        self.ledger = Ledger(budget)
        self.caches = CacheManager(cache_bytes)
        self.books = Books(self.device, costs)
        self.round_lock = FairLock()
        """Held while a round runs: who holds it sees no step under way."""
        self._chain = Chain(interceptors, exact=exact)
        self._intake = Intake(self.ledger, self.scheduler)
        self._pools = pools_of(str(self.device), budget.weights_bytes)
        self._bandwidths = Bandwidths()
        self._residency = Residency(self.ledger, self._pools, self._bandwidths)
        self._carrier = Carrier(self._bandwidths, self._pools[0].name)
        self._rounds = Rounds(
            self.caches.features,
            observers,
            self._chain,
            max_rows,
            self._finish,
            self._measured,
            self._prepare,
            self._carrier,
        )
        self.kv_bytes, self.share_prefixes = kv_bytes, share_prefixes
        self._texts = TextKV(self.caches, kv_bytes, share_prefixes=share_prefixes and batching == "shape")
        self._apart: dict[Handle, None] = {}
        """Requests that a run moves, past the line."""
        self._idle_worlds: dict[LiveWorld, None] = {}
        """Between two requests, holding bytes; in the order in which they became idle."""
        self._default: ModelInstance | None = None

    @property
    def features(self) -> FeatureCache:
        return self.caches.features

    def load(self, card: ModelCard | str | Path, *, tasks: Collection[str] = ()) -> ModelInstance:
        """Checks a card, or a folder that is an export or a plain diffusers folder; the first is the default model.

        What the ``tasks`` require is built now, every other component when a request first needs it. Raises
        ``AdmissionInfeasible`` when it does not fit the budget of weights.
        """
        found = card if isinstance(card, ModelCard) else card_of(card)
        if self._residency.limit is None:
            instance = ModelInstance.load(found, self.device, tasks=tasks, pools=self._pools)
        else:
            instance = ModelInstance.load(found, self.device, pools=self._pools)
            now = [cid for cid in needed_components(found, tasks) if cid in instance.residents]
            self._residency.check(instance, now)
            with self.round_lock:
                self._residency.bring(instance, now)
        if self._default is None:
            self._default = instance
        return instance

    def use(self, instance: ModelInstance) -> ModelInstance:
        """Makes an instance, such as a role of a training run, the default model."""
        self._default = instance
        return instance

    # -- submitting, from any thread

    def submit(
        self,
        request: Request,
        instance: ModelInstance | None = None,
        listener: StepListener | None = None,
        scope: CancelScope | None = None,
        world: LiveWorld | None = None,
    ) -> Handle:
        """Checks the request and takes it in; :meth:`tick` moves it. ``world``: what it goes on from, whose
        ``inference.session`` holds the ``round_lock``.

        Raises ``UserError`` for a request that is not valid, and ``AdmissionInfeasible`` for one that can never fit.
        """
        handle = self._open(request, instance, listener, scope, world)
        self._intake.put(handle)
        if world is not None:
            world.busy = True
            self._idle_worlds.pop(world, None)
        return handle

    def new_world(self) -> LiveWorld:
        """An empty world, whose slab is held among the engine's caches."""
        return LiveWorld(self.caches, self._idles)

    def _idles(self, world: LiveWorld) -> None:
        self._idle_worlds[world] = None

    def forget(self, world: LiveWorld) -> None:
        """The world holds nothing any more that others might need."""
        self._idle_worlds.pop(world, None)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until something was submitted, cancelled, suspended or resumed; False when ``timeout`` passed first."""
        return self._intake.arrived.wait(timeout)

    def wake(self) -> None:
        """Ends a :meth:`wait`."""
        self._intake.arrived.set()

    @property
    def counts(self) -> tuple[int, int]:
        """(requests in flight, requests that wait for admission)."""
        return len(self._intake.in_flight), self._intake.waiting

    # -- one request, or several, that only the caller moves

    def run(self, request: Request, instance: ModelInstance | None = None) -> Artifact:
        """One request to its end."""
        return self.run_serial([request], instance)[0]

    def run_serial(self, requests: Sequence[Request], instance: ModelInstance | None = None) -> list[Artifact]:
        """One request after the other, never batched: what interleaving is measured against."""
        results = []
        for request in requests:
            handle = self._open(request, instance, None)
            self._run_together([handle], "off")
            results.append(handle.result())
        return results

    def run_interleaved(
        self,
        requests: Sequence[Request],
        instance: ModelInstance | None = None,
        listener: StepListener | None = None,
    ) -> list[Artifact]:
        """All requests together, one step each a round, batched as the engine is set."""
        handles = [self._open(request, instance, listener) for request in requests]
        self._run_together(handles, self.batching)
        return [handle.result() for handle in handles]

    def run_workflows(
        self, workflows: Sequence[Workflow[T]], listener: StepListener | None = None, *, serial: bool = False
    ) -> list[T]:
        """Results of workflows, see ``inference.workflow``: all together, one step of each request a round, batched as
        the engine is set; ``serial``: one after the other, as :meth:`run_serial`. Raises what the first of those that
        failed did, when all are over."""
        if serial:
            flowing = [self._flow([workflow], listener, "off")[0] for workflow in workflows]
        else:
            flowing = self._flow(workflows, listener, self.batching)
        return [flow.result() for flow in flowing]

    def _flow(self, workflows: Sequence[Workflow[T]], listener: StepListener | None, batching: str) -> list[Flowing[T]]:
        flowing = [Flowing(w, lambda ask: self._open(ask.request, ask.instance, listener)) for w in workflows]
        self._run_pending(lambda: [handle for flow in flowing for handle in flow.handles()], batching)
        return flowing

    def encode(self, prompts: Sequence[str], instance: ModelInstance) -> list[Tensor]:
        """Text features (1, L, D) of prompts, as a request's own encode step gives them, through the same cache."""
        with self.round_lock:
            return encode_prompts(self._rounds, prompts, instance, self.batching)

    def _run_together(self, handles: Sequence[Handle], batching: str) -> None:
        """These requests alone, a step each a round, past the line and the budget."""
        self._run_pending(lambda: [handle for handle in handles if not handle.done], batching)

    def _run_pending(self, pending_now: Callable[[], list[Handle]], batching: str) -> None:
        """The requests that ``pending_now`` gives, until it gives none: it is asked before every round.

        Steps whose results are kept go first, so that which steps meet in a forward, and with them the last bits of a
        batched run, do not depend on what the cache holds: a resumed training run repeats the uninterrupted one.
        """
        begun: dict[Handle, None] = {}
        try:
            while pending := pending_now():
                for handle in pending:
                    if handle not in begun:
                        handle._state = "running"
                        self._apart[handle] = begun[handle] = None
                with self.round_lock:
                    ready = [handle for handle in pending if self._rounds.plan(handle)]
                    kept = [handle for handle in ready if _is_kept(handle)]
                    self._rounds.step(kept if kept else ready, batching)
        except BaseException as fault:
            self._lose([handle for handle in begun if not handle.done], fault)
            raise
        finally:
            for handle in begun:
                self._apart.pop(handle, None)

    # -- the engine's thread

    def tick(self) -> bool:
        """Admits whoever may go, then one round over the requests in flight by the engine's policy.

        False when there was nothing to do. A fault that is no request's own fails everything in flight with
        ``EngineFault``, empties the caches, and the engine goes on with those that wait.
        """
        with self.round_lock:
            self._settle()
            while self.ledger.short_of_bytes and not self._intake.held and self._rest_a_world():
                self._settle()
            if not self._intake.in_flight:
                return False
            try:
                self._round()
            except Exception as fault:
                log.exception("a round failed; everything in flight is lost")
                self._lose(list(self._intake.in_flight), fault)
                self.caches.features.clear()
            return True

    def _settle(self) -> None:
        for handle, failure in self._intake.settle():
            self._finish(handle, failure)

    def _rest_a_world(self) -> bool:
        """Frees the bytes of the world that is idle longest, else of one whose request waits itself: it then asks for
        them again, or whoever waits for them would wait for ever. False when there is none."""
        if self._idle_worlds:
            world = next(iter(self._idle_worlds))
            self.forget(world)
            world.rest()
            return True
        for handle in self._intake.in_line:
            waiting = handle._running.world
            if waiting is not None and waiting.held is not None:
                waiting.rest()
                handle.demand = waiting.whole
                self._intake.again(handle)
                return True
        return False

    def _round(self) -> None:
        ready: dict[Hashable, Handle] = {h.id: h for h in list(self._intake.in_flight) if self._rounds.plan(h)}
        if not ready:
            return
        entries = [self._entry(handle) for handle in ready.values()]
        chosen, tickets = [], []
        try:
            for entry in self.scheduler.select(entries, time.monotonic()):
                handle = ready[entry.id]
                try:
                    ticket = self.ledger.step(self._peak_bytes(handle))
                except AdmissionInfeasible as failure:
                    self._finish(handle, failure)
                    continue
                if ticket is not None:  # else its turn comes when the steps of this round are over
                    tickets.append(ticket)
                    chosen.append(entry)
            self._rounds.step([ready[entry.id] for entry in chosen], self.batching)
        finally:
            for ticket in tickets:
                ticket.refund()
        for entry in chosen:
            self.scheduler.served(entry)
            handle = ready[entry.id]
            handle._spent += handle._step_seconds
            if handle._ticket is not None:
                handle._ticket.release(seconds=handle._step_seconds)

    def _entry(self, handle: Handle) -> Entry:
        running = handle._running
        plan, instance, request = running.plan(), running.instance, running.resolved.request
        assert plan is not None
        seconds = max(step_seconds(plan, instance.card, self.books.of(instance.card)), 1e-9)
        handle._step_seconds = seconds
        seconds += self._ahead(plan, instance)
        group = None
        if self.batching == "shape" and plan.calls:
            resident = instance.residents.get(plan.calls[0].component)
            group = (None if resident is None else resident.uid, request.profile, plan.calls[0].merge_key())
        return Entry(
            id=handle.id,
            arrival=handle.arrival,
            step_seconds=seconds,
            remaining_seconds=max(seconds, handle.demand.seconds - handle._spent),
            priority=request.priority,
            deadline=None if request.deadline is None else handle.arrival + request.deadline,
            group=group,
        )

    def _peak_bytes(self, handle: Handle) -> int:
        plan = handle._running.plan()
        assert plan is not None
        return step_peak_bytes(plan, handle._running.instance)

    def _measured(self, job: Job, call: ModelCall, span: Span) -> None:
        self.books.observe(job.instance.card, call, span.seconds)

    def _ahead(self, plan: WorkPlan, instance: ModelInstance) -> float:
        """Predicted seconds of the transfers that a step needs: its request pays for them as for its forwards."""
        seconds = self._residency.ahead(instance, [call.component for call in plan.calls]).seconds
        if instance.elsewhere:
            seconds += self._carrier.ahead(instance, plan.calls).seconds
        return seconds

    def _prepare(self, handle: Handle, plan: WorkPlan) -> None:
        components = [call.component for call in plan.calls]
        self._residency.bring(handle._running.instance, components, strict=handle._ticket is not None)

    # -- requests begin and end

    def _open(
        self,
        request: Request,
        instance: ModelInstance | None,
        listener: StepListener | None,
        scope: CancelScope | None = None,
        world: LiveWorld | None = None,
    ) -> Handle:
        """A checked request that only its caller moves."""
        target = instance if instance is not None else self._default
        if target is None:
            raise UserError("the engine has no model: call engine.load(card or folder) first")
        resolved = resolve(request, target.card)
        kv = self._texts.source(target) if world is None else world.source
        running = Running(resolved, target, listener, kv, world)
        demand = demand_of(
            resolved,
            running.nodes,
            target,
            self.books.of(target.card),
            cache_bytes=self._texts.bytes_of(resolved, running.nodes, target),
            weights=self._residency.claims(target, running.components),
        )
        if world is not None:
            demand = world.demand(demand, resolved, running.nodes, target)
        settled = self._chain.settle(request.extensions)
        return Handle(running, demand, scope, self._intake.change, settled)

    def _finish(self, handle: Handle, failure: BaseException | None) -> None:
        kv, world = handle._running.kv, handle._running.world
        if world is not None and handle._ticket is not None:
            handle._ticket = world.keep(handle._ticket)
        handle._finish(failure)
        if world is None:
            self._texts.close(kv)
        self._intake.drop(handle)
        for observer in self._rounds.observers:
            observer.on_finish(handle.id, handle._running.failure)

    def _lose(self, handles: Sequence[Handle], fault: BaseException) -> None:
        for handle in [handle for handle in handles if not handle.done]:
            failure = EngineFault(f"the engine failed while the request was in flight: {fault}")
            failure.__cause__ = fault
            self._finish(handle, failure)

    # -- between rounds

    def hold(self) -> None:
        """Nobody is admitted until :meth:`release`; requests in flight go on."""
        self._intake.held = True

    def release(self) -> None:
        """Inverse of :meth:`hold`."""
        self._intake.held = False
        self._intake.arrived.set()

    def in_flight(self, instance: ModelInstance | None = None) -> list[Handle]:
        """Requests that have begun and are not over: those that a ``run`` moves, suspended ones, and resumed ones that
        wait again, too; with ``instance``, those that share a module."""
        begun = {**self._apart, **self._intake.in_flight, **self._intake.resting}
        again = [h for h in self._intake.everybody() if h not in begun and h._running.resting]
        handles = [h for h in (*begun, *again) if not h.done]
        if instance is None:
            return handles
        uids = {resident.uid for resident in instance.residents.values()}
        return [h for h in handles if uids & {resident.uid for resident in h._running.instance.residents.values()}]

    def fail(self, handle: Handle, failure: Exception) -> None:
        """Ends a request from outside, between two rounds; one that is over stays as it is."""
        with self.round_lock:
            if not handle.done:
                self._finish(handle, failure)

    def figures(self) -> dict[str, Any]:
        """What the engine holds and costs, ready for JSON: counts, the ledger, the caches, the routing figures."""
        with self.round_lock:
            running, waiting = self.counts
            return {
                "running": running,
                "waiting": waiting,
                "suspended": len(self._intake.resting),
                "tickets": self.ledger.tickets,
                "in_use": {kind: getattr(self.ledger.used, kind) for kind in (*KINDS, "weights_bytes")},
                "awake_bytes": self._residency.awake_bytes,
                "caches": vars(self.caches.stats()),
                "costs": self.books.figures(),
                "transfers": self._bandwidths.figures(),
            }

    def close(self) -> None:
        """Keeps what was measured, where the engine was given a folder for it."""
        self.books.save()


def _is_kept(handle: Handle) -> bool:
    """Whether the result of the request's next step goes into the feature cache."""
    plan = handle._running.plan()
    return plan is not None and plan.cache_key is not None
