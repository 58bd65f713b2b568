"""ODE solvers: diffusers schedulers, one instance per request, behind one small face.

A solver owns the sigmas of a request and turns the network's velocity into the next latents, in float32. Shared
scheduler objects are what makes concurrent requests corrupt each other; here nobody shares one.
"""

from __future__ import annotations

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
}
"""Name -> diffusers class, its argument for the flow shift, arguments that make it a flow solver."""


def solver_class(name: str) -> type[Any]:
    """The diffusers class of a solver; raises ``UserError`` with the list of names."""
    import diffusers

    if name not in SOLVERS:
        raise unknown_name("solver", name, SOLVERS)
    return getattr(diffusers, SOLVERS[name][0])


class Solver:
    """One request's scheduler. ``timesteps`` (N,) are what the network sees, ``sigmas`` (N,) where it is evaluated."""

    def __init__(self, name: str, steps: int, schedule: Schedule, shift: float, own: bool):
        cls = solver_class(name)
        _, shift_key, required = SOLVERS[name]
        accepted = inspect.signature(cls.__init__).parameters
        options = {k: v for k, v in schedule.options.items() if k in accepted} if own else {}
        ladder = schedule.ladder
        # A ladder's sigmas are final: with shift 1 the scheduler cannot shift them a second time.
        self.scheduler = cls(**{**required, **options, shift_key: 1.0 if ladder is not None else shift})
        if ladder is None:
            self.scheduler.set_timesteps(steps, device="cpu")
        elif "sigmas" not in inspect.signature(cls.set_timesteps).parameters:
            raise UserError(f"solver {name!r} ({cls.__name__}) takes no ladder; use the card's own solver")
        else:
            self.scheduler.set_timesteps(sigmas=np.array(ladder), device="cpu")
        self.scheduler.set_begin_index(0)
        self.timesteps: Tensor = self.scheduler.timesteps
        self.sigmas: Tensor = self.scheduler.sigmas[: len(self.timesteps)].to(torch.float32)

    def step(self, velocity: Tensor, index: int, latents: Tensor) -> Tensor:
        """Latents after step ``index``, shaped as ``latents``."""
        return self.scheduler.step(velocity, self.timesteps[index], latents, return_dict=False)[0]


def make_solver(name: str, steps: int, schedule: Schedule, *, shift: float, card_solver: str) -> Solver:
    """Solver ``name`` for ``steps`` steps; the schedule's stored options apply when it is the card's own solver.

    Raises ``LoopMismatchError`` when the card has a ladder and the request asks for another number of steps.
    """
    if schedule.ladder is not None and steps != len(schedule.ladder):
        raise LoopMismatchError(
            f"got steps={steps}; these weights were distilled for the ladder {list(schedule.ladder)}: "
            f"use steps={len(schedule.ladder)}"
        )
    return Solver(name, steps, schedule, shift, own=name == card_solver)
