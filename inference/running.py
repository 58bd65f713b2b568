"""A request in flight: its nodes, the slots that they filled, the loop that it is in.

One object a request; nothing here knows of other requests or of scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from cards.program import active_nodes
from inference.artifact import Artifact, Provenance
from inference.instance import ModelInstance
from inference.request import ResolvedRequest
from loops.ar_decode import Completion
from loops.loop import BehaviourRecord, Done, KVSource, Loop, LoopContext, LoopState, StepResult, WorkPlan
from loops.registry import component_loop, loop_of_kind

StepListener = Callable[[str, int, int], None]
"""(label, steps done, steps in all) after every step."""


class Running:
    """Walks one request through its program: ``plan`` says what to evaluate next, ``advance`` takes the results."""

    def __init__(
        self,
        resolved: ResolvedRequest,
        instance: ModelInstance,
        listener: StepListener | None = None,
        kv: KVSource | None = None,
    ):
        """``kv`` opens this request's KV, which its owner frees when the request ends; None: it goes with us."""
        self.resolved = resolved
        self.kv = kv
        self.instance = instance
        self.listener = listener
        self.started = time.monotonic()
        program = instance.card.programs[resolved.request.task]
        self.nodes = active_nodes(program, guided=resolved.params.guided, pixels=resolved.pixels)
        self.cursor = 0
        self.slots: dict[str, Any] = {
            "prompt": resolved.prompt,
            "negative_prompt": resolved.negative_prompt,
        }
        self.steps_done = 0
        self.steps_total = resolved.params.steps + sum(node.loop is None for node in self.nodes)
        self.versions = instance.versions()
        self.behaviour: BehaviourRecord | None = None
        self.failure: BaseException | None = None
        self._loop: Loop | None = None
        self._state: LoopState | None = None
        self._plan: WorkPlan | None = None

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
                )
                self._state = self._loop.init(self.resolved.params, self.instance, ctx)
            assert self._loop is not None
            step = self._loop.next(self._state)
            if isinstance(step, Done):
                result = self._loop.finalize(self._state)
                self.slots[node.writes] = result.value
                if result.behaviour is not None:
                    self.behaviour = result.behaviour
                self._state = None
                self.cursor += 1
            else:
                self._plan = step
        return self._plan

    def advance(self, result: StepResult) -> None:
        """Takes the results of the current plan."""
        assert self._loop is not None and self._state is not None and self._plan is not None
        label = self._plan.label
        self._state = self._loop.advance(self._state, result)
        self._plan = None
        self.steps_done += 1
        if self.listener is not None:
            self.listener(label, self.steps_done, self.steps_total)

    def artifact(self) -> Artifact:
        """The result of a complete request."""
        r = self.resolved
        video, completion = self.slots.get("video"), self.slots.get("completion")
        assert completion is None or isinstance(completion, Completion)
        return Artifact(
            latents=self.slots["latents"][0] if completion is None else torch.empty(0),
            video=None if video is None else video[0],
            fps=self.instance.card.sampling.fps,
            provenance=Provenance(
                card_digest=self.instance.card.digest,
                weights_versions=self.versions,
                prompt=r.request.prompt,
                negative_prompt=r.negative_prompt,
                params=r.params,
            ),
            behaviour=self.behaviour,
            completion=completion,
        )
