"""Causal Wan: the library's module under a dense mask is the oracle, element by element."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from omegaconf import OmegaConf
from torch import Tensor

from cards.card import CARD_FILE, ModelCard, Source
from cards.chunks import chunk_count, settled_window, visible_chunks
from cards.errors import UserError
from cards.memory import ForwardSize
from cards.registry import family
from cards.source import check_source, load_component
from cards.wan_causal.card import UNTRAINED, build_card, card_from_folder, causal_card, with_rollout
from cards.wan_causal.components import OPERATIONS
from cards.wan_causal.memory import PEAK_BYTES
from cards.wan_causal.transformer import CausalWanTransformer3DModel
from inference.engine import Engine
from loops.chunk_rollout import DecoderFeatures
from loops.slab import SlabHandle, SlabSpec
from tests.support.live_bytes import LiveBytes

HEADS, WIDTH, LAYERS, CHANNELS = 2, 16, 2, 4
TIGHT: dict[str, Any] = {"rtol": 0.0, "atol": 2e-6}
"""Differences of the same sums in another order, on outputs of unit scale."""
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(make_wan_folder: Callable[..., Path]) -> Path:
    return make_wan_folder(seed=3)


@pytest.fixture
def ours(folder: Path) -> Any:
    return CausalWanTransformer3DModel.from_pretrained(folder, subfolder="transformer").eval().requires_grad_(False)


@pytest.fixture
def theirs(folder: Path) -> Any:
    return WanTransformer3DModel.from_pretrained(folder, subfolder="transformer").eval().requires_grad_(False)


def clip(frames: int, *, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(rows, CHANNELS, frames, 4, 4, generator=torch.Generator().manual_seed(seed))


def words(rows: int = 2) -> Tensor:
    return torch.randn(rows, 6, 24, generator=torch.Generator().manual_seed(9))


def run(module: Any, operation: str, latents: Tensor, timestep: Tensor, **rest: Any) -> Tensor:
    static = {"dtype": "float32", "text_padding": "full", **rest}
    tensors = {"latents": latents, "timestep": timestep, "text": static.pop("text", words(latents.shape[0]))}
    tensors |= static.pop("tensors", {})
    return OPERATIONS["transformer", operation](module, tensors, static)


def store(rows: int, chunk: int, window: int, sinks: int = 0, *, training: bool = False) -> SlabHandle:
    spec = SlabSpec(
        layers=LAYERS,
        batch=rows,
        chunk_tokens=4 * chunk,
        window_chunks=window,
        sink_chunks=sinks,
        heads=HEADS,
        head_dim=WIDTH,
    )
    return SlabHandle(spec, training=training)


class Masked(WanAttnProcessor):  # type: ignore[misc]
    """The library's own attention under a dense mask."""

    def __init__(self, mask_LL: Tensor):
        super().__init__()
        self.mask_LL = mask_LL

    def __call__(self, attn: Any, hidden: Tensor, text: Any = None, mask: Any = None, rotary: Any = None) -> Tensor:
        return super().__call__(attn, hidden, text, self.mask_LL[None, None], rotary)


def masked(theirs: Any, latents: Tensor, timestep_BT: Tensor, seen: Callable[[int, int], bool]) -> Tensor:
    """The library's forward in which a token of frame a sees one of frame b where ``seen(a, b)``; timesteps a frame."""
    frames = latents.shape[2]
    tokens = latents.shape[3] * latents.shape[4] // 4
    rows = torch.tensor([[seen(a, b) for b in range(frames)] for a in range(frames)])
    for block in theirs.blocks:
        block.attn1.set_processor(Masked(rows.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)))
    timestep_BL = timestep_BT.repeat_interleave(tokens, 1)
    return theirs(latents, timestep_BL, words(latents.shape[0]), return_dict=False)[0]


def sees(chunk: int, window: int | None = None, sinks: int = 0) -> Callable[[int, int], bool]:
    """From the definition, frame by frame."""

    def seen(a: int, b: int) -> bool:
        i, j = a // chunk, b // chunk
        return j <= i and (window is None or j > i - window or j < sinks)

    return seen


TIMES = torch.tensor([[900.0, 617.25, 300.0, 40.0, 0.0, 750.0], [10.0, 20.0, 500.0, 1000.0, 250.0, 625.0]])


def public(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.items() if not name.startswith("_")}


# -- the module


