"""A request run without the engine: its nodes one after the other, each by the reference driver."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cards.needs import request_needs
from inference.instance import ModelInstance
from inference.request import Request
from inference.resolve import resolve
from loops.ar_decode import words_of
from loops.drive import drive
from loops.loop import LoopContext
from loops.registry import component_loop, loop_of_kind


def drive_slots(instance: ModelInstance, request: Request) -> dict[str, Any]:
    """What the request's nodes wrote, slot by slot: tensors with a batch dim of 1, a Completion, a Score."""
    resolved = resolve(request, instance.card)
    inputs = {} if request.inputs is None else request.inputs
    slots: dict[str, Any] = {"prompt": resolved.prompt, "negative_prompt": resolved.negative_prompt, **inputs}
    guided, pixels = resolved.guided, resolved.pixels
    needs = request_needs(instance.card, request.task, guided=guided, pixels=pixels, refined=resolved.refined)
    written: dict[str, Any] = {}
    for node in needs.nodes:
        spec = None if node.loop is None else instance.card.loops[node.loop]
        loop = component_loop(node) if spec is None else loop_of_kind(spec.kind)
        ctx = LoopContext(
            spec=spec, slots=slots, profile=request.profile, capture=frozenset(request.capture), pixels=pixels
        )
        result = drive(loop, resolved.params_of(node.id), instance, ctx)
        wrote = words_of(node, result)
        slots |= wrote
        written |= wrote
    return written


def drive_request(instance: ModelInstance, request: Request) -> dict[str, Tensor]:
    """The tensors among :func:`drive_slots`, such as ``latents`` and ``video``."""
    return {name: value for name, value in drive_slots(instance, request).items() if isinstance(value, Tensor)}
