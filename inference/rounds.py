"""One round: a step of each of some requests, their equal calls merged or not, and what becomes of the results.

Knows handles, the feature cache and observers; knows nothing of admission, policies or budgets. A request that fails
takes no other with it unless they shared its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from inference.batching import Job, Listener, Outcome, evaluate_merged, evaluate_solo
from inference.cache.feature import FeatureCache
from inference.cache.keys import FeatureKey, feature_key
from inference.carrier import Carrier
from inference.extend.chain import Chain
from inference.extend.interceptor import Place
from inference.extend.observer import Forward, Observer, Step
from inference.handle import Cancelled, Handle
from inference.instance import ModelInstance
from inference.timing import Span
from loops.loop import ModelCall, StepResult, WorkPlan

Finish = Callable[[Handle, BaseException | None], None]
"""Told of every request that is over, with what it failed with."""
Prepare = Callable[[Handle, WorkPlan], None]
"""Brings what a step needs to where it runs, before the clock of a forward does; a failure is the request's own."""


class Rounds:
    """See the module's docstring.

    Args:
        chain: interceptors of the requests that ask for them.
        finish: called once for a request that completed or failed.
        measured: hears of every forward with its call and its time.
        prepare: called before every step that is evaluated.
        carrier: moves inputs and outputs of components that run elsewhere.
    """

    def __init__(
        self,
        features: FeatureCache,
        observers: Sequence[Observer],
        chain: Chain,
        max_rows: int,
        finish: Finish,
        measured: Listener,
        prepare: Prepare,
        carrier: Carrier,
    ):
        self.features = features
        self.observers = tuple(observers)
        self.chain = chain
        self.max_rows = max_rows
        self._finish = finish
        self._measured = measured
        self._prepare = prepare
        self._carrier = carrier
        self._spans: list[tuple[Job, ModelCall, Span]] = []

    def plan(self, handle: Handle) -> bool:
        """True when the handle has a step to evaluate; serves cached steps, completes and fails it as it goes."""
        if handle._scope.cancelled:
            self._finish(handle, Cancelled("the request was cancelled"))
            return False
        running = handle._running
        try:
            while (plan := running.plan()) is not None:
                cached: Tensor | None = None
                if plan.cache_key is not None:
                    cached = self.features.get(_key(handle, plan.cache_key))
                if cached is None:
                    return True
                self._take(handle, (cached,), cached=True)
        except Exception as failure:
            self._finish(handle, failure)
            return False
        self._finish(handle, None)
        return False

    def step(self, handles: Sequence[Handle], batching: str) -> None:
        """One step of each handle that :meth:`plan` said has one. Steps of equal cache keys are evaluated once."""
        jobs: list[Job] = []
        owners: list[tuple[Handle, int, int]] = []
        leaders: dict[FeatureKey, int] = {}
        followers: list[tuple[Handle, int]] = []
        keys: dict[int, FeatureKey] = {}
        refused: dict[int, Exception] = {}
        for handle in handles:
            running = handle._running
            plan = running.plan()
            assert plan is not None
            if plan.cache_key is not None:
                key = _key(handle, plan.cache_key)
                if key in leaders:
                    followers.append((handle, leaders[key]))
                    continue
                leaders[key] = len(owners)
                keys[len(owners)] = key
            first = len(jobs)
            try:
                self._prepare(handle, plan)
                calls = [self.chain.before(call, _place(handle, call), handle._settled) for call in plan.calls]
            except Exception as failure:
                refused[len(owners)] = failure
                calls = []
            profile, kept = running.resolved.request.profile, plan.cache_key is not None
            jobs += [Job(running.instance, call, profile, alone=kept) for call in calls]
            owners.append((handle, first, len(jobs)))
        outcomes = self.evaluate(jobs, batching)
        results: list[list[Outcome]] = []
        for index, (handle, first, last) in enumerate(owners):
            pairs = zip(jobs[first:last], outcomes[first:last], strict=True)
            own = [self._after(handle, job.call, outcome) for job, outcome in pairs]
            results.append([refused[index]] if index in refused else own)
            advanced = self._advance(handle, results[index])
            if advanced and index in keys:
                self.keep(keys[index], results[index][0])
        for handle, leader in followers:
            self._advance(handle, results[leader])

    def _after(self, handle: Handle, call: ModelCall, outcome: Outcome) -> Outcome:
        """What the interceptors make of a result; a failure of theirs is the outcome."""
        if not handle._settled or isinstance(outcome, Exception):
            return outcome
        try:
            return self.chain.after(call, outcome, _place(handle, call), handle._settled)
        except Exception as failure:
            return failure

    def evaluate(self, jobs: Sequence[Job], batching: str) -> list[Outcome]:
        """An outcome a job; every forward is measured and shown to the observers."""
        self._spans = []
        note = self._note
        jobs = [self._carrier.there(job) if job.instance.elsewhere else job for job in jobs]
        outcomes = evaluate_merged(jobs, self.max_rows, note) if batching == "shape" else evaluate_solo(jobs, note)
        for job, call, span in self._spans:  # read after the last forward was given to the device
            self._measured(job, call, span)
            self._tell(call, span)
        self._spans = []
        pairs = zip(jobs, outcomes, strict=True)
        return [self._carrier.back(job, out) if job.instance.elsewhere else out for job, out in pairs]

    def _note(self, job: Job, call: ModelCall, span: Span) -> None:
        self._spans.append((job, call, span))

    def _tell(self, call: ModelCall, span: Span) -> None:
        if not self.observers:
            return
        shapes = tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(call.tensors.items()))
        forward = Forward(call.component, call.method, shapes, call.rows, span.seconds)
        for observer in self.observers:
            observer.on_forward(forward)

    def keep(self, key: FeatureKey, outcome: Outcome) -> None:
        """Caches a result that outlives its step: not a tensor that holds a graph."""
        if isinstance(outcome, Tensor) and not outcome.requires_grad:
            self.features.put(key, outcome)

    def _advance(self, handle: Handle, outcomes: Sequence[Outcome]) -> bool:
        """The loop takes the results of its step; False when the request failed over it."""
        try:
            self._take(handle, tensors_of(outcomes), cached=False)
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
        if running.frames is not None:
            handle._stream.put("frames", plan.label, *handle.progress, running.frames)


