"""Requests with noise in their steps: what they keep, that they share an engine to the bit, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.card import ModelCard, Schedule
from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.interleave import artifact_difference, interleave_gate
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resolve import resolve
from loops.denoise import initial_noise
from loops.flow import euler_step
from loops.loop import SDE, Profile
from loops.sde import SDE_KINDS, sde_step
from tests.support.tiny_i2v import picture, write_i2v_folder

BASE = Request(
    prompt="a red circle",
    seed=3,
    steps=4,
    guidance=1.0,
    solver="euler",
    output="latents",
    profile=Profile.ROLLOUT,
    capture=("trajectory", "velocities"),
    sde=SDE(),
)
MIXED = (
    BASE,
    replace(BASE, seed=4, sde=SDE("dance", 0.3), guidance=3.0),
    replace(BASE, seed=5, sde=SDE("cps", 0.8), steps=3, output="video"),
    replace(BASE, seed=6, sde=SDE(window=(1, 3)), prompt="the blue square", guidance=2.0, guidance_policy="batched"),
    replace(BASE, seed=6, sde=SDE(window=(1, 3), seed=11)),
    replace(BASE, seed=7, sde=None),
    replace(BASE, seed=8, sde=SDE(), profile=Profile.SERVE, capture=()),
    replace(BASE, seed=9, sde=None, solver="unipc", profile=Profile.SERVE, capture=()),
)


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return Engine().load(wan_folder)


@pytest.fixture(scope="module")
def card(wan_folder: Path) -> ModelCard:
    return card_of(wan_folder)


# -- what a rollout is, and what it keeps


@pytest.mark.parametrize("kind", SDE_KINDS)
@pytest.mark.parametrize("window", [None, (0, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_rollout_replays_from_its_seed_and_velocities(
    instance: ModelInstance, kind: str, window: tuple[int, int] | None, guidance: float
) -> None:
    """Noise in the window alone, drawn by the request's generator after its first latents; Euler elsewhere."""
    artifact = Engine().run(replace(BASE, sde=SDE(kind, 0.7, window), guidance=guidance), instance)
    behaviour = artifact.behaviour
    assert behaviour is not None and behaviour.trajectory is not None and behaviour.velocities is not None
    assert behaviour.sde_states is not None and behaviour.sde_sigmas is not None
    assert behaviour.sde_log_probs is not None and behaviour.sde_steps is not None
    noisy = range(*(window if window is not None else (0, 4)))
    assert behaviour.sde_steps.tolist() == list(noisy)
    assert len(behaviour.sde_states) == len(behaviour.sde_sigmas) == len(noisy) + 1
    grid = torch.cat([behaviour.sigmas, torch.zeros(1)])
    assert torch.equal(behaviour.sde_sigmas, grid[noisy.start : noisy.stop + 1])
    latents, draw = initial_noise(3, tuple(artifact.latents.shape))
    for index in range(4):
        assert torch.equal(behaviour.trajectory[index], latents[0])
        velocity = behaviour.velocities[index : index + 1]
        if index not in noisy:
            latents = euler_step(latents, velocity, grid[index], grid[index + 1])
            continue
        place = index - noisy.start
        assert torch.equal(behaviour.sde_states[place], latents[0])
        reached = sde_step(kind, latents, velocity, grid[index : index + 1], grid[index + 1 : index + 2], 0.7)
        latents = reached.sample(torch.randn(latents.shape, generator=draw))
        assert torch.equal(behaviour.sde_states[place + 1], latents[0])
        assert torch.equal(behaviour.sde_log_probs[place : place + 1], reached.log_prob(latents))
    assert torch.equal(latents[0], artifact.latents)


def test_the_conditions_are_what_the_forwards_took(instance: ModelInstance) -> None:
    behaviour = Engine().run(replace(BASE, guidance=3.0), instance).behaviour
    assert behaviour is not None and behaviour.conditions is not None
    slots = drive_request(instance, replace(BASE, guidance=3.0))
    assert set(behaviour.conditions) == {"text", "negative_text"}
    assert all(torch.equal(tensor, slots[name]) for name, tensor in behaviour.conditions.items())
    plain = Engine().run(BASE, instance).behaviour
    assert plain is not None and plain.conditions is not None and set(plain.conditions) == {"text"}


