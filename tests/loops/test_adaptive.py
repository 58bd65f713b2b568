"""Loops that do less where the content allows it: the base loop at threshold 0, a hand-written one elsewhere, and the
library's First Block Cache in its own pipeline."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from torch import Tensor

from cards.card import LoopMismatchError, ModelCard, Schedule
from cards.errors import UserError
from cards.wan21.card import with_denoise_loop
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.interleave import interleave_gate
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resolve import resolve
from loops.adaptive import Evaluated
from loops.denoise import initial_noise
from loops.loop import Done, LoopContext, LoopState, Profile, StepResult
from loops.registry import loop_of_kind

SKIP, EXIT, FIRST_BLOCK = (f"diffusion_denoise_{name}" for name in ("skip", "exit", "first_block"))
REQUEST = Request(
    prompt="a red circle",
    seed=1,
    steps=8,
    guidance=1.0,
    solver="euler",
    frames=5,
    height=16,
    width=16,
    output="latents",
)
SOME = {SKIP: 0.3, EXIT: 0.2, FIRST_BLOCK: 0.2}
"""A threshold of each kind at which some of the work of the random model is left out and some is not."""


@pytest.fixture(scope="module")
def base(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


def adaptive(base: ModelInstance, kind: str, threshold: float, **options: Any) -> ModelInstance:
    return base.view({}, with_denoise_loop(base.card, kind, threshold=threshold, **options))


@contextlib.contextmanager
def evaluations(instance: ModelInstance, block: int = 0) -> Iterator[list[float]]:
    """Timesteps of the forwards that reach a block of the transformer."""
    transformer: Any = instance.module("transformer")
    seen: list[float] = []
    now: list[float] = []
    handles = [
        transformer.register_forward_pre_hook(
            lambda _m, _a, kwargs: now.append(kwargs["timestep"][0].item()), with_kwargs=True
        ),
        # Its feed-forward: a block whose own forward is left out does not call it.
        transformer.blocks[block].ffn.register_forward_pre_hook(lambda *_: seen.append(now[-1])),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def scheduler(name: str, shift: float) -> Any:
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift)
    return UniPCMultistepScheduler(flow_shift=shift, prediction_type="flow_prediction", use_flow_sigmas=True)


def start(instance: ModelInstance, request: Request) -> tuple[Any, LoopState]:
    """The denoising loop of a request at its first step."""
    card = instance.card
    slots = drive_request(instance, replace(request, steps=1))
    ctx = LoopContext(card.loops["denoise"], slots, request.profile, frozenset(request.capture))
    loop = loop_of_kind(card.loops["denoise"].kind)
    return loop, loop.init(resolve(request, card).params, instance, ctx)


def run(loop: Any, state: LoopState, instance: ModelInstance, steps: int = 1000) -> LoopState:
    while steps and not isinstance(plan := loop.next(state), Done):
        state = loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))
        steps -= 1
    return state


# -- threshold 0


@pytest.mark.parametrize("kind", [SKIP, EXIT, FIRST_BLOCK])
@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, solver="unipc", guidance=3.0, steps=5),
        replace(REQUEST, solver="dpm2", guidance=3.0, guidance_policy="batched", steps=4),
    ],
    ids=["euler", "unipc-guided", "dpm2-batched"],
)
def test_threshold_0_is_the_base_loop_to_the_bit(base: ModelInstance, kind: str, request_: Request) -> None:
    instance = adaptive(base, kind, 0.0)
    asked = replace(request_, profile=Profile.ROLLOUT, capture=("trajectory", "velocities"))
    with evaluations(base) as seen:
        ours = Engine().run(asked, instance)
    forwards = len(seen)
    with evaluations(base) as seen:
        theirs = Engine().run(asked, base)
    assert torch.equal(ours.latents, theirs.latents)
    assert forwards == len(seen)
    assert ours.behaviour is not None
    assert theirs.behaviour is not None
    for name in ("sigmas", "timesteps", "trajectory", "velocities"):
        assert torch.equal(getattr(ours.behaviour, name), getattr(theirs.behaviour, name)), name


# -- skipping, against a loop written by hand


def by_hand(
    base: ModelInstance, request: Request, threshold: float, order: int, first: int, last: int, most: int | None
) -> tuple[Tensor, list[float]]:
    """Latents and evaluated timesteps, with the library's scheduler and the module itself."""
    slots = drive_request(base, replace(request, steps=1))
    transformer = base.module("transformer")
    sampler = scheduler(request.solver or "", base.card.loops["denoise"].schedule.shift)
    sampler.set_timesteps(request.steps)
    params = resolve(request, base.card).params
    latents, _ = initial_noise(params.seed, base.card.geometry.latent_shape(params.frames, params.height, params.width))
    texts = [slots["text"], slots["negative_text"]] if params.guided else [slots["text"]]
    history: list[tuple[float, list[Tensor]]] = []
    evaluated: list[float] = []
    total, row, previous = 0.0, 0, latents
    for index, timestep in enumerate(sampler.timesteps):
        total += float((latents - previous).abs().sum() / previous.abs().sum())
        previous = latents
        sigma = float(sampler.sigmas[index])
        forced = index < first or index >= params.steps - last or row == most
        if not forced and total < threshold:
            row += 1
            (s1, outputs), *older = history
            if older and order:
                s2, before = older[0]
                outputs = [v1 + (sigma - s1) / (s1 - s2) * (v1 - v2) for v1, v2 in zip(outputs, before, strict=True)]
        else:
            total, row = 0.0, 0
            with torch.no_grad():
                outputs = [transformer(latents, timestep.expand(1), text, return_dict=False)[0] for text in texts]
            history = [(sigma, outputs), *history][:2]
            evaluated += [timestep.item()] * len(texts)
        velocity = outputs[0] if len(outputs) == 1 else outputs[1] + params.guidance * (outputs[0] - outputs[1])
        latents = sampler.step(velocity, timestep, latents, return_dict=False)[0]
    return latents, evaluated


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(
    ("threshold", "options"),
    [
        (0.3, {}),
        (0.3, {"order": 1}),
        (0.6, {"first": 2, "last": 3}),
        (5.0, {"most_in_a_row": 2, "last": 0}),
        (5.0, {}),
    ],
)
def test_skipping_is_a_loop_written_by_hand(
    base: ModelInstance, solver: str, guidance: float, threshold: float, options: dict[str, Any]
) -> None:
    request = replace(REQUEST, steps=12, solver=solver, guidance=guidance)
    order, first, last = options.get("order", 0), options.get("first", 1), options.get("last", 1)
    latents, timesteps = by_hand(base, request, threshold, order, first, last, options.get("most_in_a_row"))
    branches = 2 if guidance > 1 else 1
    assert 2 * branches <= len(timesteps) < 12 * branches
    with evaluations(base) as seen:
        ours = Engine().run(request, adaptive(base, SKIP, threshold, **options))
    assert seen == timesteps
    assert torch.equal(ours.latents, latents[0])


