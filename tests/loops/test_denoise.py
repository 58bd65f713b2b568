"""The denoising loop: a model whose ODE has a closed-form solution, and a real one that is stopped and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from loops.denoise import DenoiseLoop, initial_noise
from loops.drive import drive
from loops.guidance import combine, guidance_policy
from loops.loop import (
    Done,
    LoopContext,
    LoopState,
    ModelCall,
    Profile,
    SamplingParams,
    StepResult,
    WorkUnit,
)

PARAMS = SamplingParams(
    frames=5,
    height=16,
    width=16,
    steps=100,
    guidance=1.0,
    guidance_policy="sequential",
    solver="euler",
    shift=1.0,
    seed=11,
)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


class GaussianModel:
    """A model of data N(mu, C^2) where ``mu`` is what its "text" says: its velocity and its samples are known.

    With x_s = (1 - s) x0 + s e: v = -mu + (s - (1 - s) C^2) / q (x - (1 - s) mu), q = (1 - s)^2 C^2 + s^2, and the
    path from noise e ends in mu + C e. v is affine in mu, so guidance samples mu_u + g (mu_c - mu_u).
    """

    C = 0.4

    def __init__(self, card: ModelCard):
        self.card = card
        self.calls: list[ModelCall] = []

    def dtype(self, component: str) -> torch.dtype:
        return torch.float32

    def numerics(self, component: str) -> dict[str, Any]:
        return {"dtype": "float32"}

    def tokenize(self, prompt: str, max_sequence_length: int) -> dict[str, Tensor]:
        raise AssertionError("the loop under test encodes nothing")

    def call(self, call: ModelCall, profile: Profile = Profile.SERVE) -> Tensor:
        self.calls.append(call)
        x, text = call.tensors["latents"], call.tensors["text"]
        s = (call.tensors["timestep"] / 1000).view(-1, 1, 1, 1, 1)
        mu = text.mean(dim=(1, 2)).view(-1, 1, 1, 1, 1)
        q = (1 - s) ** 2 * self.C**2 + s**2
        return -mu + (s - (1 - s) * self.C**2) / q * (x - (1 - s) * mu)


@pytest.fixture(scope="module")
def card(wan_folder: Path) -> ModelCard:
    return card_of(wan_folder)


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return Engine().load(wan_folder)


def context(card: ModelCard, mu: float, mu_negative: float = 0.0, **options: object) -> LoopContext:
    slots = {"text": torch.full((1, 3, 2), mu), "negative_text": torch.full((1, 3, 2), mu_negative)}
    return LoopContext(spec=card.loops["denoise"], slots=slots, **options)  # type: ignore[arg-type]


def sample_error(card: ModelCard, params: SamplingParams, mu: float, mu_negative: float, expected_mu: float) -> float:
    model = GaussianModel(card)
    value = drive(DenoiseLoop(), params, model, context(card, mu, mu_negative)).value
    noise, _ = initial_noise(params.seed, tuple(value.shape[1:]))
    return (value - (expected_mu + GaussianModel.C * noise)).abs().max().item()


# -- closed form


@pytest.mark.parametrize(("solver", "bound"), [("euler", 2e-2), ("unipc", 5e-3), ("dpm2", 1e-2)])
def test_samples_approach_the_exact_solution(card: ModelCard, solver: str, bound: float) -> None:
    """UniPC and DPM2 see timesteps cut to integers, as in the library: that bounds what they can reach."""
    assert sample_error(card, replace(PARAMS, solver=solver), 0.5, 0.0, 0.5) < bound


@pytest.mark.parametrize("policy", ["sequential", "batched"])
def test_guided_samples_approach_the_exact_guided_solution(card: ModelCard, policy: str) -> None:
    guided = replace(PARAMS, guidance=4.0, guidance_policy=policy)
    expected = 0.1 + 4.0 * (0.5 - 0.1)
    coarse = sample_error(card, guided, 0.5, 0.1, expected)
    fine = sample_error(card, replace(guided, steps=200), 0.5, 0.1, expected)
    assert fine < 3e-2
    assert coarse / fine == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_the_solution_does_not_depend_on_the_grid(card: ModelCard, shift: float) -> None:
    """Each grid approaches the same solution, at Euler's first order."""
    coarse = sample_error(card, replace(PARAMS, shift=shift), 0.5, 0.0, 0.5)
    fine = sample_error(card, replace(PARAMS, shift=shift, steps=200), 0.5, 0.0, 0.5)
    assert fine < 6e-2
    assert coarse / fine == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize(
    ("guidance", "policy", "calls", "rows"),
    [(1.0, "sequential", 1, 1), (2.0, "sequential", 2, 1), (2.0, "batched", 1, 2)],
)
def test_a_step_evaluates_what_its_guidance_needs(
    card: ModelCard, guidance: float, policy: str, calls: int, rows: int
) -> None:
    model = GaussianModel(card)
    params = replace(PARAMS, steps=3, guidance=guidance, guidance_policy=policy)
    drive(DenoiseLoop(), params, model, context(card, 0.5))
    assert len(model.calls) == 3 * calls
    assert {call.rows for call in model.calls} == {rows}