def _key(handle: Handle, cache_key: tuple[Any, ...]) -> FeatureKey:
    """Of a step's result; what interceptors made of it is another result."""
    component, operation, inputs = cache_key
    if handle._settled:
        inputs = (inputs, Chain.key(handle._settled))
    return feature_key(handle._running.instance, (component, operation, inputs))


def _place(handle: Handle, call: ModelCall) -> Place:
    running = handle._running
    return Place(running.instance.card.components[call.component].kind, running.loop_step)


def tensors_of(outcomes: Sequence[Outcome]) -> tuple[Tensor, ...]:
    """The tensors; raises the first failure among them."""
    tensors = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        tensors.append(outcome)
    return tuple(tensors)


def encode_prompts(rounds: Rounds, prompts: Sequence[str], instance: ModelInstance, batching: str) -> list[Tensor]:
    """Text features (1, L, D) of prompts, as a request's own encode step gives them, through the same cache."""
    from loops.loop import LoopContext, Profile, WorkPlan
    from loops.registry import component_loop

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
        found: Tensor | None = rounds.features.get(key)
        if found is None:
            missing.append((len(features), key, Job(instance, plan.calls[0], Profile.SERVE, alone=True)))
        features.append(found)
    outcomes = rounds.evaluate([job for _, _, job in missing], batching)
    for (index, key, _), output in zip(missing, tensors_of(outcomes), strict=True):
        rounds.keep(key, output)
        features[index] = output
    return [feature for feature in features if feature is not None]