def test_it_has_the_librarys_state_dict_and_saves_the_librarys_folder(ours: Any, theirs: Any, tmp_path: Path) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(others)
    assert all(torch.equal(mine[name], others[name]) for name in mine)
    assert public(ours.config) == public(theirs.config)
    ours.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
    again = WanTransformer3DModel.from_pretrained(tmp_path).eval()
    latents, t = clip(3), torch.tensor([617.25, 20.0])
    with torch.no_grad():
        assert torch.equal(again(latents, t, words(), return_dict=False)[0], run(ours, "velocity", latents, t))


@torch.no_grad()
def test_without_a_chunking_and_with_one_chunk_it_is_the_librarys_forward_to_the_bit(ours: Any, theirs: Any) -> None:
    latents, t = clip(5), torch.tensor([617.25, 20.0])
    expected = theirs(latents, t, words(), return_dict=False)[0]
    assert torch.equal(run(ours, "velocity", latents, t), expected)
    assert torch.equal(run(ours, "velocity_block_causal", latents, t, chunk=5, window=None, sinks=0), expected)
    assert torch.equal(run(ours, "velocity", latents, t), expected)  # as before
    alone = run(ours, "velocity_chunk", latents, t, index=0, state=store(2, 5, 1))
    assert torch.equal(alone, expected)


