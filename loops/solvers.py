"""Solvers: diffusers schedulers, one instance per request, behind one small face.

A solver owns the sigmas of a request and turns the network's velocity into the next latents, in float32. Shared
scheduler objects are what makes concurrent requests corrupt each other; here nobody shares one. All but ``lcm`` follow
the ODE; ``lcm`` predicts the clean latents and noises them afresh to the next sigma, by the request's own generator.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cards.card import LoopMismatchError, Schedule
from cards.errors import UserError, unknown_name

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SOLVERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unipc": ("UniPCMultistepScheduler", "flow_shift", FLOW),
    "euler": ("FlowMatchEulerDiscreteScheduler", "shift", {}),
    "dpm2": ("DPMSolverMultistepScheduler", "flow_shift", {**FLOW, "solver_order": 2}),
    "lcm": ("FlowMatchLCMScheduler", "shift", {}),
}
"""Name -> diffusers class, its argument for the flow shift, arguments that make it a flow solver."""
RENOISING = ("lcm",)
"""Solvers that draw noise in every step."""


def solver_class(name: str) -> type[Any]:
    """The diffusers class of a solver; raises ``UserError`` with the list of names."""
    import diffusers

    if name not in SOLVERS:
        raise unknown_name("solver", name, SOLVERS)
    return getattr(diffusers, SOLVERS[name][0])


@functools.cache
def _arguments(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class Solver:
    """One request's scheduler. ``timesteps`` (N,) are what the network sees, ``sigmas`` (N,) where it is evaluated."""

    def __init__(self, name: str, steps: int, schedule: Schedule, shift: float, own: bool):
        cls = solver_class(name)
        _, shift_key, required = SOLVERS[name]
        accepted = _arguments(cls.__init__)
        options = {k: v for k, v in schedule.options.items() if k in accepted} if own else {}
        ladder = schedule.ladder
        # A ladder's sigmas are final: with shift 1 the scheduler cannot shift them a second time.
        self.scheduler = cls(**{**required, **options, shift_key: 1.0 if ladder is not None else shift})
        if ladder is None:
            self.scheduler.set_timesteps(steps, device="cpu")
        elif "sigmas" not in _arguments(cls.set_timesteps):
            raise UserError(f"solver {name!r} ({cls.__name__}) takes no ladder; use the card's own solver")
        else:
            self.scheduler.set_timesteps(sigmas=np.array(ladder), device="cpu")
        self.scheduler.set_begin_index(0)
        self.renoises = name in RENOISING
        self.timesteps: Tensor = self.scheduler.timesteps
        self.grid: Tensor = self.scheduler.sigmas.to(torch.float32)
        """(N + 1,): ``sigmas``, then where the last step leads."""
        self.sigmas: Tensor = self.grid[: len(self.timesteps)]

    def step(self, velocity: Tensor, index: int, latents: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Latents after step ``index``, shaped as ``latents``; ``generator`` (CPU) is for a solver that re-noises."""
        timestep = self.timesteps[index]
        if not self.renoises:
            return self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        assert generator is not None, "a solver that re-noises draws from its request's generator"
        # In float32: the class returns latents in the velocity's dtype, and they would lose bits rung by rung.
        return self.scheduler.step(velocity.float(), timestep, latents, generator=generator, return_dict=False)[0]


def make_solver(name: str, steps: int, schedule: Schedule, *, shift: float, card_solver: str) -> Solver:
    """Solver ``name`` for ``steps`` steps; the schedule's stored options apply when it is the card's own solver.

    Raises ``LoopMismatchError`` when the card has a ladder and the request asks for another number of steps or solver.
    """
    if schedule.ladder is not None and name != card_solver:
        raise LoopMismatchError(
            f"got solver={name!r}; these weights were distilled for the ladder {list(schedule.ladder)} by "
            f"{card_solver!r}: use that"
        )
    if schedule.ladder is not None and steps != len(schedule.ladder):
        raise LoopMismatchError(
            f"got steps={steps}; these weights were distilled for the ladder {list(schedule.ladder)}: "
            f"use steps={len(schedule.ladder)}"
        )
    return Solver(name, steps, schedule, shift, own=name == card_solver)
