"""Decoding by tiles: the library's tiled decode to the bit, in steps that take turns and need a tile's memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cards.card import ModelCard
from cards.errors import UserError
from cards.wan21.card import with_vae_tiles
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.interleave import interleave_gate
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resolve import resolve
from loops.drive import drive
from loops.forecast import forecast
from loops.loop import Done, LoopContext, LoopState, ModelCall, StepResult, WorkUnit
from loops.vae_tiles import TilesLoop

CELL = 4
TILE, STRIDE = (24, 32), (16, 24)
REQUEST = Request(prompt="a red circle", seed=1, steps=1, guidance=1.0, frames=5, height=40, width=56)


@pytest.fixture(scope="module")
def plain(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


def tiled(
    plain: ModelInstance, tile: tuple[int, int] = TILE, stride: tuple[int, int] = STRIDE, **options: Any
) -> ModelInstance:
    return plain.view({}, with_vae_tiles(plain.card, tile=tile, stride=stride, **options))


def latents_of(plain: ModelInstance, height: int, width: int, frames: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randn(1, plain.card.geometry.channels, frames, height // CELL, width // CELL, generator=generator)


def decode(instance: ModelInstance, latents: Tensor) -> Tensor:
    """The loop alone, by the reference driver."""
    ctx = LoopContext(spec=instance.card.loops["decode"], slots={"latents": latents})
    return drive(TilesLoop(), None, instance, ctx).value  # type: ignore[arg-type]


def untiled(instance: ModelInstance, latents: Tensor) -> Tensor:
    return instance.call(ModelCall("vae", "decode", {"latents": latents}))


def library(instance: ModelInstance, latents: Tensor, tile: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """The same module with the library's own tiling switched on."""
    vae: Any = copy.deepcopy(instance.module("vae"))
    vae.enable_tiling(
        tile_sample_min_height=tile[0],
        tile_sample_min_width=tile[1],
        tile_sample_stride_height=stride[0],
        tile_sample_stride_width=stride[1],
    )
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        return vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]


@contextlib.contextmanager
def activations(vae: nn.Module) -> Iterator[list[Tensor]]:
    """Outputs of every layer of the decoder."""
    seen: list[Tensor] = []
    layers = [m for m in vae.decoder.modules() if not list(m.children())]  # type: ignore[union-attr, operator]
    handles = [m.register_forward_hook(lambda _m, _a, output: seen.append(output)) for m in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


# -- the library's bits


@pytest.mark.parametrize(
    ("size", "tile", "stride"),
    [
        ((40, 56), (24, 32), (16, 24)),
        ((64, 64), (32, 32), (24, 24)),
        ((32, 48), (16, 16), (16, 16)),
        ((24, 40), (16, 24), (4, 8)),
        ((16, 64), (32, 24), (8, 16)),
        ((64, 16), (24, 32), (16, 8)),
    ],
    ids=["uneven", "square", "no-overlap", "overlap-over-half", "wide", "tall"],
)
def test_a_tiled_decode_is_the_librarys_to_the_bit(
    plain: ModelInstance, size: tuple[int, int], tile: tuple[int, int], stride: tuple[int, int]
) -> None:
    latents = latents_of(plain, *size)
    ours, theirs = decode(tiled(plain, tile, stride), latents), library(plain, latents, tile, stride)
    assert ours.shape == (1, 3, 5, *size)
    assert torch.equal(ours, theirs)
    difference = (ours - untiled(plain, latents)).abs()
    print(f"tiled and untiled differ by {difference.max():.3f} at most, {difference.mean():.4f} on average")
    assert difference.max() > 0


@pytest.mark.parametrize("size", [(24, 32), (16, 16)])
def test_where_one_tile_covers_the_frame_it_is_the_untiled_decode(plain: ModelInstance, size: tuple[int, int]) -> None:
    latents = latents_of(plain, *size)
    instance = tiled(plain)
    loop = TilesLoop()
    state = loop.init(None, instance, LoopContext(spec=instance.card.loops["decode"], slots={"latents": latents}))
    plan = loop.next(state)
    assert not isinstance(plan, Done)
    assert [(call.method, call.merge_key()) for call in plan.calls] == [
        ("decode", ModelCall("vae", "decode", {"latents": latents}).merge_key())
    ]
    assert torch.equal(decode(instance, latents), untiled(plain, latents))


@pytest.mark.parametrize("tiles_per_step", [1, 4, 100])
def test_steps_of_several_tiles_give_the_same_bits(plain: ModelInstance, tiles_per_step: int) -> None:
    latents = latents_of(plain, 40, 56)
    ours = decode(tiled(plain, tiles_per_step=tiles_per_step), latents)
    assert torch.equal(ours, decode(tiled(plain), latents))


def test_a_decode_leaves_the_results_of_its_calls_alone(plain: ModelInstance) -> None:
    instance, loop = tiled(plain), TilesLoop()
    ctx = LoopContext(spec=instance.card.loops["decode"], slots={"latents": latents_of(plain, 40, 56)})
    state = loop.init(None, instance, ctx)
    while not isinstance(plan := loop.next(state), Done):
        assert plan.unit is WorkUnit.VAE_TILE
        outputs = tuple(instance.call(call) for call in plan.calls)
        copies = [output.clone() for output in outputs]
        state = loop.advance(state, StepResult(outputs))
        assert all(torch.equal(a, b) for a, b in zip(outputs, copies, strict=True))
    assert not [name for name in state.tensors if name not in ("latents", "video")]


# -- a tile's memory


def test_the_largest_activation_is_a_tiles(plain: ModelInstance) -> None:
    latents = latents_of(plain, 64, 96)
    vae = plain.module("vae")

    def largest(run: Any) -> int:
        with activations(vae) as seen:
            run()
        return max(output.numel() for output in seen)

    whole = largest(lambda: untiled(plain, latents))
    by_tiles = largest(lambda: decode(tiled(plain, (32, 32), (24, 24)), latents))
    alone = largest(lambda: untiled(plain, latents[..., :8, :8]))
    assert by_tiles == alone
    assert whole == 6 * by_tiles


def test_between_tiles_the_request_holds_its_video_and_the_ends_of_tiles(plain: ModelInstance) -> None:
    instance, loop = tiled(plain, (16, 16), (12, 12)), TilesLoop()
    ctx = LoopContext(spec=instance.card.loops["decode"], slots={"latents": latents_of(plain, 48, 48)})
    state = loop.init(None, instance, ctx)
    while not isinstance(plan := loop.next(state), Done):
        state = loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))
        ends = [tensor for name, tensor in state.tensors.items() if name not in ("latents", "video")]
        assert len(ends) <= 4 + 1
        assert all(end.untyped_storage().nbytes() == 4 * end.numel() for end in ends)
        assert all(min(end.shape[-2:]) == 4 for end in ends)


