"""The engine: runs the steps of all requests' loops, one request after the other or interleaved.

It sees plans, never the maths; loops never see the engine. With ``batching="off"`` every call is evaluated by itself
and N requests interleaved step by step give what they give one after the other, bit for bit. With ``"shape"`` equal
calls of different requests share a forward. Training rollouts and the server use this same object.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from inference.artifact import Artifact
from inference.batching import Job, Outcome, evaluate_merged, evaluate_solo
from inference.cache.feature import FeatureCache
from inference.cache.keys import FeatureKey, feature_key
from inference.extend.observer import Forward, Observer, Step
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request, resolve
from inference.running import Running, StepListener
from inference.stream import CancelScope, Event, EventStream
from loops.loop import LoopContext, Profile, StepResult, WorkPlan
from loops.registry import component_loop

BATCHING = ("off", "shape")
POLICIES = ("fair", "fifo")
_NUMBERS = itertools.count(1)


class Cancelled(UserError):
    """The request was cancelled at a step boundary."""


class Handle:
    """A submitted request: its progress, its events, and its result once complete."""

    def __init__(self, running: Running, scope: CancelScope | None = None):
        self.id = f"request-{next(_NUMBERS)}"
        self._running = running
        self._scope = CancelScope(scope)
        self._done = threading.Event()
        self._artifact: Artifact | None = None
        self._stream = EventStream()
        self._stream.put("queued", "", *self.progress)

    @property
    def seed(self) -> int:
        return self._running.resolved.params.seed

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """(steps done, steps in all)."""
        return self._running.steps_done, self._running.steps_total

    def cancel(self) -> None:
        """Takes effect before the request's next step."""
        self._scope.cancel()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """The request's events in order, from the first to its end; see :meth:`EventStream.read`."""
        return self._stream.read(timeout)

    def result(self, timeout: float | None = None) -> Artifact:
        """Waits up to ``timeout`` seconds; raises what the request failed with."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request is at step {self.progress[0]} of {self.progress[1]}")
        if self._running.failure is not None:
            raise self._running.failure
        assert self._artifact is not None
        return self._artifact

    def _finish(self, failure: BaseException | None) -> None:
        try:
            if failure is None:
                self._artifact = self._running.artifact()
        except Exception as error:
            failure = error
        self._running.failure = failure
        if failure is None:
            self._stream.put("completed", "", *self.progress)
        else:
            self._stream.put("cancelled" if isinstance(failure, Cancelled) else "failed", str(failure), *self.progress)
        self._done.set()


class Engine:
    """See the module's docstring.

    Args:
        device: where components are loaded.
        batching: ``off`` | ``shape``.
        policy: ``fair`` gives every request in flight one step a round; ``fifo`` finishes the oldest first.
        max_rows: rows of the largest merged forward.
        cache_bytes: bound of the feature cache.
        observers: see every forward and step, in this order; a step that one refuses fails its request alone.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        batching: Literal["off", "shape"] = "off",
        policy: Literal["fair", "fifo"] = "fair",
        max_rows: int = 32,
        cache_bytes: int = 256 * 2**20,
        observers: Sequence[Observer] = (),
    ):
        if batching not in BATCHING:
            raise unknown_name("batching", batching, BATCHING)
        if policy not in POLICIES:
            raise unknown_name("policy", policy, POLICIES)
        self.device = torch.device(device)
        self.batching = batching
        self.policy = policy
        self.max_rows = max_rows
        self.features = FeatureCache(cache_bytes)
        self.observers = tuple(observers)
        self._default: ModelInstance | None = None
        self._in_flight: list[Handle] = []
        self._lock = threading.Lock()

    def load(self, card: ModelCard | str | Path) -> ModelInstance:
        """Loads a card, or a folder that is an export or a plain diffusers folder; the first is the default model."""
        instance = ModelInstance.load(card if isinstance(card, ModelCard) else card_of(card), self.device)
        if self._default is None:
            self._default = instance
        return instance

    def use(self, instance: ModelInstance) -> ModelInstance:
        """Makes an instance, such as a role of a training run, the default model."""
        self._default = instance
        return instance

    # -- running requests

    def submit(
        self,
        request: Request,
        instance: ModelInstance | None = None,
        listener: StepListener | None = None,
        scope: CancelScope | None = None,
    ) -> Handle:
        """Checks the request and takes it in; :meth:`tick` moves it."""
        handle = self._open(request, instance, listener, scope)
        with self._lock:
            self._in_flight.append(handle)
        return handle

    def _open(
        self,
        request: Request,
        instance: ModelInstance | None,
        listener: StepListener | None,
        scope: CancelScope | None = None,
    ) -> Handle:
        """A checked request that only its caller moves."""
        target = instance if instance is not None else self._default
        if target is None:
            raise UserError("the engine has no model: call engine.load(card or folder) first")
        return Handle(Running(resolve(request, target.card), target, listener), scope)

    def run(self, request: Request, instance: ModelInstance | None = None) -> Artifact:
        """One request to its end."""
        return self.run_serial([request], instance)[0]

    def run_serial(self, requests: Sequence[Request], instance: ModelInstance | None = None) -> list[Artifact]:
        """One request after the other, never batched: what interleaving is measured against."""
        results = []
        for request in requests:
            handle = self._open(request, instance, None)
            while not handle.done:
                self._step([handle], "off")
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
        while pending := [handle for handle in handles if not handle.done]:
            self._step(pending, self.batching)
        return [handle.result() for handle in handles]

    def encode(self, prompts: Sequence[str], instance: ModelInstance) -> list[Tensor]:
        """Text features (1, L, D) of prompts, as a request's own encode step gives them, through the same cache."""
        program = next(iter(instance.card.programs.values()))
        node = next(node for node in program.nodes if node.op == "encode" and "prompt" in node.reads)
        loop = component_loop(node)
        features: list[Tensor | None] = []
        missing: list[tuple[int, FeatureKey, Job]] = []
        for prompt in prompts:
            ctx = LoopContext(spec=None, slots={"prompt": prompt})
            plan = loop.next(loop.init(None, instance, ctx))
            assert isinstance(plan, WorkPlan) and plan.cache_key is not None
            key = feature_key(instance, plan.cache_key)
            found = self.features.get(key)
            if found is None:
                missing.append((len(features), key, Job(instance, plan.calls[0], Profile.SERVE)))
            features.append(found)
        jobs = [job for _, _, job in missing]
        outcomes = self._evaluate(jobs, self.batching)
        for (index, key, _), output in zip(missing, _outputs(outcomes), strict=True):
            self.features.put(key, output)
            features[index] = output
        return [feature for feature in features if feature is not None]

    def tick(self) -> bool:
        """One round over the requests in flight by the engine's policy; False when there was nothing to do."""
        with self._lock:
            pending = [handle for handle in self._in_flight if not handle.done]
        if not pending:
            return False
        self._step(pending if self.policy == "fair" else pending[:1], self.batching)
        return True

    # -- one round

    def _step(self, handles: Sequence[Handle], batching: str) -> None:
        """One step of each handle; a request that fails takes no other with it unless they shared its forward."""
        planned = [handle for handle in handles if self._plan(handle)]
        jobs: list[Job] = []
        owners: list[tuple[Handle, int, int]] = []
        leaders: dict[FeatureKey, int] = {}
        followers: list[tuple[Handle, int]] = []
        keys: dict[int, FeatureKey] = {}
        for handle in planned:
            running = handle._running
            plan = running.plan()
            assert plan is not None
            if plan.cache_key is not None:
                key = feature_key(running.instance, plan.cache_key)
                if key in leaders:
                    followers.append((handle, leaders[key]))
                    continue
                leaders[key] = len(owners)
                keys[len(owners)] = key
            first = len(jobs)
            jobs += [Job(running.instance, call, running.resolved.request.profile) for call in plan.calls]
            owners.append((handle, first, len(jobs)))
        outcomes = self._evaluate(jobs, batching)
        for index, (handle, first, last) in enumerate(owners):
            advanced = self._advance(handle, outcomes[first:last])
            if advanced and index in keys:
                self._keep(keys[index], outcomes[first])
        for handle, leader in followers:
            first = owners[leader][1]
            self._advance(handle, outcomes[first : first + 1])

    def _evaluate(self, jobs: Sequence[Job], batching: str) -> list[Outcome]:
        listener = self._tell if self.observers else None
        if batching == "shape":
            return evaluate_merged(jobs, self.max_rows, listener)
        return evaluate_solo(jobs, listener)

    def _tell(self, forward: Forward) -> None:
        for observer in self.observers:
            observer.on_forward(forward)

    def _keep(self, key: FeatureKey, outcome: Outcome) -> None:
        """Caches a result that outlives its step: not a tensor that holds a graph."""
        if isinstance(outcome, Tensor) and not outcome.requires_grad:
            self.features.put(key, outcome)

    def _plan(self, handle: Handle) -> bool:
        """True when the handle has a step to evaluate; serves cached steps, completes and fails it as it goes."""
        if handle._scope.cancelled:
            self._finish(handle, Cancelled("the request was cancelled"))
            return False
        running = handle._running
        try:
            while (plan := running.plan()) is not None:
                if plan.cache_key is None:
                    return True
                cached: Tensor | None = self.features.get(feature_key(running.instance, plan.cache_key))
                if cached is None:
                    return True
                self._take(handle, (cached,), cached=True)
        except Exception as failure:
            self._finish(handle, failure)
            return False
        self._finish(handle, None)
        return False

    def _advance(self, handle: Handle, outcomes: Sequence[Outcome]) -> bool:
        """The loop takes the results of its step; False when the request failed over it."""
        try:
            self._take(handle, _outputs(outcomes), cached=False)
            if handle._running.plan() is None:
                self._finish(handle, None)
        except Exception as failure:
            self._finish(handle, failure)
            return False
        return True

    def _take(self, handle: Handle, outputs: tuple[Tensor, ...], *, cached: bool) -> None:
        running = handle._running
        plan = running.plan()
        assert plan is not None
        step = Step(handle.id, running.resolved, plan, running.steps_done, outputs, cached)
        for observer in self.observers:
            observer.on_step(step)
        running.advance(StepResult(outputs))
        handle._stream.put("step", plan.label, *handle.progress)

    def _finish(self, handle: Handle, failure: BaseException | None) -> None:
        handle._finish(failure)
        for observer in self.observers:
            observer.on_finish(handle.id, handle._running.failure)
        with self._lock:
            if handle in self._in_flight:
                self._in_flight.remove(handle)


def _outputs(outcomes: Sequence[Outcome]) -> tuple[Tensor, ...]:
    """The tensors; raises the first failure among them."""
    tensors = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        tensors.append(outcome)
    return tuple(tensors)
