"""The chunked rollout: the library's forward under a dense mask, evaluated anew for each step, is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from cards.card import CARD_FILE, Source
from cards.errors import UserError
from cards.wan_causal.card import card_from_folder, with_rollout
from inference.admission import AdmissionInfeasible, Budget
from inference.engine import Cancelled, Engine
from inference.instance import ModelInstance
from inference.parity.__main__ import main
from inference.parity.chunks import chunk_gate, text_features
from inference.parity.interleave import artifact_difference, interleave_gate
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resolve import resolve
from inference.slab_kv import features_bytes, slab_bytes
from loops.chunk_rollout import FEATURES, ChunkRolloutLoop, rollout, rollout_noises
from loops.loop import Done, LoopContext, LoopState, ModelCall, Profile, StepResult

LADDER = (1.0, 0.9375, 2.5 / 3, 0.625)
"""[1000, 750, 500, 250] / 1000 under a shift of 5."""
REQUEST = Request(prompt="a red circle moves left", seed=5, frames=13, height=16, width=16)
"""Four chunks of one latent frame."""


@pytest.fixture(scope="module")
def folder(make_wan_folder: Callable[..., Path]) -> Path:
    return make_wan_folder(seed=3)


def load(folder: Path, **options: Any) -> ModelInstance:
    card = card_from_folder(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "height": 16, "width": 16})
    return Engine().load(with_rollout(card.model_copy(update={"sampling": short}), **options))


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return load(folder)


def text_of(instance: ModelInstance, request: Request = REQUEST) -> Tensor:
    return text_features(instance, request)


def drawn(seed: int, chunks: int, draws: int, chunk: int = 1) -> list[list[Tensor]]:
    """The noises of a request, from its generator alone."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return [
        [torch.randn(1, 4, chunk, 4, 4, generator=generator, dtype=torch.float32) for _ in range(draws)]
        for _ in range(chunks)
    ]


