"""Worst-case activations are at least what is allocated, and not far above it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cards.memory import ForwardSize
from cards.wan21.memory import decode_bytes, encode_bytes, velocity_bytes
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