def test_a_card_with_a_first_frame_keeps_what_was_encoded_of_it(tmp_path: Path) -> None:
    instance = Engine().load(write_i2v_folder(tmp_path / "i2v"))
    size = {"frames": 5, "height": 16, "width": 16}
    task = next(iter(instance.card.programs))
    requests = [
        replace(BASE, task=task, seed=seed, inputs={"image": picture(16, 16, seed)}, **size)  # type: ignore[arg-type]
        for seed in range(2)
    ]
    artifacts = Engine().run_interleaved(requests, instance)
    kept: list[Any] = [artifact.behaviour.conditions for artifact in artifacts if artifact.behaviour is not None]
    assert [set(conditions) for conditions in kept] == [{"text", "condition", "image_embeds"}] * 2
    assert not torch.equal(kept[0]["condition"], kept[1]["condition"])
    assert interleave_gate(instance, requests).difference == 0


def test_a_served_request_is_the_rollout_and_keeps_nothing(instance: ModelInstance) -> None:
    rollout = Engine().run(BASE, instance)
    served = Engine().run(replace(BASE, profile=Profile.SERVE, capture=()), instance)
    assert torch.equal(rollout.latents, served.latents)
    assert served.behaviour is None


def test_another_seed_or_level_is_another_sample(instance: ModelInstance) -> None:
    latents = [
        Engine().run(request, instance).latents
        for request in (BASE, replace(BASE, seed=4), replace(BASE, sde=SDE(level=0.3)), replace(BASE, sde=None))
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(latents) for b in latents[:i])


def test_a_seed_of_its_own_sets_samples_apart_that_start_alike(instance: ModelInstance) -> None:
    apart = [replace(BASE, sde=SDE(window=(1, 3), seed=seed)) for seed in (1, 2)]
    first, second = (Engine().run(request, instance).behaviour for request in apart)
    assert first is not None and first.trajectory is not None
    assert second is not None and second.trajectory is not None
    start, draw = initial_noise(3, tuple(first.trajectory[0].shape))[0][0], torch.Generator().manual_seed(1)
    assert torch.equal(first.trajectory[0], start) and torch.equal(second.trajectory[0], start)
    assert torch.equal(first.trajectory[1], second.trajectory[1])  # a step of the ODE
    assert not torch.equal(first.trajectory[2], second.trajectory[2])
    moved = replace(BASE, seed=4, sde=SDE(window=(1, 3), seed=1))
    assert not torch.equal(Engine().run(moved, instance).latents, Engine().run(apart[0], instance).latents)
    assert first.sde_states is not None and first.velocities is not None and first.sde_sigmas is not None
    reached = sde_step(
        "flow", first.trajectory[1:2], first.velocities[1:2], first.sde_sigmas[:1], first.sde_sigmas[1:2], 0.7
    )
    assert torch.equal(reached.sample(torch.randn((1, *start.shape), generator=draw))[0], first.sde_states[1])


# -- off by default