def test_a_larger_threshold_evaluates_less_and_never_less_than_both_ends(base: ModelInstance) -> None:
    counts = []
    for threshold in (0.0, 0.1, 0.2, 0.4, 0.8, 1e9):
        with evaluations(base) as seen:
            Engine().run(replace(REQUEST, steps=16), adaptive(base, SKIP, threshold))
        counts.append(len(seen))
    print(f"evaluations of 16: {counts}")
    assert counts[0] == 16
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 3
    assert counts[-1] == 2


def test_skipped_steps_are_in_the_record_and_replay(base: ModelInstance) -> None:
    """The record says what the solver was told; held velocities repeat."""
    request = replace(REQUEST, steps=12, profile=Profile.ROLLOUT, capture=("trajectory", "velocities"))
    artifact = Engine().run(request, adaptive(base, SKIP, 0.3))
    behaviour = artifact.behaviour
    assert behaviour is not None
    assert behaviour.trajectory is not None
    assert behaviour.velocities is not None
    sampler = scheduler("euler", base.card.loops["denoise"].schedule.shift)
    sampler.set_timesteps(12)
    latents = behaviour.trajectory[:1]
    for index, timestep in enumerate(sampler.timesteps):
        assert torch.equal(behaviour.trajectory[index], latents[0])
        latents = sampler.step(behaviour.velocities[index : index + 1], timestep, latents, return_dict=False)[0]
    assert torch.equal(latents[0], artifact.latents)
    repeated = [torch.equal(a, b) for a, b in itertools.pairwise(behaviour.velocities)]
    assert any(repeated)
    assert not all(repeated)


