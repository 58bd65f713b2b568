"""Worst-case activations of image to video: those of ``cards.wan21``, whose transformer also attends to image tokens.

No formula for encoding the first frame: it is counted as nothing, as in other families that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cards.memory import ForwardSize
from cards.wan21 import memory as wan21

IMAGE_TOKENS = 257
"""Of the published image encoder: 16 x 16 patches and one for the whole."""


def velocity_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The transformer's forward."""
    return wan21.velocity_bytes(config, replace(size, text_tokens=size.text_tokens + IMAGE_TOKENS))


Configs = Mapping[str, Mapping[str, Any]]
"""Component -> its config."""


def condition_shape(configs: Configs, latent_shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Mask and latents of the frame."""
    channels, *cells = latent_shape
    return (configs["transformer"]["in_channels"] - channels, *cells)


def image_embeds_shape(configs: Configs, latent_shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Tokens of the image encoder, one for each patch and one for the whole."""
    encoder = configs["image_encoder"]
    return ((encoder["image_size"] // encoder["patch_size"]) ** 2 + 1, encoder["hidden_size"])


CONDITION_SHAPES: dict[str, Callable[[Configs, tuple[int, int, int, int]], tuple[int, ...]]] = {
    "condition": condition_shape,
    "image_embeds": image_embeds_shape,
}
"""Tensor of the denoiser's forward -> its shape for one clip."""

PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    ("transformer", "velocity"): velocity_bytes,
    ("vae", "decode"): wan21.decode_bytes,
    ("text_encoder", "encode"): wan21.encode_bytes,
}
"""(component kind, operation) -> bytes."""