def test_a_request_without_one_keeps_what_it_kept_before(instance: ModelInstance) -> None:
    behaviour = Engine().run(replace(BASE, sde=None), instance).behaviour
    assert behaviour is not None
    names = ("sde_steps", "sde_sigmas", "sde_states", "sde_log_probs", "conditions")
    assert all(getattr(behaviour, name) is None for name in names)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_serving_path_never_enters_the_sde(
    instance: ModelInstance, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits whether or not the SDE's code is there at all."""
    request = replace(BASE, sde=None, guidance=guidance, profile=Profile.SERVE, capture=())
    with_code = Engine().run(request, instance).latents

    def gone(*_: Any) -> None:
        raise AssertionError("a request without an SDE entered it")

    monkeypatch.setattr("loops.denoise.sde_step", gone)
    assert torch.equal(Engine().run(request, instance).latents, with_code)


# -- several at once


def test_interleaved_requests_are_serial_to_the_bit(instance: ModelInstance) -> None:
    report = interleave_gate(instance, MIXED)
    assert report.difference == 0 and report.passed


def test_batched_requests_are_serial_within_the_tolerance(instance: ModelInstance) -> None:
    report = interleave_gate(instance, MIXED, batching="shape")
    print(f"batched differs from serial by {report.difference:.1e}")
    assert report.passed


def test_the_gate_sees_a_difference_in_what_an_sde_request_kept(instance: ModelInstance) -> None:
    artifact = Engine().run(BASE, instance)
    behaviour = artifact.behaviour
    assert behaviour is not None and behaviour.sde_log_probs is not None and behaviour.conditions is not None
    off = replace(behaviour, sde_log_probs=behaviour.sde_log_probs + 0.5)
    assert artifact_difference(artifact, replace(artifact, behaviour=off)) == 0.5
    off = replace(behaviour, conditions={"text": behaviour.conditions["text"] + 0.25})
    assert artifact_difference(artifact, replace(artifact, behaviour=off)) == pytest.approx(0.25, rel=1e-5)
    off = replace(behaviour, conditions={**behaviour.conditions, "more": torch.zeros(1)})
    assert artifact_difference(artifact, replace(artifact, behaviour=off)) == math.inf
    off = replace(behaviour, sde_states=None)
    assert artifact_difference(artifact, replace(artifact, behaviour=off)) == math.inf


def test_a_suspended_request_goes_on_to_the_same_bits(instance: ModelInstance) -> None:
    whole = Engine().run(BASE, instance)
    engine = Engine()
    handle = engine.submit(BASE, instance)
    for _ in range(3):
        engine.tick()
    handle.suspend()
    engine.tick()
    assert handle.state == "suspended"
    handle.resume()
    while engine.tick():
        pass
    assert artifact_difference(handle.result(), whole) == 0


# -- what is refused


BAD: tuple[tuple[Any, str], ...] = (
    ("flow", "sde: got 'flow', expected an SDE"),
    (SDE("flwo"), "'flwo'; expected one of: cps, dance, flow"),
    (SDE(level=0.0), "sde level: got 0.0, expected a number > 0; for the ODE leave sde out"),
    (SDE(level=math.nan), "sde level: got nan"),
    (SDE(level="much"), "sde level: got 'much'"),  # type: ignore[arg-type]
    (SDE("cps", 1.1), "sde level: got 1.1, expected at most 1 for cps"),
    (SDE(window=(2, 2)), r"sde window: got \(2, 2\), expected \(start, stop\) with 0 <= start < stop <= steps = 4"),
    (SDE(window=(0, 5)), r"sde window: got \(0, 5\)"),
    (SDE(window=(-1, 2)), r"sde window: got \(-1, 2\)"),
    (SDE(window=(0, 1.5)), r"sde window: got \(0, 1.5\)"),  # type: ignore[arg-type]
    (SDE(window=3), "sde window: got 3"),  # type: ignore[arg-type]
    (SDE(seed=-1), "sde seed: got -1, expected 0 .. 2"),
    (SDE(seed=0.5), "sde seed: got 0.5"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("sde", "message"), BAD)
def test_a_bad_sde_is_refused_with_what_was_got(card: ModelCard, sde: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(replace(BASE, sde=sde), card)


@pytest.mark.parametrize("solver", ["unipc", "dpm2", "lcm", None])
def test_a_solver_of_several_steps_is_refused(card: ModelCard, solver: str | None) -> None:
    with pytest.raises(UserError, match=rf"sde: got solver='{solver or 'unipc'}', expected 'euler'"):
        resolve(replace(BASE, solver=solver), card)


def test_a_few_step_card_is_refused(card: ModelCard) -> None:
    loop = card.loops["denoise"].model_copy(update={"solver": "lcm", "schedule": Schedule(ladder=(1.0, 0.5))})
    few = card.derive(loops={"denoise": loop})
    with pytest.raises(UserError, match="sde: got solver='lcm', expected 'euler'"):
        resolve(replace(BASE, solver=None, steps=None), few)


@pytest.mark.parametrize(
    "kind", ["diffusion_denoise_skip", "diffusion_denoise_first_block", "diffusion_denoise_exit", "chunk_rollout"]
)
def test_a_loop_that_does_not_take_it_is_refused_before_anything_loads(card: ModelCard, kind: str) -> None:
    loop = card.loops["denoise"].model_copy(update={"kind": kind})
    with pytest.raises(UserError, match=rf"sde: got one for a loop of kind '{kind}'.*diffusion_denoise, diffusion_d"):
        resolve(BASE, card.derive(loops={"denoise": loop}))