def test_a_line_through_two_evaluations_is_exact_where_the_velocity_is_one() -> None:
    slope, level = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 3.0])
    kept = Evaluated((), ()).then(0.9, level + 0.9 * slope, 1)
    assert torch.equal(kept.at(0.1), level + 0.9 * slope)
    kept = kept.then(0.7, level + 0.7 * slope, 1)
    torch.testing.assert_close(kept.at(0.2), level + 0.2 * slope)
    assert Evaluated((), ()).then(0.9, level, 0).then(0.7, slope, 0).velocities[0].data_ptr() != slope.data_ptr()
    assert len(kept.then(0.5, level, 1).velocities) == 2
    assert torch.equal(kept.then(0.5, level, 0).at(0.1), level)


# -- an early end


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize(("threshold", "patience"), [(0.2, 1), (0.3, 3), (1e9, 2)])
def test_the_loop_ends_at_the_prediction_once_it_has_settled(
    base: ModelInstance, guidance: float, solver: str, threshold: float, patience: int
) -> None:
    """The base loop's own record says where: it takes the same steps until then."""
    request = replace(
        REQUEST,
        steps=16,
        guidance=guidance,
        solver=solver,
        profile=Profile.ROLLOUT,
        capture=("trajectory", "velocities"),
    )
    whole = Engine().run(request, base).behaviour
    assert whole is not None
    assert whole.trajectory is not None
    assert whole.velocities is not None
    x0 = [x - float(s) * v for x, s, v in zip(whole.trajectory, whole.sigmas, whole.velocities, strict=True)]
    changes = [float((b - a).abs().sum() / a.abs().sum()) for a, b in itertools.pairwise(x0)]
    end = next(k for k in range(patience, 16) if all(c < threshold for c in changes[k - patience : k]))
    assert end < 15
    with evaluations(base) as seen:
        ours = Engine().run(request, adaptive(base, EXIT, threshold, patience=patience))
    assert len(seen) == (end + 1) * (2 if guidance > 1 else 1)
    assert torch.equal(ours.latents, x0[end])
    assert ours.behaviour is not None
    for name in ("sigmas", "timesteps", "trajectory", "velocities"):
        assert torch.equal(getattr(ours.behaviour, name), getattr(whole, name)[: end + 1]), name