@pytest.mark.parametrize(
    ("chunk", "window", "sinks"), [(1, None, 0), (2, None, 0), (3, None, 0), (1, 2, 0), (1, 2, 1), (2, 1, 0), (1, 3, 2)]
)
@torch.no_grad()
def test_a_block_causal_forward_is_the_librarys_under_a_dense_mask(
    ours: Any, theirs: Any, chunk: int, window: int | None, sinks: int
) -> None:
    latents, times_BJ = clip(6), TIMES[:, : 6 // chunk]
    got = run(ours, "velocity_block_causal", latents, times_BJ, chunk=chunk, window=window, sinks=sinks)
    expected = masked(theirs, latents, times_BJ.repeat_interleave(chunk, 1), sees(chunk, window, sinks))
    torch.testing.assert_close(got, expected, **TIGHT)
    other = masked(theirs, latents, times_BJ.repeat_interleave(chunk, 1), lambda a, b: True)
    assert (got - other).abs().max() > 1e-3  # the mask matters


@pytest.mark.parametrize(("chunk", "window", "sinks"), [(1, None, 0), (2, None, 0), (1, 2, 0), (1, 2, 1), (2, 1, 1)])
@torch.no_grad()
def test_chunks_on_a_cache_are_the_block_causal_forward(ours: Any, chunk: int, window: int | None, sinks: int) -> None:
    latents, chunks = clip(6), 6 // chunk
    full = run(ours, "velocity_block_causal", latents, TIMES[:, :chunks], chunk=chunk, window=window, sinks=sinks)
    kv = store(2, chunk, *settled_window(chunks, window, sinks))
    for j, part in enumerate(latents.split(chunk, dim=2)):
        rough = run(ours, "velocity_chunk", part + 1, TIMES[:, j], index=j, state=kv)  # an earlier rung
        got = run(ours, "velocity_chunk", part, TIMES[:, j], index=j, state=kv)  # overwrites it
        expected = full[:, :, j * chunk : (j + 1) * chunk]
        torch.testing.assert_close(got, expected, **TIGHT)
        assert (rough - expected).abs().max() > 1e-3
    assert kv.store.chunks(0) == chunks


@torch.no_grad()
def test_teacher_forcing_is_one_rollout_on_clean_context_in_one_forward(ours: Any, theirs: Any) -> None:
    noisy, clean, chunk = clip(6), clip(6, seed=1), 2
    got = run(
        ours,
        "velocity_teacher_forced",
        noisy,
        TIMES[:, :3],
        chunk=chunk,
        window=2,
        sinks=0,
        tensors={"clean": clean, "clean_timestep": torch.tensor([0.0, 5.0])},
    )
    assert got.shape == noisy.shape
    for j in range(3):
        start, end = j * chunk, (j + 1) * chunk
        so_far = torch.cat([clean[:, :, :start], noisy[:, :, start:end]], dim=2)
        times = torch.tensor([[0.0], [5.0]]).repeat(1, end)
        times[:, start:] = TIMES[:, j : j + 1]
        expected = masked(theirs, so_far, times, sees(chunk, 2))[:, :, start:]
        torch.testing.assert_close(got[:, :, start:end], expected, **TIGHT)


@torch.no_grad()
def test_frames_beyond_the_librarys_table_have_their_own_positions(ours: Any) -> None:
    assert ours.config.rope_max_seq_len == 64
    longer = CausalWanTransformer3DModel.from_config({**ours.config, "rope_max_seq_len": 128})
    longer.load_state_dict(ours.state_dict())
    latents, t = clip(2), torch.tensor([617.25, 20.0])
    for start in (31, 32, 40):  # chunks of two frames: the table ends at frame 64
        results = []
        for module in (ours, longer.eval()):
            kv = store(2, 2, 2)
            for layer in range(LAYERS):
                for j in range(start):
                    kv.store.put(layer, j, *torch.ones(2, 2, 8, HEADS, WIDTH) * j)
            results.append(run(module, "velocity_chunk", latents, t, index=start, state=kv))
        assert torch.equal(*results)


@torch.no_grad()
def test_folded_text_padding_is_the_same_function(ours: Any) -> None:
    text = torch.zeros(2, 64, 24)
    text[:, :6] = words()
    rest = {"chunk": 1, "window": None, "sinks": 0, "text": text}
    full = run(ours, "velocity_block_causal", clip(3), TIMES[:, :3], **rest)
    folded = run(ours, "velocity_block_causal", clip(3), TIMES[:, :3], **rest, text_padding="folded")
    torch.testing.assert_close(folded, full, rtol=0, atol=1e-5)


# -- gradients


def test_no_chunk_depends_on_a_later_one_and_each_on_all_before(ours: Any) -> None:
    latents = clip(4).requires_grad_(True)
    out = run(ours, "velocity_block_causal", latents, TIMES[:, :4], chunk=1, window=3, sinks=0)
    for j in range(4):
        (gradient,) = torch.autograd.grad(out[:, :, j].square().sum(), latents, retain_graph=True)
        reached = [bool(gradient[:, :, i].any()) for i in range(4)]
        # the last chunk does see chunk 0: through chunk 1's and 2's keys and values of the second layer
        assert reached == [i <= j for i in range(4)]


def rolled(module: Any, latents: Tensor, *, keep_graph: bool) -> Tensor:
    """Two passes a chunk: one whose output counts, and one without gradient that overwrites its keys and values."""
    kv, outs = store(2, 1, 2, training=True), []
    for j, part in enumerate(latents.split(1, dim=2)):
        outs.append(run(module, "velocity_chunk", part, TIMES[:, j], index=j, state=kv, keep_graph=keep_graph))
        if not keep_graph:
            with torch.no_grad():
                run(module, "velocity_chunk", part.detach() + 1, TIMES[:, j] * 0, index=j, state=kv)
    return torch.cat(outs, dim=2)


def gradients(module: Any, latents: Tensor, **options: Any) -> tuple[Tensor, ...]:
    module.requires_grad_(True)
    leaf = latents.clone().requires_grad_(True)
    out = rolled(module, leaf, **options)
    parameters = [p for name, p in module.named_parameters() if name.endswith(("attn1.to_k.weight", "ffn.net.2.bias"))]
    return (out.detach(), *torch.autograd.grad(out.square().sum(), [leaf, *parameters]))


@pytest.mark.parametrize("keep_graph", [False, True])
def test_checkpointing_recomputes_on_the_past_as_it_was(ours: Any, keep_graph: bool) -> None:
    plain = gradients(ours, clip(4), keep_graph=keep_graph)
    ours.enable_gradient_checkpointing()
    ran: list[int] = []
    handle = ours.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    recomputed = gradients(ours, clip(4), keep_graph=keep_graph)
    handle.remove()
    assert len(ran) == (8 if keep_graph else 12)  # four chunks, run again for the backward
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


def test_with_the_graph_kept_the_cache_has_the_full_forwards_gradient(ours: Any) -> None:
    out, gradient, *_ = gradients(ours, clip(4), keep_graph=True)
    leaf = clip(4).requires_grad_(True)
    full = run(ours, "velocity_block_causal", leaf, TIMES[:, :4], chunk=1, window=2, sinks=0)
    torch.testing.assert_close(out, full.detach(), **TIGHT)
    torch.testing.assert_close(gradient, torch.autograd.grad(full.square().sum(), leaf)[0], rtol=1e-4, atol=2e-6)


def test_a_cut_cache_carries_no_gradient_to_an_earlier_chunk(ours: Any) -> None:
    leaf = clip(3).requires_grad_(True)
    out = rolled(ours, leaf, keep_graph=False)
    (gradient,) = torch.autograd.grad(out[:, :, 2].square().sum(), leaf)
    assert [bool(gradient[:, :, i].any()) for i in range(3)] == [False, False, True]


def test_a_chunk_with_gradient_in_an_inference_slab_is_cut_and_survives_what_is_written_later(ours: Any) -> None:
    kv, leaf = store(2, 1, 2), clip(1).requires_grad_(True)
    with torch.no_grad():
        run(ours, "velocity_chunk", clip(1, seed=4), TIMES[:, 0], index=0, state=kv)
    ours.enable_gradient_checkpointing()
    out = run(ours, "velocity_chunk", leaf, TIMES[:, 1], index=1, state=kv)
    expected = torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)[0]
    with torch.no_grad():
        for j in (1, 2, 3):
            run(ours, "velocity_chunk", clip(1, seed=5 + j), TIMES[:, j], index=j, state=kv)
    assert torch.equal(torch.autograd.grad(out.square().sum(), leaf)[0], expected)


