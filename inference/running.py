"""A request in flight: its nodes, the slots that they filled, the loop that it is in.

One object a request; nothing here knows of other requests or of scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cards.needs import request_needs
from inference.artifact import Artifact, Provenance, to_uint8
from inference.instance import ModelInstance
from inference.live_world import LiveWorld
from inference.request import ResolvedRequest
from inference.stream import Frames
from loops.ar_decode import Completion, words_of
from loops.component import tensors_digest
from loops.forecast import forecast
from loops.loop import BehaviourRecord, Done, Loop, LoopContext, LoopState, StepResult, TokenBehaviour, WorkPlan
from loops.registry import component_loop, loop_of_kind

StepListener = Callable[[str, int, int], None]
"""(label, steps done, steps in all) after every step."""


@dataclass(frozen=True)
class _Rest:
    """A request between :meth:`Running.suspend` and :meth:`Running.resume`."""

    state: bytes | None
    plugins: dict[tuple[str, str], Any]
    shared: Mapping[str, Any]
    slots: dict[str, Any]


def _moved(slots: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in slots.items()}


class Running:
    """Walks one request through its program: ``plan`` says what to evaluate next, ``advance`` takes the results."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        instance: ModelInstance,
        listener: StepListener | None = None,
        kv: Any = None,
        world: LiveWorld | None = None,
    ):
        """``kv`` (as :class:`LoopContext` has it) opens this request's KV, which its owner frees when the request ends;
        None: it goes with us. ``world``: what the request goes on from, and leaves changed if it completes."""
        self.resolved = resolved
        self.kv = kv
        self.world = world
        self.instance = instance
        self.listener = listener
        self.started = time.monotonic()
        task, guided, pixels = resolved.request.task, resolved.guided, resolved.pixels
        known = {} if world is None else _moved(world.slots, instance.device)
        needs = request_needs(
            instance.card, task, guided=guided, pixels=pixels, refined=resolved.refined, written=known
        )
        self.nodes, self.components = needs.nodes, needs.components
        self.cursor = 0
        self.slots: dict[str, Any] = {
            "prompt": resolved.prompt,
            "negative_prompt": resolved.negative_prompt,
            **({} if resolved.request.inputs is None else resolved.request.inputs),
            **known,
        }
        self.steps_done = 0
        loops = instance.card.loops
        self.steps_total = sum(
            1
            if node.loop is None
            else forecast(loops[node.loop], resolved.params_of(node.id), instance.card, pixels=pixels).steps
            for node in self.nodes
        )
        self.versions = instance.versions()
        self.behaviour: BehaviourRecord | None = None
        self.tokens: dict[str, TokenBehaviour] = {}
        self.completions: dict[str, Completion] = {}
        self.frames: Frames | None = None
        """What the last step added to the clip, where it did."""
        self.failure: BaseException | None = None
        self._loop: Loop | None = None
        self._state: LoopState | None = None
        self._plan: WorkPlan | None = None
        self._rest: _Rest | None = None
        self._frames_out = 0 if world is None else world.frames

    def plan(self) -> WorkPlan | None:
        """The next step, the same until ``advance``; None when the request is complete."""
        while self._plan is None:
            if self.cursor >= len(self.nodes):
                self.steps_total = self.steps_done  # fewer than announced when a loop stopped early
                return None
            node = self.nodes[self.cursor]
            if self._state is None:
                spec = None if node.loop is None else self.instance.card.loops[node.loop]
                self._loop = component_loop(node) if spec is None else loop_of_kind(spec.kind)
                ctx = LoopContext(
                    spec=spec,
                    slots=self.slots,
                    profile=self.resolved.request.profile,
                    capture=frozenset(self.resolved.request.capture),
                    kv=self.kv,
                    pixels=self.resolved.pixels,
                    world=None if self.world is None else self.world.state,
                )
                self._state = self._loop.init(self.resolved.params_of(node.id), self.instance, ctx)
            assert self._loop is not None
            step = self._loop.next(self._state)
            if isinstance(step, Done):
                result = self._loop.finalize(self._state)
                self.slots |= words_of(node, result)
                if isinstance(result.value, Completion):
                    self.completions[node.id] = result.value
                if isinstance(result.behaviour, TokenBehaviour):
                    self.tokens[node.id] = result.behaviour
                elif result.behaviour is not None:
                    self.behaviour = result.behaviour
                self._state = None
                self.cursor += 1
            else:
                self._plan = step
        return self._plan

    def advance(self, result: StepResult) -> None:
        """Takes the results of the current plan."""
        assert self._loop is not None and self._state is not None and self._plan is not None
        if self.steps_done == 0:  # not before: weights may have changed while the request waited
            self.versions = self.instance.versions()
        label = self._plan.label
        self.frames = self._emitted(result) if self._plan.emits == "frames" else None
        self._state = self._loop.advance(self._state, result)
        self._plan = None
        self.steps_done += 1
        if self.listener is not None:
            self.listener(label, self.steps_done, self.steps_total)

    def _emitted(self, result: StepResult) -> Frames:
        first, pixels_FHWC = self._frames_out, to_uint8(result.outputs[-1][0])
        self._frames_out += len(pixels_FHWC)
        return Frames(first, pixels_FHWC)

    @property
    def loop_step(self) -> int:
        """Steps that the current node's loop has done."""
        return 0 if self._state is None else self._state.step

    @property
    def resting(self) -> bool:
        return self._rest is not None

    def suspend(self) -> None:
        """Moves the loop's state and the slots to host memory; nothing but :meth:`resume` may follow. What a plugin
        holds goes along where it has a ``rest`` and a ``wake``."""
        state = self._state
        plugins = {} if state is None else state.plugins
        shared = {} if state is None else state.shared
        kept = None if state is None else replace(state, plugins={}).save()
        for plugin in plugins.values():
            if hasattr(plugin, "rest"):
                plugin.rest()
        self._rest = _Rest(kept, plugins, shared, _moved(self.slots, "cpu"))
        self._state, self._plan, self.slots = None, None, {}

    def resume(self) -> None:
        """Inverse of :meth:`suspend`."""
        assert self._rest is not None
        rest, self._rest = self._rest, None
        self.slots = _moved(rest.slots, self.instance.device)
        if rest.state is not None:
            for plugin in rest.plugins.values():
                if hasattr(plugin, "wake"):
                    plugin.wake()
            state = LoopState.resume(rest.state, rest.shared)
            self._state = replace(state, plugins=rest.plugins)

    def end(self, failure: BaseException | None) -> None:
        """The request is over; what it held is let go, weights that only it still used among them."""
        self.failure = failure
        if self.world is not None:
            self.world.settle(self.slots if failure is None else None, self._frames_out)
        vars(self).pop("instance", None)
        self._loop = self._state = self._plan = self._rest = None
        self.slots = {}

    def artifact(self) -> Artifact:
        """The result of a complete request."""
        r = self.resolved
        inputs = {} if r.request.inputs is None else r.request.inputs
        video = self.slots.get("video")
        return Artifact(
            latents=self.slots["latents"][0] if "latents" in self.slots else torch.empty(0),
            video=None if video is None else video[0],
            fps=self.instance.card.sampling.fps,
            provenance=Provenance(
                card_digest=self.instance.card.digest,
                weights_versions=self.versions,
                prompt=r.request.prompt,
                negative_prompt=r.negative_prompt,
                params=r.params,
                nodes=r.nodes,
                inputs={name: tensors_digest({name: t}) for name, t in inputs.items()},
            ),
            behaviour=self.behaviour,
            completion=next(reversed(self.completions.values()), None),
            completions=self.completions,
            tokens=self.tokens,
            refined=self.slots["prompt"] if r.refined else None,
            score=self.slots.get("score"),
        )