# -- in the engine


def test_a_tiled_card_gives_the_same_latents_and_the_librarys_tiled_video(plain: ModelInstance) -> None:
    instance = tiled(plain)
    ours, base = Engine().run(REQUEST, instance), Engine().run(REQUEST, plain)
    assert torch.equal(ours.latents, base.latents)
    assert ours.video is not None
    assert base.video is not None
    assert torch.equal(ours.video, library(plain, ours.latents[None], TILE, STRIDE)[0])
    assert torch.equal(ours.video, drive_request(instance, REQUEST)["video"][0])
    assert torch.equal(base.video, untiled(plain, ours.latents[None])[0])


def test_latents_alone_decode_no_tile(plain: ModelInstance) -> None:
    with activations(plain.module("vae")) as seen:
        assert Engine().run(replace(REQUEST, output="latents"), tiled(plain)).video is None
    assert seen == []


def test_a_long_decode_takes_turns_with_other_requests(plain: ModelInstance) -> None:
    """Whatever shares the policy deals out, others run before the last tile."""
    heard: list[str] = []
    engine, instance = Engine(cache_bytes=0), tiled(plain)
    engine.submit(REQUEST, instance, lambda label, *_: heard.append(label))
    engine.submit(
        replace(REQUEST, seed=2, steps=30, output="latents"), instance, lambda label, *_: heard.append(f"other {label}")
    )
    while engine.tick():
        pass
    tiles = [f"decode {k}/9" for k in range(1, 10)]
    assert [label for label in heard if label.startswith("decode")] == tiles
    between = heard[heard.index(tiles[0]) : heard.index(tiles[-1])]
    assert any(label.startswith("other denoise") for label in between)


@pytest.mark.parametrize("tiles_per_step", [1, 4])
@pytest.mark.parametrize("size", [(40, 56), (16, 16)])
def test_the_forecast_is_what_runs(plain: ModelInstance, size: tuple[int, int], tiles_per_step: int) -> None:
    instance, loop = tiled(plain, tiles_per_step=tiles_per_step), TilesLoop()
    spec, (height, width) = instance.card.loops["decode"], size
    params = resolve(replace(REQUEST, height=height, width=width), instance.card).params
    ctx = LoopContext(spec=spec, slots={"latents": latents_of(plain, height, width)})
    state = loop.init(params, instance, ctx)
    found, plans = forecast(spec, params, instance.card), []
    while not isinstance(plan := loop.next(state), Done):
        plans.append(plan)
        state = loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))
    assert found.steps == len(plans) == state.total
    assert found.rows == max(sum(call.rows for call in plan.calls) for plan in plans)
    largest = max(call.tensors["latents"][0, 0].numel() for plan in plans for call in plan.calls)
    assert found.tokens == largest // 4  # patches of 1 x 2 x 2


