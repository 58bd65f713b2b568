"""Solvers against fresh diffusers schedulers stepped by hand, and against an ODE whose solution is known.

The ODE: for x0 ~ N(mu, c^2) and x_s = (1 - s) x0 + s e, x_s is normal with mean m = (1 - s) mu and variance
q = (1 - s)^2 c^2 + s^2, the velocity is E[e - x0 | x_s] = -mu + (s - (1 - s) c^2) / q (x_s - m), and its flow keeps
(x_s - m) / sqrt(q) constant.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    UniPCMultistepScheduler,
)

from cards.card import LoopMismatchError, Schedule
from cards.errors import UserError
from loops.flow import euler_step
from loops.solvers import SOLVERS, Solver, make_solver

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SHAPE = (1, 4, 3, 2, 2)


def solver_for(name: str, steps: int, *, shift: float = 3.0, schedule: Schedule | None = None) -> Solver:
    return make_solver(
        name, steps, Schedule(shift=shift) if schedule is None else schedule, shift=shift, card_solver=name
    )


def by_hand(name: str, shift: float) -> Any:
    """The library's own scheduler."""
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift)
    if name == "lcm":
        return FlowMatchLCMScheduler(shift=shift)
    if name == "unipc":
        return UniPCMultistepScheduler(flow_shift=shift, **FLOW)
    return DPMSolverMultistepScheduler(flow_shift=shift, solver_order=2, **FLOW)


