"""The diffusion loop of a model that also sees a first frame: what was encoded of it goes into every forward."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from loops.denoise import DenoiseLoop
from loops.loop import Instance, LoopContext, LoopState, SamplingParams

CONDITIONS = ("condition", "image_embeds")
"""Slots that every forward takes beside latents, timestep and text, alike in both guidance branches."""


class DenoiseImageLoop(DenoiseLoop):
    """``diffusion_denoise_image``: equal, value for value, to the loop in ``diffusers.WanImageToVideoPipeline``."""

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        state = super().init(params, instance, ctx)
        conditions = {name: ctx.slots[name] for name in CONDITIONS}
        return replace(state, tensors={**state.tensors, **conditions})

    def shared(self, state: LoopState) -> dict[str, Tensor]:
        return {**super().shared(state), **{name: state.tensors[name] for name in CONDITIONS}}