def test_an_early_end_is_complete_and_has_a_video(base: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(replace(REQUEST, steps=16, output="video"), adaptive(base, EXIT, 1e9))
    while engine.tick():
        pass
    assert handle.result().video is not None
    done, announced = handle.progress
    assert done == announced == 1 + 3 + 1  # encode; two quiet steps after the first; decode


# -- blocks of a forward, against the library's own pipeline


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("threshold", [0.1, 0.25, 1e9])
def test_first_block_cache_is_the_librarys_pipeline_with_its_cache_enabled(
    base: ModelInstance, wan_folder: Path, guidance: float, threshold: float
) -> None:
    request = replace(REQUEST, guidance=guidance, negative_prompt="blue", solver=None, steps=10)
    pipeline = WanPipeline.from_pretrained(wan_folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    theirs = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        num_frames=request.frames,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        guidance_scale=guidance,
        max_sequence_length=16,
        generator=torch.Generator("cpu").manual_seed(1),
        output_type="latent",
    ).frames
    with evaluations(base, block=1) as seen:
        ours = Engine().run(request, adaptive(base, FIRST_BLOCK, threshold))
    print(f"threshold {threshold}, guidance {guidance}: {len(seen)} forwards reach the second block")
    assert torch.equal(ours.latents, theirs[0])
    branches = 2 if guidance > 1 else 1
    if threshold > 1:
        assert len(seen) == branches
    assert len(seen) < 10 * branches


def test_the_module_is_left_as_it_was(base: ModelInstance) -> None:
    """Between two forwards of one request nothing is on it: others and training see a plain transformer."""
    plain = Engine().run(REQUEST, base).latents
    instance = adaptive(base, FIRST_BLOCK, 0.2)
    loop, state = start(instance, REQUEST)
    state = run(loop, state, instance, steps=2)
    transformer: Any = base.module("transformer")
    assert not transformer.is_cache_enabled
    assert not [
        module
        for module in transformer.modules()
        if getattr(module, "_diffusers_hook", None) and module._diffusers_hook.hooks
    ]
    assert torch.equal(Engine().run(REQUEST, base).latents, plain)
    assert torch.equal(loop.finalize(run(loop, state, instance)).value[0], Engine().run(REQUEST, instance).latents)


def test_a_forward_that_raises_leaves_module_and_memory(base: ModelInstance) -> None:
    instance = adaptive(base, FIRST_BLOCK, 0.2)
    loop, state = start(instance, REQUEST)
    state = run(loop, state, instance, steps=3)
    transformer: Any = base.module("transformer")

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    handle = transformer.proj_out.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of luck"):
            run(loop, state, instance)
    finally:
        handle.remove()
    assert not transformer.is_cache_enabled
    assert torch.equal(loop.finalize(run(loop, state, instance)).value[0], Engine().run(REQUEST, instance).latents)


def test_a_transformer_of_one_block_says_so(make_wan_folder: Any) -> None:
    card = card_of(make_wan_folder(layers=1, seed=5))
    with pytest.raises(UserError, match="one block"):
        Engine().run(REQUEST, ModelInstance.load(with_denoise_loop(card, FIRST_BLOCK, threshold=0.1)))


# -- requests side by side


@pytest.mark.parametrize("kind", [SKIP, EXIT, FIRST_BLOCK])
def test_mixed_requests_interleaved_are_serial_to_the_bit(base: ModelInstance, kind: str) -> None:
    instance = adaptive(base, kind, SOME[kind])
    requests = [
        replace(REQUEST, steps=12),
        replace(REQUEST, prompt="two blue squares", seed=2, steps=9, guidance=3.0, output="video"),
        replace(REQUEST, prompt="", seed=3, steps=12, guidance=5.0, solver="unipc", guidance_policy="batched"),
        replace(REQUEST, seed=4, steps=5, solver="dpm2"),
    ]
    with evaluations(base, block=1) as seen:
        report = interleave_gate(instance, requests)
    assert report.difference == 0
    with evaluations(base, block=1) as all_:
        interleave_gate(adaptive(base, kind, 0.0), requests)
    assert 0 < len(seen) < len(all_)
    batched = interleave_gate(instance, requests, batching="shape")
    print(f"{kind}: {len(seen)} of {len(all_)} forwards; batched differs from serial by {batched.difference:.1e}")
    assert batched.passed


def test_cards_of_several_kinds_share_one_engine_and_its_modules(base: ModelInstance) -> None:
    instances = [base, *(adaptive(base, kind, SOME[kind]) for kind in SOME), adaptive(base, SKIP, 1.0, order=1)]
    alone = [Engine().run(REQUEST, instance).latents for instance in instances]
    assert len({latents.sum().item() for latents in alone}) == len(alone)
    engine = Engine()
    handles = [engine.submit(REQUEST, instance) for instance in instances]
    while engine.tick():
        pass
    for handle, expected in zip(handles, alone, strict=True):
        assert torch.equal(handle.result().latents, expected)


@pytest.mark.parametrize("kind", [SKIP, EXIT, FIRST_BLOCK])
@pytest.mark.parametrize("at", [1, 3])
def test_a_loop_saved_half_way_ends_in_the_same_bits(base: ModelInstance, kind: str, at: int) -> None:
    instance = adaptive(base, kind, SOME[kind])
    request = replace(REQUEST, steps=12, guidance=3.0, solver="unipc")
    loop, state = start(instance, request)
    saved = run(loop, state, instance, steps=at).save()
    expected = Engine().run(request, instance).latents
    for _ in range(2):
        assert torch.equal(loop.finalize(run(loop, LoopState.resume(saved), instance)).value[0], expected)


@pytest.mark.parametrize("kind", [SKIP, EXIT, FIRST_BLOCK])
def test_next_is_a_question(base: ModelInstance, kind: str) -> None:
    instance = adaptive(base, kind, SOME[kind])
    loop, state = start(instance, replace(REQUEST, guidance=3.0))
    state = run(loop, state, instance, steps=2)
    before = state.save()
    with evaluations(base) as seen:
        first, second = loop.next(state), loop.next(state)
    assert seen == []
    assert first.label == second.label
    assert all(
        torch.equal(a.tensors["latents"], b.tensors["latents"]) for a, b in zip(first.calls, second.calls, strict=True)
    )
    assert state.save() == before


# -- what a card may say


@pytest.mark.parametrize("kind", [SKIP, EXIT, FIRST_BLOCK])
def test_a_card_with_a_ladder_refuses(base: ModelInstance, kind: str) -> None:
    card = with_denoise_loop(base.card, kind, threshold=0.1)
    spec = card.loops["denoise"].model_copy(update={"schedule": Schedule(ladder=(1.0, 0.9375, 0.625))})
    few = card.model_copy(update={"loops": {"denoise": spec}})
    with pytest.raises(LoopMismatchError, match=r"distilled for the ladder \[1\.0, 0\.9375, 0\.625\].*every rung"):
        ModelInstance.load(few)
    with pytest.raises(LoopMismatchError, match="every rung"):
        Engine().run(Request(prompt="a", output="latents"), base.view({}, few))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SKIP, {}, "threshold: got .*Field required"),
        (SKIP, {"threshold": -0.1}, r"threshold: got -0\.1"),
        (EXIT, {"threshold": float("nan")}, "threshold: got nan"),
        (SKIP, {"threshold": 0.1, "treshold": 0.2}, r"treshold.*its options: threshold, order, first, last"),
        (SKIP, {"threshold": 0.1, "order": 2, "first": 0}, r"order: got 2.*first: got 0"),
        (EXIT, {"threshold": 0.1, "patience": 0}, "patience: got 0"),
        (FIRST_BLOCK, {"threshold": "0.1"}, "threshold: got '0.1'"),
    ],
)
def test_a_card_with_wrong_options_does_not_load(
    base: ModelInstance, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ModelInstance.load(with_denoise_loop(base.card, kind, **options))


def test_a_card_says_that_the_steps_depend_on_the_content(base: ModelInstance) -> None:
    card = with_denoise_loop(base.card, SKIP, threshold=0.1)
    assert card.loops["denoise"].dynamic_stop
    assert card.problems() == []
    assert ModelCard.from_json(card.to_json()).digest == card.digest
    assert card.recipe.parents[0] == base.card.digest
    still = card.loops["denoise"].model_copy(update={"dynamic_stop": False})
    with pytest.raises(UserError, match="dynamic_stop=false"):
        ModelInstance.load(card.model_copy(update={"loops": {"denoise": still}}))
    assert not with_denoise_loop(card, "diffusion_denoise").loops["denoise"].dynamic_stop
