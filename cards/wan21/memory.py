"""Worst-case activations of Wan2.1's forwards, in bytes, from a module's config and the size of its input.

Counts what lives at once at the widest point of a forward without gradient, in float32: the residual stream, a block's
projections, a decoder's last stage. Fitted to counted allocations of small configs (``tests/cards/test_memory.py``);
scratch memory inside a kernel is not part of it. An attention that keeps its whole score matrix would need more.

Legend: d width of the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cards.memory import ForwardSize

FLOAT_BYTES = 4


def velocity_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The transformer's forward."""
    d = config["num_attention_heads"] * config["attention_head_dim"]
    per_token = max(14 * d, 5 * d + 2 * config["ffn_dim"])
    clip = size.tokens * per_token
    text = size.text_tokens * max(6 * d, 3 * d + config["text_dim"])
    latents = 6 * config["in_channels"] * size.cells
    return FLOAT_BYTES * size.rows * (clip + text + latents)


def decode_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The VAE's decode, which goes latent frame by latent frame and keeps the last two frames before each
    convolution."""
    temporal = 2 ** sum(config["temperal_downsample"])
    area = _area(config, size)
    chunk = area * temporal * config["base_dim"] * config["dim_mult"][0] * 8
    frames = (size.frames - 1) * temporal + 1
    video = 3 * 3 * frames * area
    return FLOAT_BYTES * size.rows * (chunk + video) + decoder_kept_bytes(config, size)


def decoder_kept_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """What the decoder's convolutions keep of the frames before, whatever their number."""
    per_pixel = 2 * config["base_dim"] * config["dim_mult"][0] * (6 + 4 * config["num_res_blocks"])
    return FLOAT_BYTES * size.rows * _area(config, size) * per_pixel


def _area(config: Mapping[str, Any], size: ForwardSize) -> int:
    """Pixels of a frame."""
    spatial = 2 ** (len(config["dim_mult"]) - 1)
    return size.height * spatial * size.width * spatial


def encode_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The text encoder's forward; its attention keeps the scores and their bias."""
    tokens, heads = size.text_tokens, config["num_heads"]
    wide = heads * config["d_kv"]
    linear = tokens * (6 * config["d_model"] + 4 * wide + 3 * config["d_ff"])
    scores = 4 * heads * tokens * tokens
    return FLOAT_BYTES * size.rows * (linear + scores)


PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    ("transformer", "velocity"): velocity_bytes,
    ("transformer", "velocity_first_block"): velocity_bytes,
    ("vae", "decode"): decode_bytes,
    ("vae", "decode_tile"): decode_bytes,
    ("text_encoder", "encode"): encode_bytes,
}
"""(component kind, operation) -> bytes."""