def test_the_forecast_of_a_denoising_loop_is_its_steps_and_branches(plain: ModelInstance) -> None:
    for guidance, rows in ((1.0, 1), (3.0, 2)):
        params = resolve(replace(REQUEST, steps=7, guidance=guidance), plain.card).params
        found = forecast(plain.card.loops["denoise"], params, plain.card)
        assert (found.steps, found.rows, found.tokens) == (7, rows, 2 * 5 * 7)


def test_mixed_decodes_interleaved_are_serial_to_the_bit(plain: ModelInstance) -> None:
    requests = [
        REQUEST,
        replace(REQUEST, seed=2, steps=3, guidance=3.0, height=24),
        replace(REQUEST, seed=3, height=16, width=16),
        replace(REQUEST, seed=4, frames=9, output="latents"),
    ]
    report = interleave_gate(tiled(plain), requests)
    assert report.difference == 0
    batched = interleave_gate(tiled(plain, tiles_per_step=3), requests, batching="shape")
    print(f"merged tiles differ from single ones by {batched.difference:.1e}")
    assert batched.passed


@pytest.mark.parametrize(("tiles_per_step", "rows"), [(1, [2, 2, 2, 2]), (4, [8])])
def test_equal_tiles_share_forwards(plain: ModelInstance, tiles_per_step: int, rows: list[int]) -> None:
    """2 x 2 tiles of one size: with others' tile by tile, and with the request's own where a step has several."""
    instance = tiled(plain, (16, 16), (16, 16), tiles_per_step=tiles_per_step)
    seen: list[int] = []
    first: Any = instance.module("vae").decoder.conv_in  # type: ignore[union-attr]
    handle = first.register_forward_hook(lambda _m, _a, output: seen.append(output.shape[0]))
    requests = [replace(REQUEST, seed=seed, frames=1, height=32, width=32) for seed in (1, 2)]
    try:
        Engine(batching="shape").run_interleaved(requests, instance)
    finally:
        handle.remove()
    assert seen == rows


def test_a_decode_saved_half_way_ends_in_the_same_bits(plain: ModelInstance) -> None:
    instance, loop = tiled(plain), TilesLoop()
    latents = latents_of(plain, 40, 56)
    ctx = LoopContext(spec=instance.card.loops["decode"], slots={"latents": latents})

    def finish(state: LoopState, steps: int = 100) -> LoopState:
        while steps and not isinstance(plan := loop.next(state), Done):
            state = loop.advance(state, StepResult(tuple(instance.call(call) for call in plan.calls)))
            steps -= 1
        return state

    saved = finish(loop.init(None, instance, ctx), steps=4).save()
    for _ in range(2):
        assert torch.equal(loop.finalize(finish(LoopState.resume(saved))).value, decode(instance, latents))


# -- what a card may say


def test_the_helper_derives_a_valid_card_and_leaves_the_default(plain: ModelInstance) -> None:
    card = with_vae_tiles(plain.card, tile=(16, 16), stride=(12, 12))
    assert card.problems() == []
    assert card.recipe.parents[0] == plain.card.digest
    again = ModelCard.from_json(card.to_json())
    assert again.digest == card.digest != plain.card.digest
    assert "options" not in plain.card.loops["denoise"].model_dump()
    assert "decode" not in plain.card.loops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": [16, 16]}, r"stride: got .*Field required"),
        ({"tile": [16, 16], "stride": [12, 12], "tyle": 1}, r"tyle: got 1.*its options: tile, stride, tiles_per_step"),
        ({"tile": [16, 16], "stride": [12, 12], "tiles_per_step": 0}, r"tiles_per_step: got 0"),
        ({"tile": [16, True], "stride": [12, 12]}, r"tile\.1: got True"),
        ({"tile": [16, 18], "stride": [12, 0]}, r"tile: got 18 pixels.*multiple of 4.*stride: got 0 pixels"),
        ({"tile": [16, 16], "stride": [20, 16]}, r"stride: got \(20, 16\), expected at most the tile \(16, 16\)"),
    ],
)
def test_a_card_with_wrong_options_does_not_load(plain: ModelInstance, options: dict[str, Any], message: str) -> None:
    card = with_vae_tiles(plain.card, tile=(16, 16), stride=(12, 12))
    loop = card.loops["decode"].model_copy(update={"options": options})
    with pytest.raises(UserError, match=message):
        ModelInstance.load(card.model_copy(update={"loops": {**card.loops, "decode": loop}}))


def test_options_of_a_kind_without_any_are_refused(plain: ModelInstance) -> None:
    loop = plain.card.loops["denoise"].model_copy(update={"options": {"tile": 3}})
    with pytest.raises(UserError, match=r"'diffusion_denoise'.*tile: got 3.*its options: none"):
        ModelInstance.load(plain.card.model_copy(update={"loops": {"denoise": loop}}))
