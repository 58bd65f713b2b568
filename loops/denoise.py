"""The diffusion loop: noise to clean latents by a solver, with classifier-free guidance.

Equal, value for value, to the loop in ``diffusers.WanPipeline`` on the same modules: noise from a CPU generator in
float32, one sample at a time, so that a result does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from loops.guidance import guidance_policy
from loops.loop import (
    SDE,
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
from loops.sde import sde_step
from loops.solvers import make_solver

SDE_CAPTURES = ("sde_states", "sde_log_probs")
"""Fields of the BehaviourRecord that the steps of an SDE request fill."""


def initial_noise(seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Generator]:
    """Noise (1, *shape) float32 as diffusers draws it for one prompt, and the generator after the draw."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn((1, *shape), generator=generator, dtype=torch.float32), generator


class DenoiseLoop(Loop):
    """``diffusion_denoise``: one DIFFUSION_STEP a solver step."""

    takes_sde = True

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None and params is not None
        geometry = instance.card.geometry
        noise, generator = initial_noise(params.seed, geometry.latent_shape(params.frames, params.height, params.width))
        if params.sde is not None and params.sde.seed is not None:
            generator = torch.Generator("cpu").manual_seed(params.sde.seed)
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
        record = ctx.profile is not Profile.SERVE
        captured = (*ctx.capture, *(SDE_CAPTURES if record and params.sde is not None else ()))
        return LoopState(
            step=0,
            total=len(solver.timesteps),
            params=params,
            tensors=tensors,
            solver=solver,
            generator=generator,
            captured={name: [] for name in captured},
            facts={
                "component": component,
                "static": instance.numerics(component),
                "seconds": seconds,
                "record": record,
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
        if state.params.sde is None:
            moved = state.solver.step(velocity, state.step, latents, state.generator)
        else:
            moved = self._sde_step(state, state.params.sde, velocity)
        return replace(state, step=state.step + 1, tensors={**state.tensors, "latents": moved})

    def _sde_step(self, state: LoopState, sde: SDE, velocity: torch.Tensor) -> torch.Tensor:
        """Latents after a step with noise; outside the window without, which is the Euler step."""
        latents, steps = state.tensors["latents"], sde.steps(state.total)
        noisy = state.step in steps
        sigma, following = state.solver.grid[state.step : state.step + 2].to(latents.device).split(1)
        reached = sde_step(sde.kind, latents, velocity, sigma, following, sde.level if noisy else 0.0)
        if not noisy:
            return reached.mean
        assert state.generator is not None
        moved = reached.sample(torch.randn(latents.shape, generator=state.generator).to(latents.device))
        if state.facts["record"]:
            state.captured["sde_states"] += [latents] if state.step + 1 < steps.stop else [latents, moved]
            state.captured["sde_log_probs"].append(reached.log_prob(moved))
        return moved

    def finalize(self, state: LoopState) -> LoopResult:
        behaviour = None
        if state.facts["record"]:
            kept: dict[str, Any] = {name: torch.cat(rows) for name, rows in state.captured.items()}
            if state.params.sde is not None:
                kept |= self._sde_facts(state, state.params.sde)
            visited = slice(state.step)  # all, unless the loop ended early
            behaviour = BehaviourRecord(state.solver.sigmas[visited], state.solver.timesteps[visited], **kept)
        return LoopResult(state.tensors["latents"], behaviour)

    def _sde_facts(self, state: LoopState, sde: SDE) -> dict[str, Any]:
        """Fields of the BehaviourRecord of an SDE request that no single step knows."""
        steps = sde.steps(state.total)
        return {
            "sde_steps": torch.tensor(steps),
            "sde_sigmas": state.solver.grid[steps.start : steps.stop + 1],
            "conditions": {name: tensor for name, tensor in state.tensors.items() if name != "latents"},
        }