def test_guidance_is_the_standard_convention() -> None:
    conditional, unconditional = torch.tensor([3.0]), torch.tensor([1.0])
    assert combine(conditional, unconditional, 0.0).item() == 1
    assert combine(conditional, unconditional, 1.0).item() == 3
    assert combine(conditional, unconditional, 5.0).item() == 11
    with pytest.raises(UserError, match=r"batched, sequential"):
        guidance_policy("batchde")


# -- asking changes nothing


def test_next_is_a_question(card: ModelCard) -> None:
    loop, model = DenoiseLoop(), GaussianModel(card)
    state = loop.init(replace(PARAMS, steps=3), model, context(card, 0.5))
    first, second = loop.next(state), loop.next(state)
    assert not isinstance(first, Done)
    assert not isinstance(second, Done)
    assert first.unit is WorkUnit.DIFFUSION_STEP
    assert first.label == second.label == "denoise 1/3"
    assert model.calls == []
    for name, tensor in first.calls[0].tensors.items():
        assert torch.equal(tensor, second.calls[0].tensors[name])


def test_noise_is_drawn_as_the_library_draws_it() -> None:
    noise, generator = initial_noise(5, (4, 3, 2, 2))
    again = torch.Generator("cpu").manual_seed(5)
    assert torch.equal(noise, randn_tensor((1, 4, 3, 2, 2), generator=again, dtype=torch.float32))
    assert torch.equal(torch.randn(3, generator=generator), torch.randn(3, generator=again))


# -- stop and resume


@pytest.mark.parametrize("solver", ["unipc", "dpm2", "euler"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_loop_resumed_half_way_ends_in_the_same_bits(instance: ModelInstance, solver: str, at: int) -> None:
    params = replace(PARAMS, steps=6, guidance=3.0, solver=solver, shift=3.0)
    generator = torch.Generator().manual_seed(0)
    slots = {name: torch.randn(1, 8, 24, generator=generator) for name in ("text", "negative_text")}
    ctx = LoopContext(
        spec=instance.card.loops["denoise"],
        slots=slots,
        profile=Profile.ROLLOUT,
        capture=frozenset({"trajectory", "velocities"}),
    )
    loop = DenoiseLoop()
    whole = drive(loop, params, instance, ctx)

    def step(state: LoopState) -> LoopState:
        plan = loop.next(state)
        assert not isinstance(plan, Done)
        return loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))

    state = loop.init(params, instance, ctx)
    for _ in range(at):
        state = step(state)
    saved = state.save()
    while not isinstance(loop.next(state), Done):
        state = step(state)
    for _ in range(2):  # the bytes are no one's state: they resume as often as one likes
        resumed = LoopState.resume(saved)
        assert resumed.step == at
        while not isinstance(loop.next(resumed), Done):
            resumed = step(resumed)
        result = loop.finalize(resumed)
        assert torch.equal(result.value, whole.value)
        assert result.behaviour is not None
        assert whole.behaviour is not None
        assert torch.equal(result.behaviour.trajectory, whole.behaviour.trajectory)  # type: ignore[arg-type]
        assert torch.equal(result.behaviour.velocities, whole.behaviour.velocities)  # type: ignore[arg-type]
    assert resumed.generator is not None
    assert state.generator is not None
    assert torch.equal(resumed.generator.get_state(), state.generator.get_state())


# -- behaviour


def scheduler(name: str, shift: float) -> object:
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift)
    if name == "unipc":
        return UniPCMultistepScheduler(flow_shift=shift, **FLOW)
    return DPMSolverMultistepScheduler(flow_shift=shift, solver_order=2, **FLOW)


@pytest.mark.parametrize("solver", ["unipc", "dpm2", "euler"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_captured_velocities_replay_into_the_captured_trajectory(
    instance: ModelInstance, solver: str, guidance: float
) -> None:
    artifact = Engine().run(
        Request(
            prompt="a red circle",
            seed=3,
            steps=5,
            guidance=guidance,
            solver=solver,
            shift=3.0,
            output="latents",
            profile=Profile.ROLLOUT,
            capture=("trajectory", "velocities"),
        ),
        instance,
    )
    behaviour = artifact.behaviour
    assert behaviour is not None
    assert behaviour.trajectory is not None
    assert behaviour.velocities is not None
    theirs = scheduler(solver, 3.0)
    theirs.set_timesteps(5)  # type: ignore[attr-defined]
    assert torch.equal(behaviour.sigmas, theirs.sigmas[:-1])  # type: ignore[attr-defined]
    assert torch.equal(behaviour.timesteps, theirs.timesteps)  # type: ignore[attr-defined]
    latents, _ = initial_noise(3, tuple(artifact.latents.shape))
    for index, timestep in enumerate(theirs.timesteps):  # type: ignore[attr-defined]
        assert torch.equal(behaviour.trajectory[index], latents[0])
        velocity = behaviour.velocities[index : index + 1]
        latents = theirs.step(velocity, timestep, latents, return_dict=False)[0]  # type: ignore[attr-defined]
    assert torch.equal(latents[0], artifact.latents)


def test_behaviour_is_for_rollouts_and_opt_in(instance: ModelInstance) -> None:
    request = Request(prompt="a", seed=0, steps=2, guidance=1.0, output="latents")
    assert Engine().run(request, instance).behaviour is None
    behaviour = Engine().run(replace(request, profile=Profile.ROLLOUT), instance).behaviour
    assert behaviour is not None
    assert behaviour.trajectory is None
    assert behaviour.velocities is None
    assert len(behaviour.sigmas) == 2