@torch.no_grad()
def oracle(
    folder: Path, text: Tensor, noises: list[list[Tensor]], *, window: int | None = None, context: float = 0.0
) -> Tensor:
    """Latents (1, C, T, H, W) by formulas and the library's module, without a cache."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    class Masked(WanAttnProcessor):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden: Tensor, text: Any = None, mask: Any = None, rotary: Any = None) -> Tensor:
            tokens = hidden.shape[1]
            chunk = torch.arange(tokens) // (4 * noises[0][0].shape[2])
            seen = chunk[None] <= chunk[:, None]
            if window is not None:
                seen &= chunk[None] > chunk[:, None] - window
            return super().__call__(attn, hidden, text, seen[None, None], rotary)

    net = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").eval()
    for block in net.blocks:
        block.attn1.set_processor(Masked())
    done: list[Tensor] = []
    seen: list[Tensor] = []
    for own in noises:
        x = own[0]
        for rung, sigma in enumerate(LADDER):
            clip = torch.cat([*seen, x], dim=2)
            frames = torch.full((1, clip.shape[2]), 1000 * context)
            frames[:, -x.shape[2] :] = 1000 * sigma
            velocity = net(clip, frames.repeat_interleave(4, 1), text, return_dict=False)[0][:, :, -x.shape[2] :]
            x0 = x - sigma * velocity
            if rung < 3:
                x = (1 - LADDER[rung + 1]) * x0 + LADDER[rung + 1] * own[rung + 1]
        done.append(x0)
        seen.append((1 - context) * x0 + context * own[4] if context else x0)
    return torch.cat(done, dim=2)


def served(instance: ModelInstance, request: Request = REQUEST, **options: Any) -> Any:
    return Engine(cache_bytes=0, **options).run(request, instance)


# -- what it computes


@pytest.mark.parametrize(
    "options",
    [{}, {"chunk": 2, "frames": 13}, {"window": 2}, {"context_noise": 0.1}, {"window": 2, "context_noise": 0.05}],
    ids=["all", "chunks-of-2", "window", "context-noise", "both"],
)
def test_a_request_is_the_rollout_by_whole_forwards_without_a_cache(folder: Path, options: dict[str, Any]) -> None:
    options = {name: value for name, value in options.items() if name != "frames"}
    chunk, context = options.get("chunk", 1), options.get("context_noise", 0.0)
    card = card_from_folder(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "frames": 13})
    instance = Engine().load(with_rollout(card.model_copy(update={"sampling": short}), **options))
    noises = drawn(5, 4 // chunk, 5 if context else 4, chunk)
    expected = oracle(folder, text_of(instance), noises, window=options.get("window"), context=context)
    got = served(instance).latents
    torch.testing.assert_close(got, expected[0], rtol=0, atol=2e-5)
    if "window" in options:
        unbounded = oracle(folder, text_of(instance), noises, context=context)
        assert (got - unbounded[0]).abs().max() > 1e-3


def test_the_engine_is_the_reference_driver_to_the_bit(instance: ModelInstance) -> None:
    ours, driven = served(instance), drive_request(instance, REQUEST)
    assert torch.equal(ours.latents, driven["latents"][0])
    assert torch.equal(ours.video, driven["video"][0])


def test_the_video_is_one_decode_of_the_latents(instance: ModelInstance) -> None:
    ours = served(instance)
    once = instance.call(ModelCall("vae", "decode", {"latents": ours.latents.unsqueeze(0)}))
    assert ours.video.shape == (3, 13, 16, 16)
    torch.testing.assert_close(ours.video, once[0], rtol=0, atol=1e-6)


def test_one_chunk_is_the_few_step_loop_of_the_plain_network(folder: Path) -> None:
    card = card_from_folder(folder)
    whole = card.sampling.model_copy(update={"max_sequence_length": 12})
    instance = Engine().load(with_rollout(card.model_copy(update={"sampling": whole}), chunk=3))
    request = replace(REQUEST, frames=9)
    (noises,) = drawn(5, 1, 4, 3)
    x, text = noises[0], text_of(instance, request)
    for rung, sigma in enumerate(LADDER):
        tensors = {"latents": x, "timestep": torch.tensor([1000 * sigma]), "text": text}
        velocity = instance.call(ModelCall("transformer", "velocity", tensors, instance.numerics("transformer")))
        x = x0 = x - sigma * velocity
        if rung < 3:
            x = (1 - LADDER[rung + 1]) * x0 + LADDER[rung + 1] * noises[rung + 1]
    torch.testing.assert_close(served(instance, request).latents, x0[0], rtol=0, atol=1e-6)


def test_a_long_clip_rolls_its_window_and_one_that_chunks_leave_a_rest_of_is_refused(folder: Path) -> None:
    instance = load(folder, window=3, sinks=1)
    request = replace(REQUEST, frames=41, output="latents")
    assert served(instance, request).latents.shape == (4, 11, 4, 4)
    resolved = resolve(request, instance.card)
    nodes = instance.needs("t2v", guided=False, pixels=False).nodes
    layers, chunks, tokens, heads, width = 2, 3 + 1, 4, 2, 16
    assert slab_bytes(resolved, nodes, instance) == 2 * 4 * layers * chunks * tokens * heads * width
    pairs = with_rollout(instance.card, chunk=3, window=None, sinks=0)
    unloaded = ModelInstance.from_folder(pairs, folder, tasks=())
    with pytest.raises(UserError, match=r"frames: got 13, which are 4 latent frames.*use 9 or 21"):
        Engine().submit(REQUEST, unloaded)
    assert not unloaded.built("transformer")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance": 3.0}, "guidance: got 3, expected 1"),
        ({"solver": "euler"}, "solver"),
        ({"steps": 3}, "steps=3"),
        ({"shift": 2.0}, "shift=2"),
    ],
)
def test_a_request_that_is_not_the_rollout_is_refused(
    instance: ModelInstance, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        served(instance, replace(REQUEST, **fields))


# -- frames that leave


def test_frames_leave_as_soon_as_their_chunk_is_decoded(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    handle = engine.submit(REQUEST, instance)
    while engine.tick():
        pass
    events = list(handle.events(timeout=1))
    steps = [event.label for event in events if event.kind == "step"]
    assert len(steps) == events[-1].total == 1 + 4 * 6
    parts = [event for event in events if event.kind == "frames"]
    frames: list[Any] = [event.frames for event in parts]
    assert [part.first for part in frames] == [0, 1, 5, 9]
    assert np.array_equal(np.concatenate([part.pixels_FHWC for part in frames]), handle.result().frames_FHWC())
    second = next(event.number for event in events if event.label.startswith("chunk 2/4"))
    assert parts[0].number < second
    assert all(event.frames is None for event in events if event.kind != "frames")


def test_latents_alone_need_no_decoder(folder: Path) -> None:
    instance = load(folder)
    engine = Engine(cache_bytes=0)
    handle = engine.submit(replace(REQUEST, output="latents"), instance)
    while engine.tick():
        pass
    events = list(handle.events(timeout=1))
    assert {event.kind for event in events} == {"queued", "step", "completed"}
    assert {event.total for event in events} == {1 + 4 * 5}
    assert not instance.built("vae")
    assert torch.equal(handle.result().latents, served(instance).latents)


# -- state


def test_a_saved_rollout_goes_on_to_the_bit_from_any_step(instance: ModelInstance) -> None:
    loop = ChunkRolloutLoop()
    request = replace(REQUEST, frames=9)
    params = resolve(request, instance.card).params
    ctx = LoopContext(spec=instance.card.loops["denoise"], slots={"text": text_of(instance)})
    state = loop.init(params, instance, ctx)
    while not isinstance(plan := loop.next(state), Done):
        state = LoopState.resume(state.save())
        plan = loop.next(state)
        assert not isinstance(plan, Done)
        state = loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))
    result = loop.finalize(state)
    ours = served(instance, request)
    assert torch.equal(result.value[0], ours.latents)
    assert torch.equal(result.also["video"][0], ours.video)


@pytest.mark.parametrize("steps_before", [2, 6, 9])
def test_a_suspended_rollout_frees_its_slab_and_goes_on_to_the_bit(instance: ModelInstance, steps_before: int) -> None:
    engine = Engine(cache_bytes=0)
    handle = engine.submit(REQUEST, instance)
    for _ in range(steps_before):
        engine.tick()
    assert engine.caches.stats().slab_bytes > 0
    handle.suspend()
    engine.tick()
    stats = engine.caches.stats()
    assert (handle.state, stats.slab_bytes, stats.capacity_bytes) == ("suspended", 0, 0)
    handle.resume()
    while engine.tick():
        pass
    assert artifact_difference(handle.result(), served(instance)) == 0
    assert engine.caches.stats().slab_bytes == 0


def test_interleaved_rollouts_are_the_serial_ones_to_the_bit(folder: Path) -> None:
    instance = load(folder, window=2)
    sizes: Any = (("video", 5), ("latents", 13), ("video", 9), ("latents", 5))
    requests = [replace(REQUEST, seed=i, output=what, frames=frames) for i, (what, frames) in enumerate(sizes)]
    assert interleave_gate(instance, requests).difference == 0
    assert interleave_gate(instance, requests, batching="shape").passed


def test_rollouts_and_plain_denoising_share_an_engine_to_the_bit(folder: Path, instance: ModelInstance) -> None:
    """Kinds mixed: a causal card and the plain one of the same weights, step by step in one engine."""
    from cards.wan21.card import card_from_folder as plain_card

    card = plain_card(folder)
    plain = Engine().load(card.model_copy(update={"sampling": instance.card.sampling.model_copy(update={"steps": 4})}))
    requests = [(REQUEST, instance), (replace(REQUEST, seed=9, frames=9), plain), (replace(REQUEST, seed=6), instance)]
    alone = [served(target, request).latents for request, target in requests]
    engine = Engine(cache_bytes=0)
    handles = [engine.submit(request, target) for request, target in requests]
    while engine.tick():
        pass
    assert all(torch.equal(h.result().latents, latents) for h, latents in zip(handles, alone, strict=True))


def test_cancelling_frees_the_slab(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    handles = [engine.submit(replace(REQUEST, seed=seed), instance) for seed in (1, 2)]
    for _ in range(8):
        engine.tick()
    whole = engine.caches.stats().slab_bytes
    handles[0].cancel()
    engine.tick()
    assert engine.caches.stats().slab_bytes == whole // 2 > 0
    with pytest.raises(Cancelled):
        handles[0].result()
    while engine.tick():
        pass
    assert (engine.caches.stats().slab_bytes, len(engine.caches.slabs)) == (0, 0)
    assert artifact_difference(handles[1].result(), served(instance, replace(REQUEST, seed=2))) == 0


def test_slabs_count_against_the_budget(instance: ModelInstance) -> None:
    nodes = instance.needs("t2v", guided=False, pixels=True).nodes
    one = slab_bytes(resolve(REQUEST, instance.card), nodes, instance)
    engine = Engine(cache_bytes=0, budget=Budget(cache_bytes=one))
    handles = [engine.submit(replace(REQUEST, seed=seed), instance) for seed in (1, 2)]
    engine.tick()
    assert engine.counts == (1, 1)
    with pytest.raises(AdmissionInfeasible):
        engine.submit(replace(REQUEST, frames=17), instance)
    while engine.tick():
        assert engine.caches.stats().slab_bytes <= one
    assert all(handle.done for handle in handles)


def test_what_the_decoder_keeps_counts_as_resident(instance: ModelInstance) -> None:
    nodes = instance.needs("t2v", guided=False, pixels=True).nodes
    estimate = features_bytes(resolve(REQUEST, instance.card), nodes, instance)
    assert features_bytes(resolve(replace(REQUEST, output="latents"), instance.card), nodes, instance) == 0
    engine = Engine(cache_bytes=0)
    handle = engine.submit(REQUEST, instance)
    for _ in range(13):  # two chunks are decoded
        engine.tick()
    state: Any = handle._running._state
    features = [f for f in state.plugins[FEATURES].features if isinstance(f, Tensor)]
    kept = sum(f.numel() * f.element_size() for f in features)
    assert kept <= estimate <= 4 * kept
    assert handle.demand.resident_bytes > estimate


# -- training rollouts


def test_a_training_rollout_that_exits_last_is_the_serving_loop(instance: ModelInstance) -> None:
    spec, text = instance.card.loops["denoise"], text_of(instance)
    noises = rollout_noises((1, 4, 4, 4, 4), 1, 4, [torch.Generator().manual_seed(5)])
    expected = served(instance, replace(REQUEST, output="latents")).latents
    plain = rollout(instance, spec, text, noises)
    assert torch.equal(plain.latents[0], expected)
    assert not plain.latents.requires_grad
    trained = rollout(instance, spec, text.requires_grad_(True), noises, gradient=lambda chunk: True)
    assert torch.equal(trained.latents[0].detach(), expected)


@pytest.mark.parametrize("exit", [0, 2, 3])
def test_a_training_rollout_counts_its_calls(instance: ModelInstance, exit: int) -> None:
    seen: list[tuple[int, bool]] = []

    class Spy:
        """The instance, which tells what it is asked."""

        def __getattr__(self, name: str) -> Any:
            return getattr(instance, name)

        def call(self, call: ModelCall, profile: Profile = Profile.SERVE) -> Tensor:
            seen.append((call.static["index"], profile is Profile.TRAIN))
            return instance.call(call, profile)

    noises = drawn(1, 4, 4)
    spec = instance.card.loops["denoise"]
    spy: Any = Spy()
    result = rollout(spy, spec, text_of(instance).requires_grad_(True), noises, exit=exit, gradient=lambda j: j >= 2)
    assert [chunk for chunk, _ in seen] == [j for j in range(4) for _ in range(exit + 2)]
    assert [sum(train for chunk, train in seen if chunk == j) for j in range(4)] == [0, 0, 1, 1]
    assert (result.calls, result.gradient_calls) == (4 * (exit + 2), 2)
    assert result.sigma == pytest.approx(LADDER[exit])


def test_gradient_stays_within_its_chunk_and_no_chunk_hears_of_later_noise(instance: ModelInstance) -> None:
    spec, text = instance.card.loops["denoise"], text_of(instance)
    noises = [[noise.requires_grad_(True) for noise in own] for own in drawn(1, 3, 4)]
    out = rollout(instance, spec, text, noises, exit=0, gradient=lambda chunk: True).latents
    for j in range(3):
        firsts = [own[0] for own in noises]
        gradients = torch.autograd.grad(out[:, :, j].sum(), firsts, retain_graph=True, allow_unused=True)
        assert [g is not None and bool(g.any()) for g in gradients] == [i == j for i in range(3)]
    for i in range(3):  # values: what comes later changes nothing
        changed = [[noise.detach() + (k >= i) for noise in own] for k, own in enumerate(noises)]
        other = rollout(instance, spec, text, changed, exit=1).latents
        same = rollout(instance, spec, text, noises, exit=1).latents
        assert [torch.equal(a, b) for a, b in zip(other.unbind(2), same.unbind(2), strict=True)] == [
            j < i for j in range(3)
        ]


def test_a_batch_of_rollouts_is_its_rows(instance: ModelInstance) -> None:
    spec = instance.card.loops["denoise"]
    texts = [text_of(instance, replace(REQUEST, prompt=prompt)) for prompt in ("a red circle", "the blue square")]
    noises = rollout_noises((2, 4, 3, 4, 4), 1, 2, [torch.Generator().manual_seed(seed) for seed in (1, 2)])
    both = rollout(instance, spec, torch.cat(texts), noises, exit=1).latents
    for row, (seed, text) in enumerate(zip((1, 2), texts, strict=True)):
        alone = rollout(instance, spec, text, drawn(seed, 3, 2), exit=1).latents
        torch.testing.assert_close(both[row], alone[0], rtol=0, atol=1e-5)


def test_checkpointing_gives_the_rollouts_gradient(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        instance = load(folder)
        module: Any = instance.module("transformer").requires_grad_(True)
        if checkpointing:
            module.enable_gradient_checkpointing()
        spec = instance.card.loops["denoise"]
        noises = drawn(1, 3, 2)
        out = rollout(instance, spec, text_of(instance), noises, exit=1, gradient=lambda chunk: True)
        out.latents.square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_noises_of_another_shape_and_rungs_that_are_not_there_are_refused(instance: ModelInstance) -> None:
    spec, text = instance.card.loops["denoise"], text_of(instance)
    with pytest.raises(UserError, match=r"noises of chunk 1.*expected 2"):
        rollout(instance, spec, text, [drawn(1, 1, 2)[0], drawn(1, 1, 1)[0]], exit=1)
    with pytest.raises(UserError, match=r"exit: got 4, expected a rung of the ladder, 0 \.\. 3"):
        rollout(instance, spec, text, drawn(1, 1, 4), exit=4)


# -- gates


def test_the_gate_passes_and_breaks_where_the_cache_is_not_overwritten(
    instance: ModelInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = chunk_gate(instance, prompt="a red circle", seed=3)
    assert (report.level, report.difference, report.passed) == ("C2", 0.0, True)
    from loops.slab import TrainingSlab

    monkeypatch.setattr(TrainingSlab, "_overwrite", lambda *_: None)
    assert not chunk_gate(instance, prompt="a red circle", seed=3).passed


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's RMSNorm under autocast
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_gate_holds_in_bfloat16(folder: Path, stored: str) -> None:
    """Computed in bfloat16, whether the weights are stored in it or cast for each forward."""
    card = card_from_folder(folder)
    transformer = card.components["transformer"].model_copy(update={"dtype": stored})
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "height": 16, "width": 16})
    instance = Engine().load(
        card.model_copy(
            update={
                "components": {**card.components, "transformer": transformer},
                "precision": card.precision.model_copy(update={"serve": "bfloat16", "train": "bfloat16"}),
                "sampling": short,
            }
        )
    )
    report = chunk_gate(instance, prompt="a red circle", seed=3)
    assert report.passed, report
    exact = served(load(folder), replace(REQUEST, frames=9)).latents
    rounded = served(instance, replace(REQUEST, frames=9)).latents
    assert 0 < (rounded - exact).abs().mean() < 0.05


def test_a_rollout_keeps_its_behaviour(instance: ModelInstance) -> None:
    request = replace(REQUEST, profile=Profile.ROLLOUT, capture=("trajectory", "velocities"))
    behaviour = served(instance, request).behaviour
    assert behaviour.trajectory.shape == behaviour.velocities.shape == (16, 4, 1, 4, 4)
    assert torch.equal(behaviour.trajectory[0], drawn(5, 1, 1)[0][0][0])
    assert behaviour.sigmas.tolist() == pytest.approx(LADDER * 4)


def test_every_row_of_the_ladder_holds(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    target = tmp_path / "export"
    shutil.copytree(folder, target)
    card = card_from_folder(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "height": 16, "width": 16})
    card = card.model_copy(update={"sampling": short, "source": Source(kind="folder", location=".")})
    (target / CARD_FILE).write_text(with_rollout(card, window=2).to_json())
    assert main([f"card={target}"]) == 0, capsys.readouterr().out
    assert "12 of 12 rows hold" in capsys.readouterr().out
