"""A component node as a loop of one step, so that every runner has one kind of thing to run."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from torch import Tensor

from cards.program import Node
from loops.loop import (
    Done,
    Instance,
    Loop,
    LoopContext,
    LoopResult,
    LoopState,
    ModelCall,
    SamplingParams,
    StepResult,
    WorkPlan,
    WorkUnit,
)

UNITS = {
    "encode": WorkUnit.ENCODER_CHUNK,
    "encode_image": WorkUnit.ENCODER_CHUNK,
    "encode_condition": WorkUnit.ENCODER_CHUNK,
    "decode": WorkUnit.VAE_TILE,
}


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    """sha256 (hex) of names, dtypes, shapes and bytes of small CPU tensors."""
    h = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        h.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        h.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()


class ComponentLoop(Loop):
    """One call of one component: encoding of text or images, decoding."""

    def __init__(self, node: Node):
        self.node = node

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        (slot,) = self.node.reads
        value: Any = ctx.slots[slot]
        facts: dict[str, Any] = {"static": {}}
        if self.node.op == "encode":
            facts["static"] = {"text_padding": instance.card.precision.text_padding}
            tensors = instance.tokenize(value, instance.card.sampling.max_sequence_length)
            facts["input"] = tensors_digest(tensors)
        else:
            assert self.node.op is not None
            prepared = instance.prepared(self.node.op, value, params)
            tensors = {slot: value} if prepared is None else prepared
            if prepared is not None:
                facts["input"] = tensors_digest(tensors)
        return LoopState(step=0, total=1, params=params, tensors=tensors, facts=facts)

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step:
            return Done()
        node = self.node
        assert node.component is not None and node.op is not None
        static = state.facts["static"]
        call = ModelCall(node.component, node.op, state.tensors, static)
        key = None
        if "input" in state.facts:
            key = (node.component, node.op, (state.facts["input"], *static.items()))
        return WorkPlan(unit=UNITS[node.op], calls=(call,), label=node.id, cache_key=key)

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        return replace(state, step=1, tensors={"value": result.outputs[0]})

    def finalize(self, state: LoopState) -> LoopResult:
        return LoopResult(state.tensors["value"])
