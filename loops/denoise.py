"""The diffusion loop: noise to clean latents by a solver, with classifier-free guidance.

Equal, value for value, to the loop in ``diffusers.WanPipeline`` on the same modules: noise from a CPU generator in
float32, one sample at a time, so that a result does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from loops.guidance import guidance_policy
from loops.loop import (
    BehaviourRecord,
    Done,
    Instance,
    Loop,
    LoopContext,
    LoopResult,
    LoopState,
    ModelCall,
    Profile,
    Resources,
    SamplingParams,
    StepResult,
    WorkPlan,
    WorkUnit,
)
from loops.solvers import make_solver


def initial_noise(seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Generator]:
    """Noise (1, *shape) float32 as diffusers draws it for one prompt, and the generator after the draw."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((1, *shape), generator=generator, dtype=torch.float32), generator


class DenoiseLoop(Loop):
    """``diffusion_denoise``: one DIFFUSION_STEP a solver step."""

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None and params is not None
        geometry = instance.card.geometry
        noise, generator = initial_noise(params.seed, geometry.latent_shape(params.frames, params.height, params.width))
        text = ctx.slots["text"]
        tensors = {"latents": noise.to(text.device), "text": text}
        if params.guided:
            tensors["negative_text"] = ctx.slots["negative_text"]
        solver = make_solver(
            params.solver, params.steps, ctx.spec.schedule, shift=params.shift, card_solver=ctx.spec.solver
        )
        component = ctx.spec.components["denoiser"]
        tokens = geometry.tokens(params.frames, params.height, params.width)
        branches = 2 if params.guided else 1
        seconds = branches * (ctx.spec.cost.base_seconds + ctx.spec.cost.per_token_seconds * tokens)
        return LoopState(
            step=0,
            total=len(solver.timesteps),
            params=params,
            tensors=tensors,
            solver=solver,
            generator=generator,
            captured={name: [] for name in ctx.capture},
            facts={
                "component": component,
                "static": instance.numerics(component),
                "seconds": seconds,
                "record": ctx.profile is not Profile.SERVE,
            },
        )

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step >= state.total:
            return Done()
        return WorkPlan(
            unit=WorkUnit.DIFFUSION_STEP,
            calls=self.calls(state),
            label=f"denoise {state.step + 1}/{state.total}",
            resources=Resources(seconds=state.facts["seconds"]),
        )

    def calls(self, state: LoopState) -> tuple[ModelCall, ...]:
        """Evaluations of the denoiser at the state's step, one a guidance branch or one for all."""
        params = state.params
        assert params is not None
        shared = self.shared(state)
        component, static = state.facts["component"], state.facts["static"]
        if params.guided:
            policy = guidance_policy(params.guidance_policy)
            return policy.calls(component, shared, state.tensors["text"], state.tensors["negative_text"], static)
        return (ModelCall(component, "velocity", {**shared, "text": state.tensors["text"]}, static),)

    def shared(self, state: LoopState) -> dict[str, torch.Tensor]:
        """Tensors that the branches of a step have in common."""
        latents = state.tensors["latents"]
        timestep = state.solver.timesteps[state.step].to(latents.device).expand(latents.shape[0])
        return {"latents": latents, "timestep": timestep}

    def guided_velocity(self, state: LoopState, result: StepResult) -> torch.Tensor:
        """Velocity (1, C, T, H, W) of a step from the results of its calls."""
        params = state.params
        assert params is not None
        if params.guided:
            return guidance_policy(params.guidance_policy).combine(result.outputs, params.guidance)
        (velocity,) = result.outputs
        return velocity

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        velocity = self.guided_velocity(state, result)
        latents = state.tensors["latents"]
        if "trajectory" in state.captured:
            state.captured["trajectory"].append(latents)
        if "velocities" in state.captured:
            state.captured["velocities"].append(velocity)
        moved = state.solver.step(velocity, state.step, latents, state.generator)
        return replace(state, step=state.step + 1, tensors={**state.tensors, "latents": moved})

    def finalize(self, state: LoopState) -> LoopResult:
        behaviour = None
        if state.facts["record"]:
            stacked = {name: torch.cat(rows) for name, rows in state.captured.items()}
            visited = slice(state.step)  # all, unless the loop ended early
            behaviour = BehaviourRecord(state.solver.sigmas[visited], state.solver.timesteps[visited], **stacked)
        return LoopResult(state.tensors["latents"], behaviour)
