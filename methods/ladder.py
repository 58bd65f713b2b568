"""Backward simulation: the samples of a few-step student as it serves them, with gradient at one rung.

The ladder is walked by the card's own loop, through the SAME ModelCall path: noise, then per rung predict the clean
sample and noise it to the next rung (arXiv 2405.14867, Sec. 4.4). The walk ends at an exit rung, whose prediction is
the sample. Exit at the last rung is the served sample.

Legend: B rows, C latent channels, T latent frames, H W latent cells, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError
from cards.prediction import shift_sigma, timestep_to_sigma, velocity_to_x0
from inference.instance import ModelInstance
from inference.plain_request import plain_task
from inference.request import Request
from inference.resolve import denoise_spec, resolve
from loops.loop import LoopContext, ModelCall, Profile, StepResult, WorkPlan
from loops.registry import loop_of_kind
from methods.random import generator_at

SEMANTICS = "few-step-renoise"
"""Of a loop that predicts the clean sample rung by rung; weights that were distilled for it assume it."""
SOLVER = "lcm"


def ladder_card(card: ModelCard, ladder: Sequence[float]) -> ModelCard:
    """The card whose denoising loop walks ``ladder`` (sigmas, descending) without guidance, as it trains and serves.

    Its digest differs from the card's; its parents do not, as its weights do not yet.
    """
    name = denoising_loop(card)
    spec = card.loops[name]
    schedule = spec.schedule.model_copy(update={"shift": 1.0, "ladder": tuple(ladder), "options": {}})
    loop = spec.model_copy(
        update={
            "solver": SOLVER,
            "schedule": schedule,
            "guidance": spec.guidance.model_copy(update={"scale": 1.0}),
            "semantics": SEMANTICS,
        }
    )
    return card.model_copy(
        update={
            "loops": {**card.loops, name: loop},
            "recipe": card.recipe.model_copy(update={"assumes_loop": SEMANTICS}),
            "sampling": card.sampling.model_copy(update={"steps": len(ladder)}),
        }
    )


def ladder_sigmas(rungs: Sequence[float], shift: float) -> tuple[float, ...]:
    """Sigmas of timesteps of 1000 under a flow shift."""
    if not rungs or not shift > 0:
        raise UserError(
            f"method rungs: got {list(rungs)} with ladder_shift {shift}, expected at least one timestep and a shift > 0"
        )
    return tuple(shift_sigma(timestep_to_sigma(float(rung)), shift) for rung in rungs)


def ladder_of(card: ModelCard) -> tuple[float, ...] | None:
    """The ladder of the loop that a plain request runs, or None."""
    return denoise_spec(card, plain_task(card)).schedule.ladder


def denoising_loop(card: ModelCard) -> str:
    """Id of the loop that a plain request runs."""
    spec = denoise_spec(card, plain_task(card))
    return next(name for name, loop in card.loops.items() if loop is spec)


def exit_rung(rungs: int, *address: int | str) -> int:
    """A rung in 0 .. rungs - 1, uniform: a function of the address alone, so that all ranks leave at the same one."""
    return int(torch.randint(rungs, (1,), generator=generator_at(*address, "exit")).item())


def simulate(
    instance: ModelInstance, text_BLD: Tensor, seeds: Sequence[int], exit_at: int, *, gradient: bool
) -> Tensor:
    """Samples (B, C, T, H, W) in float32 of the rows' texts from the noise of ``seeds``; rungs before the exit without
    gradient."""
    card = instance.card
    spec = denoise_spec(card, plain_task(card))
    loop = loop_of_kind(spec.kind)
    states = []
    for row, seed in enumerate(seeds):
        params = resolve(Request(prompt="", seed=seed, output="latents"), card).params
        text = text_BLD[row : row + 1]
        states.append(loop.init(params, instance, LoopContext(spec=spec, slots={"text": text})))
    for _ in range(exit_at):
        with torch.no_grad():
            outputs = _evaluate(instance, [loop.next(state) for state in states], Profile.ROLLOUT)
            states = [
                loop.advance(state, StepResult((output,)))
                for state, output in zip(states, outputs.split(1), strict=True)
            ]
    plans = [loop.next(state) for state in states]
    velocity = _evaluate(instance, plans, Profile.TRAIN if gradient else Profile.ROLLOUT)
    latents = torch.cat([state.tensors["latents"] for state in states])
    return velocity_to_x0(latents, velocity.float(), states[0].solver.sigmas[exit_at])


def _evaluate(instance: ModelInstance, plans: Sequence[object], profile: Profile) -> Tensor:
    """Outputs (B, ...) of one call a plan, in one forward."""
    calls = []
    for plan in plans:
        assert isinstance(plan, WorkPlan)
        (call,) = plan.calls
        calls.append(call)
    return instance.call(ModelCall.merged(calls), profile)
