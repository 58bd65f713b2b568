"""A request run without the engine: its nodes one after the other, each by the reference driver."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cards.program import active_nodes
from inference.instance import ModelInstance
from inference.request import Request, resolve
from loops.drive import drive
from loops.loop import LoopContext
from loops.registry import component_loop, loop_of_kind


def drive_request(instance: ModelInstance, request: Request) -> dict[str, Tensor]:
    """Slots that the request's nodes wrote, such as ``latents`` and ``video``, each with its batch dim of 1."""
    resolved = resolve(request, instance.card)
    slots: dict[str, Any] = {"prompt": request.prompt, "negative_prompt": resolved.negative_prompt}
    program = instance.card.programs[request.task]
    for node in active_nodes(program, guided=resolved.params.guided, pixels=resolved.pixels):
        spec = None if node.loop is None else instance.card.loops[node.loop]
        loop = component_loop(node) if spec is None else loop_of_kind(spec.kind)
        ctx = LoopContext(spec=spec, slots=slots, profile=request.profile, capture=frozenset(request.capture))
        slots[node.writes] = drive(loop, resolved.params, instance, ctx).value
    return {name: value for name, value in slots.items() if isinstance(value, Tensor)}
