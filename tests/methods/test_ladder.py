"""Few-step cards and backward simulation: the samples that train are the samples that are served, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchLCMScheduler, WanPipeline
from torch import Tensor

from cards.card import LoopMismatchError, ModelCard
from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.behaviour import behaviour_gate
from inference.parity.interleave import interleave_gate
from inference.request import Request
from inference.resolve import denoise_spec, resolve
from loops.denoise import DenoiseLoop
from loops.drive import drive
from loops.loop import Done, LoopContext, LoopState, StepResult
from methods.forward import encode_prompts
from methods.ladder import SEMANTICS, exit_rung, ladder_card, ladder_of, simulate

LADDER = (1.0, 0.9375, 0.8333, 0.625)
PROMPTS = ("a red circle", "the blue square moves left", "a green triangle")


@pytest.fixture(scope="module")
def instance(training: Any) -> ModelInstance:
    base = training.base()
    return base.view({}, card=ladder_card(base.card, LADDER))


def served(instance: ModelInstance, seeds: list[int], batching: str = "shape") -> Tensor:
    requests = [Request(prompt, seed=seed, output="latents") for prompt, seed in zip(PROMPTS, seeds, strict=False)]
    artifacts = Engine("cpu", batching=batching).run_interleaved(requests, instance)  # type: ignore[arg-type]
    return torch.stack([artifact.latents for artifact in artifacts])


def text_of(instance: ModelInstance, count: int) -> Tensor:
    return encode_prompts(Engine("cpu", batching="shape"), instance, PROMPTS[:count])


# -- the card


def test_a_ladder_card_says_what_its_loop_computes(training: Any) -> None:
    base: ModelCard = training.card
    card = ladder_card(base, LADDER)
    card.validate()
    loop = card.loops["denoise"]
    assert (loop.solver, loop.schedule.ladder, loop.schedule.shift) == ("lcm", LADDER, 1.0)
    assert loop.guidance.scale == 1.0 and loop.guidance.convention == "standard"
    assert loop.semantics == SEMANTICS == card.recipe.assumes_loop
    assert card.sampling.steps == 4 and ladder_of(card) == LADDER and ladder_of(base) is None
    assert card.digest != base.digest


def test_the_weights_of_a_ladder_are_refused_by_a_loop_of_another_kind(training: Any) -> None:
    card = ladder_card(training.card, LADDER)
    with pytest.raises(LoopMismatchError, match="few-step-renoise"):
        card.model_copy(update={"loops": training.card.loops}).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 50}, r"got steps=50.*use steps=4"),
        ({"shift": 5.0}, r"got shift=5\.0.*leave shift out"),
        ({"solver": "unipc"}, r"got solver='unipc'.*by 'lcm': leave solver out"),
    ],
)
def test_a_request_for_another_grid_is_a_mismatch(training: Any, fields: dict[str, Any], message: str) -> None:
    card = ladder_card(training.card, LADDER)
    with pytest.raises(LoopMismatchError, match=message):
        resolve(Request("a", seed=1, **fields), card)
    same = {"steps": 4, "solver": "lcm"}
    assert resolve(Request("a", seed=1, **same), card).params.steps == 4  # type: ignore[arg-type]


@pytest.mark.parametrize("ladder", [(0.5, 0.9), (1.0, 1.0), (1.2, 0.5), (0.5, 0.0), ()])
def test_an_invalid_ladder_is_refused(training: Any, ladder: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="is not descending within"):
        ladder_card(training.card, ladder).validate()


# -- serving


def test_the_served_latents_are_the_librarys_scheduler_in_its_own_pipeline(training: Any, instance: Any) -> None:
    """WanPipeline with FlowMatchLCMScheduler, which is told of the sigmas and the generator."""
    pipe = WanPipeline.from_pretrained(training.folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(5)
    scheduler = FlowMatchLCMScheduler(shift=1.0)
    set_timesteps, step = scheduler.set_timesteps, scheduler.step
    scheduler.set_timesteps = lambda count, device: set_timesteps(count, device=device, sigmas=list(LADDER))
    scheduler.step = lambda *args, **options: step(*args, generator=generator, **options)
    pipe.scheduler = scheduler
    theirs = pipe(
        PROMPTS[0],
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=1.0,
        max_sequence_length=12,
        generator=generator,
        output_type="latent",
    ).frames[0]
    assert torch.equal(served(instance, [5])[0], theirs)


def test_noise_is_drawn_by_request_whatever_runs_beside_it(instance: ModelInstance) -> None:
    report = interleave_gate(instance)
    assert report.difference == 0.0 and report.passed
    alone = torch.cat([served(instance, [7], "off")])
    assert torch.equal(served(instance, [7, 8, 9], "off")[0], alone[0])
    assert not torch.equal(served(instance, [8], "off")[0], alone[0])


def test_the_behaviour_gate_holds_on_the_ladder(instance: ModelInstance) -> None:
    assert behaviour_gate(instance, prompt="a red circle", seed=3).difference == 0.0


def test_a_request_that_is_saved_between_rungs_goes_on_with_the_same_noise(instance: ModelInstance) -> None:
    spec = denoise_spec(instance.card, "t2v")
    params = resolve(Request(PROMPTS[0], seed=4, output="latents"), instance.card).params
    ctx = LoopContext(spec=spec, slots={"text": text_of(instance, 1)})
    loop = DenoiseLoop()
    whole = drive(loop, params, instance, ctx).value
    state = loop.init(params, instance, ctx)
    for _ in range(4):
        state = LoopState.resume(state.save())
        plan = loop.next(state)
        assert not isinstance(plan, Done)
        state = loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))
    assert isinstance(loop.next(state), Done)
    assert torch.equal(loop.finalize(state).value, whole)


# -- backward simulation


@pytest.mark.parametrize("count", [1, 3])
def test_exit_at_the_last_rung_is_what_is_served_bit_for_bit(instance: ModelInstance, count: int) -> None:
    seeds = [11, 12, 13][:count]
    for gradient in (False, True):
        samples = simulate(instance, text_of(instance, count), seeds, 3, gradient=gradient)
        assert torch.equal(samples.detach(), served(instance, seeds))


@pytest.mark.parametrize("exit_at", [0, 1, 2])
def test_an_earlier_exit_is_the_prediction_at_its_rung(instance: ModelInstance, exit_at: int) -> None:
    """Told again by the library's scheduler: up to the exit its steps, there ``x - s v``."""
    text = text_of(instance, 1)
    generator = torch.Generator("cpu").manual_seed(11)
    scheduler = FlowMatchLCMScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=list(LADDER))
    x = torch.randn(1, 4, 3, 8, 8, generator=generator)
    transformer = instance.module("transformer")
    for index, timestep in enumerate(scheduler.timesteps):
        with torch.no_grad():
            v = transformer(x, timestep.expand(1), text, return_dict=False)[0]
        if index == exit_at:
            expected = x - scheduler.sigmas[index] * v
            break
        x = scheduler.step(v, timestep, x, generator=generator, return_dict=False)[0]
    assert torch.equal(simulate(instance, text, [11], exit_at, gradient=False), expected)


