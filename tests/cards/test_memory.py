"""Worst-case activations are at least what is allocated, and not far above it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cards.memory import ForwardSize
from cards.qwen3.components import next_logits, token_log_probs
from cards.qwen3.memory import held_bytes, next_logits_bytes, token_log_probs_bytes
from cards.reward.components import encode_text, score
from cards.reward.memory import encode_bytes as clip_encode_bytes
from cards.reward.memory import score_bytes
from cards.wan21.memory import decode_bytes, encode_bytes, velocity_bytes
from inference.cache.paged import PagedPool
from inference.cache.paged_source import PagedKV
from inference.cache.paged_transformers import paged_spec
from loops.ar_decode import GrowingKV
from tests.support.live_bytes import LiveBytes

FAR = 3.0


def check(measured: int, estimate: int) -> None:
    print(f"measured {measured}, estimate {estimate}, {estimate / measured:.2f}x")
    assert measured <= estimate <= FAR * measured


@pytest.mark.parametrize(
    ("heads", "head_dim", "ffn", "cells", "text", "rows"),
    [
        (2, 16, 64, (3, 4, 4), 16, 1),
        (4, 32, 512, (3, 8, 8), 512, 1),
        (6, 64, 1536, (5, 16, 16), 64, 2),
        (12, 128, 8960, (2, 16, 16), 512, 1),
        (4, 32, 512, (5, 32, 32), 16, 1),
    ],
)
def test_the_transformer(heads: int, head_dim: int, ffn: int, cells: Any, text: int, rows: int) -> None:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=8,
        out_channels=8,
        text_dim=64,
        freq_dim=256,
        ffn_dim=ffn,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    ).eval()
    inputs = torch.randn(rows, 8, *cells), torch.full((rows,), 500.0), torch.randn(rows, text, 64)
    with torch.no_grad(), LiveBytes() as live:
        model(*inputs, return_dict=False)
    tokens = cells[0] * cells[1] * cells[2] // 4
    check(live.peak, velocity_bytes(model.config, ForwardSize(rows, *cells, tokens, text)))


@pytest.mark.parametrize(
    ("base", "mult", "res", "cells", "rows"),
    [
        (8, [1, 2, 4, 4], 1, (3, 4, 4), 1),
        (16, [1, 2, 4, 4], 2, (3, 8, 8), 1),
        (16, [1, 2, 2, 2], 1, (5, 8, 8), 2),
        (16, [1, 2, 4, 4], 2, (2, 8, 16), 1),
    ],
)
def test_the_decoder(base: int, mult: list[int], res: int, cells: Any, rows: int) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=base, z_dim=4, dim_mult=mult, num_res_blocks=res, temperal_downsample=[False, True, True]
    ).eval()
    with torch.no_grad(), LiveBytes() as live:
        vae.decode(torch.randn(rows, 4, *cells))
    check(live.peak, decode_bytes(vae.config, ForwardSize(rows, *cells)))


@pytest.mark.parametrize(
    ("width", "head", "ffn", "heads", "tokens", "rows"),
    [(64, 16, 128, 4, 512, 1), (32, 8, 64, 2, 16, 1), (128, 32, 256, 4, 128, 2)],
)
def test_the_text_encoder(width: int, head: int, ffn: int, heads: int, tokens: int, rows: int) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=100, d_model=width, d_kv=head, d_ff=ffn, num_layers=2, num_heads=heads)
    model = UMT5EncoderModel(config).eval()
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    with torch.no_grad(), LiveBytes() as live:
        model(ids, torch.ones_like(ids))
    check(live.peak, encode_bytes(config.to_dict(), ForwardSize(rows, text_tokens=tokens)))


LMS = [(32, 48, 4, 2, 8), (64, 1024, 4, 4, 8), (64, 64, 8, 1, 32), (256, 96, 2, 1, 16), (128, 384, 8, 4, 16)]
"""Width, width of the MLP, query heads, key heads, width of a head."""


def language_model(width: int, ffn: int, heads: int, key_heads: int, head: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=300,
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head,
        max_position_embeddings=1024,
    )
    return Qwen3ForCausalLM(config).eval()


def fill(lm: Any, kv: Any, tokens: int) -> Any:
    """The handle after a prompt of so many tokens."""
    if tokens:
        next_logits(lm, {"ids": torch.zeros(1, tokens, dtype=torch.long)}, {"state": kv})
    return kv


@pytest.mark.parametrize("sizes", LMS)
@pytest.mark.parametrize(
    ("new", "pasts"),
    [
        (1, [0]),
        (200, [0]),
        (100, [0, 0]),
        (1, [200]),
        (1, [200, 50, 10]),
        (7, [200, 50, 10]),
        (100, [300, 0]),
        (400, [32]),
    ],
)
@torch.no_grad()
def test_the_language_model_on_pages(sizes: Any, new: int, pasts: list[int]) -> None:
    lm = language_model(*sizes)
    pool = PagedPool(paged_spec(lm.config, blocks=100))
    kv = [fill(lm, PagedKV(pool, pool.open(i, "main", [0], root=None)), past) for i, past in enumerate(pasts)]
    ids = torch.zeros(len(pasts), new, dtype=torch.long)
    with LiveBytes() as live:
        next_logits(lm, {"ids": ids}, {"state": tuple(kv) if len(kv) > 1 else kv[0]})
    check(
        live.peak,
        next_logits_bytes(lm.config.to_dict(), ForwardSize(len(pasts), text_tokens=new, past_tokens=max(pasts))),
    )


@pytest.mark.parametrize("sizes", LMS)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 30), (1, 200), (3, 64)])
@torch.no_grad()
def test_the_log_probs_of_whole_texts(sizes: Any, rows: int, tokens: int) -> None:
    lm = language_model(*sizes)
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    with LiveBytes() as live:
        token_log_probs(lm, {"ids": ids, "mask": torch.ones_like(ids)}, {"temperature": 1.0})
    check(live.peak, token_log_probs_bytes(lm.config.to_dict(), ForwardSize(rows, text_tokens=tokens)))


@pytest.mark.parametrize("sizes", LMS)
@pytest.mark.parametrize(("new", "past"), [(200, 0), (1, 200), (40, 32)])
@torch.no_grad()
def test_the_language_model_with_keys_and_values_of_its_own(sizes: Any, new: int, past: int) -> None:
    """The cache is made anew as it grows, so that all that is held is counted too."""
    lm = language_model(*sizes)
    kv = fill(lm, GrowingKV(), past)
    with LiveBytes() as live:
        next_logits(lm, {"ids": torch.zeros(1, new, dtype=torch.long)}, {"state": kv})
    config = lm.config.to_dict()
    held = held_bytes(config, new + past)
    kept = sum(t.numel() * t.element_size() for layer in kv.cache.layers for t in (layer.keys, layer.values))
    assert held == kept
    check(live.peak, next_logits_bytes(config, ForwardSize(1, text_tokens=new, past_tokens=past)) + held)


@pytest.mark.parametrize(
    ("width", "ffn", "tokens", "side", "patch", "rows"),
    [(16, 32, 12, 16, 8, 1), (64, 256, 77, 64, 8, 4), (64, 64, 77, 224, 14, 2), (64, 1024, 30, 32, 8, 2)],
)
@torch.no_grad()
def test_the_scorer(width: int, ffn: int, tokens: int, side: int, patch: int, rows: int) -> None:
    from transformers import CLIPConfig, CLIPModel

    tower = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = CLIPConfig(
        text_config={
            **tower,
            "max_position_embeddings": tokens,
            "vocab_size": 9,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        vision_config={**tower, "image_size": side, "patch_size": patch},
        projection_dim=8,
    )
    clip = CLIPModel(config).eval()
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, tokens // 2 :] = 0
    with LiveBytes() as live:
        encode_text(clip, {"ids": torch.ones_like(mask), "mask": mask}, {})
    check(live.peak, clip_encode_bytes(config.to_dict(), ForwardSize(rows, text_tokens=tokens)))
    frames = [torch.randn(1, 3, side, side) for _ in range(rows)]
    text = torch.randn(rows, 8)
    with LiveBytes() as live:
        score(clip, {"pixels": torch.cat(frames), "text": text}, {})
    check(live.peak, score_bytes(config.to_dict(), ForwardSize(rows)))