def noise(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def toy_velocity(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """Any smooth function will do where both sides see the same one."""
    return torch.tanh(x * 1.7 + float(timestep) / 1000) - 0.3 * x


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(("steps", "shift"), [(1, 3.0), (4, 1.0), (10, 5.0), (20, 8.0)])
def test_a_solver_is_the_librarys_scheduler_to_the_bit(name: str, steps: int, shift: float) -> None:
    ours, theirs = solver_for(name, steps, shift=shift), by_hand(name, shift)
    theirs.set_timesteps(steps)
    assert torch.equal(ours.timesteps, theirs.timesteps)
    assert torch.equal(ours.sigmas, theirs.sigmas[:-1])
    a = b = noise(0)
    own, other = (torch.Generator().manual_seed(7) for _ in range(2))
    drawn = {"generator": other} if name == "lcm" else {}
    for index, timestep in enumerate(theirs.timesteps):
        a = ours.step(toy_velocity(a, ours.timesteps[index]), index, a, own)
        b = theirs.step(toy_velocity(b, timestep), timestep, b, **drawn, return_dict=False)[0]
        assert torch.equal(a, b)


@pytest.mark.parametrize("steps", [1, 7])
def test_the_euler_solver_is_the_euler_step(steps: int) -> None:
    solver = solver_for("euler", steps)
    sigmas = [*solver.sigmas, torch.tensor(0.0)]
    a = b = noise(1)
    for index in range(steps):
        velocity = toy_velocity(a, solver.timesteps[index])
        b = euler_step(b, velocity, sigmas[index], sigmas[index + 1])
        a = solver.step(velocity, index, a)
        assert torch.equal(a, b)


def test_the_timesteps_of_euler_are_continuous() -> None:
    solver = solver_for("euler", 7, shift=3.0)
    torch.testing.assert_close(solver.timesteps, 1000 * solver.sigmas, rtol=1e-6, atol=0)
    assert (solver.timesteps != solver.timesteps.round()).any()


@pytest.mark.parametrize("name", SOLVERS)
def test_a_request_may_take_another_shift_than_the_card(name: str) -> None:
    ours = make_solver(name, 6, Schedule(shift=3.0), shift=7.0, card_solver=name)
    theirs = by_hand(name, 7.0)
    theirs.set_timesteps(6)
    assert torch.equal(ours.sigmas, theirs.sigmas[:-1])


def test_the_cards_options_are_for_its_own_solver() -> None:
    schedule = Schedule(
        shift=3.0, options={**FLOW, "solver_order": 3, "solver_type": "bh1", "num_train_timesteps": 1000}
    )
    own = make_solver("unipc", 6, schedule, shift=3.0, card_solver="unipc")
    assert (own.scheduler.config.solver_order, own.scheduler.config.solver_type) == (3, "bh1")
    other = make_solver("dpm2", 6, schedule, shift=3.0, card_solver="unipc")
    assert other.scheduler.config.solver_order == 2


# -- ladders


@pytest.mark.parametrize("name", ["euler", "lcm", "unipc"])
def test_a_ladder_is_not_shifted_a_second_time(name: str) -> None:
    """The card's shift of 5 made these sigmas already; UniPC makes 1 - 1e-6 of 1, to stay finite."""
    ladder = (1.0, 0.9375, 0.8333, 0.625)
    schedule = Schedule(
        shift=5.0, ladder=ladder, options={"flow_shift": 5.0, "shift": 5.0, "num_train_timesteps": 1000}
    )
    solver = make_solver(name, 4, schedule, shift=5.0, card_solver=name)
    assert solver.sigmas.tolist() == pytest.approx(list(ladder), abs=2e-6)
    assert len(solver.timesteps) == 4


def test_a_ladder_with_another_number_of_steps_is_a_mismatch() -> None:
    with pytest.raises(LoopMismatchError, match=r"steps=50.*\[1\.0, 0\.5\].*steps=2"):
        make_solver("euler", 50, Schedule(ladder=(1.0, 0.5)), shift=1.0, card_solver="euler")


def test_a_solver_that_takes_no_ladder_says_so() -> None:
    with pytest.raises(UserError, match=r"'dpm2'.*takes no ladder"):
        make_solver("dpm2", 2, Schedule(ladder=(1.0, 0.5)), shift=1.0, card_solver="dpm2")


def test_another_solver_than_the_cards_is_a_mismatch_on_a_ladder() -> None:
    with pytest.raises(LoopMismatchError, match=r"solver='euler'.*\[1\.0, 0\.5\] by 'lcm'"):
        make_solver("euler", 2, Schedule(ladder=(1.0, 0.5)), shift=1.0, card_solver="lcm")


def test_lcm_predicts_the_clean_latents_and_noises_them_to_the_next_rung() -> None:
    """x' = (1 - s') (x - s v) + s' e by hand, the noise drawn once a rung; the last rung ends in the prediction."""
    ladder = (1.0, 0.9375, 0.625)
    solver = make_solver("lcm", 3, Schedule(ladder=ladder), shift=1.0, card_solver="lcm")
    own, other = (torch.Generator().manual_seed(5) for _ in range(2))
    a = b = noise(0)
    for index, (s, following) in enumerate(itertools.pairwise((*ladder, 0.0))):
        v = toy_velocity(a, solver.timesteps[index])
        assert solver.timesteps[index] == 1000 * s
        b = (1 - following) * (b - s * v) + following * torch.randn(SHAPE, generator=other)
        a = solver.step(v, index, a, own)
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_lcm_keeps_float32_latents_when_the_network_computes_in_bfloat16() -> None:
    solver = make_solver("lcm", 2, Schedule(ladder=(1.0, 0.5)), shift=1.0, card_solver="lcm")
    x = solver.step(noise(1).bfloat16(), 0, noise(0), torch.Generator().manual_seed(0))
    assert x.dtype == torch.float32


def test_an_unknown_solver_lists_the_names() -> None:
    with pytest.raises(UserError, match=r"'ueler'.*dpm2, euler, lcm, unipc"):
        make_solver("ueler", 2, Schedule(), shift=1.0, card_solver="euler")


# -- exactness

MU, C = 0.7, 0.4


def gaussian_velocity(x: torch.Tensor, s: float) -> torch.Tensor:
    variance = (1 - s) ** 2 * C**2 + s**2
    return -MU + (s - (1 - s) * C**2) / variance * (x - (1 - s) * MU)


def gaussian_solution(x: torch.Tensor, s: float) -> torch.Tensor:
    """x at sigma 0 of the path through ``x`` at sigma ``s``."""
    return MU + C * (x - (1 - s) * MU) / math.sqrt((1 - s) ** 2 * C**2 + s**2)


def error_after(name: str, steps: int) -> float:
    solver = solver_for(name, steps, shift=1.0)
    start = x = noise(2).double()
    for index in range(steps):
        x = solver.step(gaussian_velocity(x, solver.sigmas[index].item()), index, x)
    return (x - gaussian_solution(start, solver.sigmas[0].item())).abs().max().item()


def test_the_closed_form_solves_the_ode() -> None:
    """The oracle itself, checked by a small Runge-Kutta run that shares no code with the solvers."""
    start = x = noise(2).double()
    count = 2000
    h = -1 / count
    for i in range(count):
        s = 1 + i * h
        k1 = gaussian_velocity(x, s)
        k2 = gaussian_velocity(x + h / 2 * k1, s + h / 2)
        k3 = gaussian_velocity(x + h / 2 * k2, s + h / 2)
        k4 = gaussian_velocity(x + h * k3, s + h)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    torch.testing.assert_close(x, gaussian_solution(start, 1.0), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "bound"), [("euler", 1e-2), ("unipc", 1e-3), ("dpm2", 2e-3)])
def test_solvers_approach_the_exact_solution(name: str, bound: float) -> None:
    errors = [error_after(name, steps) for steps in (25, 50, 100, 200)]
    assert all(coarse > fine for coarse, fine in itertools.pairwise(errors)), errors
    assert errors[-1] < bound, errors


def test_euler_is_of_first_order() -> None:
    assert error_after("euler", 50) / error_after("euler", 100) == pytest.approx(2, abs=0.2)


# -- nobody shares one


@pytest.mark.parametrize("name", SOLVERS)
def test_two_requests_stepped_in_turn_do_not_mix(name: str) -> None:
    def alone(seed: int, steps: int) -> torch.Tensor:
        solver, x, draw = solver_for(name, steps), noise(seed), torch.Generator().manual_seed(seed)
        for index in range(steps):
            x = solver.step(toy_velocity(x, solver.timesteps[index]), index, x, draw)
        return x

    solvers, xs = [solver_for(name, 5), solver_for(name, 8)], [noise(3), noise(4)]
    draws = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    assert solvers[0].scheduler is not solvers[1].scheduler
    for index in range(8):
        for which, (solver, steps) in enumerate(zip(solvers, (5, 8), strict=True)):
            if index < steps:
                v = toy_velocity(xs[which], solver.timesteps[index])
                xs[which] = solver.step(v, index, xs[which], draws[which])
    assert torch.equal(xs[0], alone(3, 5))
    assert torch.equal(xs[1], alone(4, 8))