# -- the decoder


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (1, 3), (4,)])
@torch.no_grad()
def test_frames_decoded_chunk_by_chunk_are_those_of_one_decode(folder: Path, sizes: tuple[int, ...]) -> None:
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae").eval()
    latents = clip(4) * 2
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    expected = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]  # rounded as WanPipeline does
    state = DecoderFeatures()
    pieces = [OPERATIONS["vae", "decode_chunk"](vae, {"latents": p}, {"state": state}) for p in latents.split(sizes, 2)]
    assert [p.shape[2] for p in pieces] == [1 + 4 * (sizes[0] - 1), *(4 * n for n in sizes[1:])]
    torch.testing.assert_close(torch.cat(pieces, dim=2), expected, rtol=0, atol=1e-6)


# -- chunks as numbers


def test_the_window_is_the_first_sinks_and_the_last_chunks() -> None:
    assert visible_chunks(1, 2, 1) == [0]
    assert visible_chunks(5, 2, 1) == [0, 3, 4]
    assert visible_chunks(2, 3, 1) == [0, 1]
    assert settled_window(7, None, 2) == (7, 0)
    assert settled_window(7, 3, 4) == (7, 0)
    assert settled_window(7, 3, 3) == (3, 3)


def test_a_rest_of_frames_is_refused_with_what_would_do() -> None:
    geometry = build_card("1.3b").geometry
    assert chunk_count(81, 3, geometry) == 7
    with pytest.raises(UserError, match=r"got 77, which are 20 latent frames.*use 69 or 81"):
        chunk_count(77, 3, geometry)


# -- the card


def test_the_bundled_card_is_valid_and_says_that_nobody_trained_it() -> None:
    card, base = family("wan_causal").card("tiny"), family("wan21").card("tiny")
    card.validate()
    check_source(card)
    assert (card.recipe.method, card.recipe.parents) == (UNTRAINED, (base.digest,))
    loop = card.loops["denoise"]
    assert (loop.kind, loop.options, loop.guidance.scale) == ("chunk_rollout", {"chunk": 1}, 1.0)
    assert loop.semantics == card.recipe.assumes_loop == "causal-chunk-rollout"
    assert loop.schedule.ladder == pytest.approx((1.0, 0.9375, 0.83333, 0.625), abs=1e-5)
    assert ModelCard.from_json(card.to_json()).digest == card.digest
    module = load_component(card.components["transformer"], check_source(card))
    assert isinstance(module, CausalWanTransformer3DModel)


def test_sizes_and_options_of_the_card() -> None:
    entry = family("wan_causal")
    assert entry.card("1.3b").loops["denoise"].options == {"chunk": 3}
    options = entry.card("14b", chunk=7, window=2, sinks=1).loops["denoise"].options
    assert options == {"chunk": 7, "window": 2, "sinks": 1}
    with pytest.raises(UserError, match=r"unknown option of card 'wan_causal' 'chunks'.*Did you mean 'chunk'"):
        entry.card("tiny", chunks=1)
    with pytest.raises(UserError, match="unknown option of card 'wan21' 'chunk'"):
        family("wan21").card("tiny", chunk=1)