def test_one_forward_has_gradient_and_it_is_the_exits(training: Any) -> None:
    base = training.base()
    instance = base.view({}, card=ladder_card(base.card, LADDER))
    module = instance.module("transformer").requires_grad_(True)
    forwards: list[tuple[float, bool]] = []
    module.register_forward_hook(
        lambda _m, _a, kwargs, output: forwards.append((kwargs["timestep"][0].item(), output[0].requires_grad)),
        with_kwargs=True,
    )
    simulate(instance, text_of(instance, 2), [1, 2], 2, gradient=True).sum().backward()
    assert forwards == [(1000.0, False), (937.5, False), (pytest.approx(833.3), True)]
    assert all(p.grad is not None for p in module.parameters())


def test_samples_do_not_depend_on_what_else_is_simulated(instance: ModelInstance) -> None:
    both = simulate(instance, text_of(instance, 2), [1, 2], 3, gradient=False)
    alone = simulate(instance, text_of(instance, 1), [1], 3, gradient=False)
    torch.testing.assert_close(both[:1], alone, rtol=0, atol=1e-5)


# -- the exit


def test_the_exit_is_a_function_of_seed_and_step_and_uniform() -> None:
    exits = [exit_rung(4, 0, step) for step in range(400)]
    assert exits == [exit_rung(4, 0, step) for step in range(400)]
    assert exits != [exit_rung(4, 1, step) for step in range(400)]
    counts = [exits.count(rung) for rung in range(4)]
    assert min(counts) > 70 and sum(counts) == 400  # 100 +- 3.5 standard deviations of 8.7
    assert {exit_rung(1, 0, step) for step in range(5)} == {0}


def test_replace_keeps_a_resolved_request_on_the_ladder(instance: ModelInstance) -> None:
    """A request that names the ladder's own numbers is the same request."""
    plain = Request(PROMPTS[0], seed=2, output="latents")
    engine = Engine("cpu")
    a = engine.run(plain, instance).latents
    b = engine.run(replace(plain, steps=4, solver="lcm", guidance=1.0), instance).latents
    assert torch.equal(a, b)
