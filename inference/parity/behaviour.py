"""The behaviour gate (C2) of a likelihood-free method: what training evaluates is what the rollout evaluated.

Two identities, on any instance, a role of a training run included: a seeded ROLLOUT sample equals the SERVE sample, and
every velocity that the rollout used comes out again, with a gradient, when its input is evaluated the way a loss does,
as a ``ModelCall`` under ``Profile.TRAIN``. Knows nothing of losses.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.chunks import chunk_gate
from inference.parity.interleave import GateReport, tensor_difference, worst
from inference.plain_request import as_it_is, plain_inputs, plain_task
from inference.request import Request
from inference.resolve import CHUNK_LOOP, denoise_spec, resolve
from loops.drive import drive
from loops.loop import LoopContext, ModelCall, Profile
from loops.registry import component_loop

GATE_STEPS = 4
"""Solver steps of a gate's sample, where the card has no ladder."""


def behaviour_gate(
    instance: ModelInstance,
    *,
    prompt: str,
    seed: int,
    steps: int | None = None,
    solver: str | None = None,
    tolerance: float = 0.0,
) -> GateReport:
    """Samples latents twice at guidance 1 and evaluates each visited point once more under TRAIN.

    A chunked rollout has no point that is evaluated alone: its gate is ``chunk_gate``.

    ``steps`` takes the ladder's length (else ``GATE_STEPS``) and ``solver`` the card's when None. The difference is nan
    for a NaN anywhere and inf where TRAIN gives no gradient, so that neither passes at any tolerance.
    """
    if denoise_spec(instance.card, plain_task(instance.card)).kind == CHUNK_LOOP:
        return chunk_gate(instance, prompt=prompt, seed=seed, tolerance=tolerance)
    request = Request(
        prompt=prompt,
        task=plain_task(instance.card),
        inputs=plain_inputs(instance.card),
        refine=as_it_is(instance.card),
        seed=seed,
        steps=_gate_steps(instance) if steps is None else steps,
        guidance=1.0,
        solver=solver,
        output="latents",
        profile=Profile.ROLLOUT,
        capture=("trajectory", "velocities"),
    )
    engine = Engine(instance.device, cache_bytes=0)
    rollout = engine.run(request, instance)
    served = engine.run(replace(request, profile=Profile.SERVE, capture=()), instance)
    behaviour = rollout.behaviour
    assert behaviour is not None and behaviour.trajectory is not None and behaviour.velocities is not None
    conditions = _conditions(instance, request)
    component = denoise_spec(instance.card, request.task).components["denoiser"]
    recomputed = [
        _recompute(instance, component, latents, timestep, conditions, velocity)
        for latents, timestep, velocity in zip(
            behaviour.trajectory.split(1), behaviour.timesteps.split(1), behaviour.velocities.split(1), strict=True
        )
    ]
    difference = worst([tensor_difference(rollout.latents, served.latents), *recomputed])
    what = f"rollout == serve, {len(recomputed)} rollout velocities == training's, with gradient"
    return GateReport("C2", what, difference, tolerance)


def _gate_steps(instance: ModelInstance) -> int:
    ladder = denoise_spec(instance.card, plain_task(instance.card)).schedule.ladder
    return GATE_STEPS if ladder is None else len(ladder)


def _text(instance: ModelInstance, request: Request) -> Tensor:
    """Text embedding (1, L, D), by the reference driver and not by the engine under test."""
    return _conditions(instance, request)["text"]


def _conditions(instance: ModelInstance, request: Request) -> dict[str, Tensor]:
    """What the denoising node reads, by the reference driver and not by the engine under test."""
    nodes = instance.card.programs[request.task].nodes
    denoise = next(node for node in nodes if node.loop is not None and node.writes != "prompt")
    inputs = {} if request.inputs is None else request.inputs
    ctx = LoopContext(spec=None, slots={"prompt": request.prompt, **inputs})
    params = resolve(request, instance.card).params
    return {
        node.writes: drive(component_loop(node), params, instance, ctx).value
        for node in nodes
        if node.writes in denoise.reads
    }


def _recompute(
    instance: ModelInstance,
    component: str,
    latents: Tensor,
    timestep: Tensor,
    conditions: dict[str, Tensor],
    velocity: Tensor,
) -> float:
    """Difference of one velocity when it is evaluated under TRAIN; inf when no gradient reaches its input."""
    tensors = {
        "latents": latents.detach().clone().requires_grad_(True),
        "timestep": timestep.to(latents.device),
        **conditions,
    }
    again = instance.call(ModelCall(component, "velocity", tensors, instance.numerics(component)), Profile.TRAIN)
    if not again.requires_grad:
        return math.inf
    return tensor_difference(again.detach(), velocity)