def test_the_yaml_is_the_card_and_its_options_reach_it() -> None:
    from fastvideo_train.build import build_card as card_of_config

    config: Any = OmegaConf.load(Path(__file__).parents[2] / "conf" / "card" / "wan_causal.yaml")
    assert card_of_config(config).digest == build_card("tiny").digest
    config.chunk, config.window, config.sinks = 3, 2, 1
    assert card_of_config(config).loops["denoise"].options == {"chunk": 3, "window": 2, "sinks": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk": 2}, "sampling: frames: got 9.*use 5 or 13"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"window": 0}, "window: got 0"),
        ({"context_noise": 1.0}, "context_noise: got 1.0"),
        ({"chunks": 1}, "chunks: got 1"),
    ],
)
def test_a_chunking_that_cannot_run_is_refused_before_weights_load(changes: dict[str, Any], message: str) -> None:
    card = with_rollout(build_card("tiny"), **changes)
    card = card.model_copy(update={"source": Source(kind="folder", location="/nowhere")})
    with pytest.raises(UserError, match=message):
        Engine().load(card)


def test_an_export_is_read_as_it_is_and_options_change_it(folder: Path, tmp_path: Path) -> None:
    card = card_from_folder(folder)
    assert (card.family, card.loops["denoise"].options) == ("wan_causal", {"chunk": 1})
    export = tmp_path / "export"
    export.mkdir()
    trained = card.derive(
        recipe=card.recipe.model_copy(update={"method": "self_forcing"}), source=Source(kind="folder", location=".")
    )
    (export / CARD_FILE).write_text(trained.to_json())
    again = build_card("tiny", source=str(export))
    assert (again.digest, again.root) == (trained.digest, export.resolve())
    windowed = build_card("tiny", source=str(export), window=2)
    assert windowed.loops["denoise"].options == {"chunk": 1, "window": 2}
    assert (windowed.recipe.parents[0], windowed.root) == (trained.digest, export.resolve())
    base = family("wan21").card("tiny", source=str(folder))
    assert causal_card(base).recipe.parents[0] == base.digest


def test_the_folder_of_a_causal_card_is_a_plain_pipeline(folder: Path) -> None:
    check_source(card_from_folder(folder))
    assert isinstance(WanPipeline.from_pretrained(folder).transformer, WanTransformer3DModel)


# -- memory


@pytest.mark.parametrize(
    ("heads", "head_dim", "ffn", "cells", "text"),
    [(2, 16, 64, (1, 8, 8), 16), (4, 32, 512, (2, 8, 8), 64), (6, 64, 1536, (3, 16, 16), 64)],
)
@torch.no_grad()
def test_a_chunks_forward_stays_within_its_estimate(
    heads: int, head_dim: int, ffn: int, cells: tuple[int, int, int], text: int
) -> None:
    module = CausalWanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=8,
        out_channels=8,
        text_dim=64,
        ffn_dim=ffn,
        num_layers=2,
        rope_max_seq_len=64,
    ).eval()
    tokens = cells[0] * cells[1] * cells[2] // 4
    spec = SlabSpec(layers=2, batch=1, chunk_tokens=tokens, window_chunks=3, heads=heads, head_dim=head_dim)
    kv, words_1LD = SlabHandle(spec), torch.randn(1, text, 64)
    latents, t = torch.randn(1, 8, *cells), torch.tensor([500.0])
    peaks = []
    for index in range(3):
        with LiveBytes() as live:
            run(module, "velocity_chunk", latents, t, index=index, state=kv, text=words_1LD)
        peaks.append(live.peak)
    estimate = PEAK_BYTES["transformer", "velocity_chunk"](module.config, ForwardSize(1, *cells, tokens, text))
    assert max(peaks) <= estimate <= 3 * min(peaks)


@torch.no_grad()
def test_a_chunks_decode_stays_within_its_estimate() -> None:
    vae = AutoencoderKLWan(
        base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]
    ).eval()
    state = DecoderFeatures()
    with LiveBytes() as live:  # the features that stay are counted too
        for _ in range(3):
            OPERATIONS["vae", "decode_chunk"](vae, {"latents": torch.randn(1, 16, 2, 8, 8)}, {"state": state})
    estimate = PEAK_BYTES["vae", "decode_chunk"](vae.config, ForwardSize(1, 2, 8, 8))
    assert live.peak <= estimate <= 3 * live.peak
