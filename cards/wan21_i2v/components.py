"""What Wan2.1 image to video computes beyond ``cards.wan21``, value for value as ``diffusers.WanImageToVideoPipeline``.

The frame is prepared by the folder's own image processor and by the library's ``VideoProcessor``. Nothing here knows of
requests, loops or batching.

Legend: B batch, C latent channels, T latent frames, H W latent cells (pixels of an image), F frames, N image tokens,
L text tokens, D width, S side of the image encoder's picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image
from torch import Tensor

from cards.errors import UserError
from cards.wan21 import components as wan21
from cards.wan21.padding import fold
from cards.wan21_i2v.padding import install

Tensors = Mapping[str, Tensor]
TEXT_TOKENS = 512
"""Length of the text that the library's attention takes off the end of text and image together."""


# -- prepare: slots -> tensors of a call


def tokenize(parts: Mapping[str, Any], prompt: str, max_sequence_length: int) -> dict[str, Tensor]:
    """``ids`` and ``mask`` (1, L), padded to ``max_sequence_length``."""
    if max_sequence_length != TEXT_TOKENS:
        raise UserError(f"got a card with max_sequence_length {max_sequence_length}, expected {TEXT_TOKENS}")
    return wan21.tokenize(parts["tokenizer"], prompt, max_sequence_length)


def prepare_image(parts: Mapping[str, Any], image_HWC: Tensor, params: Any) -> dict[str, Tensor]:
    """``pixels`` (1, 3, S, S) of a uint8 RGB image, as the image encoder wants it."""
    return {"pixels": parts["image_processor"](images=_picture(image_HWC), return_tensors="pt").pixel_values}


def prepare_condition(parts: Mapping[str, Any], image_HWC: Tensor, params: Any) -> dict[str, Tensor]:
    """``video`` (1, 3, F, H, W) in [-1, 1]: the image at the clip's size, then grey frames."""
    frame = VideoProcessor().preprocess(_picture(image_HWC), height=params.height, width=params.width).unsqueeze(2)
    return {"video": torch.cat([frame, frame.new_zeros(1, 3, params.frames - 1, params.height, params.width)], dim=2)}


def _picture(image_HWC: Tensor) -> Image.Image:
    return Image.fromarray(image_HWC.cpu().numpy())


# -- operations


def encode_image(encoder: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """(B, N, D) hidden states before the last layer of ``pixels`` (B, 3, S, S)."""
    return encoder(pixel_values=tensors["pixels"].to(encoder.dtype), output_hidden_states=True).hidden_states[-2]


def encode_condition(vae: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """(B, M + C, T, H, W) of a ``video`` (B, 3, F, H, W): M channels that are 1 in the latent frame that is given, one
    for each frame that a latent frame holds, then the normalised latents."""
    latents_BCTHW = wan21.encode_video(vae, tensors, static)
    batch, _, *cells = latents_BCTHW.shape
    given = latents_BCTHW.new_zeros(batch, vae.config.scale_factor_temporal, *cells)
    given[:, :, 0] = 1
    return torch.cat([given, latents_BCTHW], dim=1)


def predict_velocity(transformer: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Velocity (B, C, T, H, W) at ``latents``, ``timestep`` (B,) under ``text`` (B, L, D), ``condition`` and
    ``image_embeds``."""
    dtype = getattr(torch, static["dtype"])
    text_BLD = tensors["text"]
    if static["text_padding"] == "folded":
        install(transformer, text_BLD.shape[1], tensors["image_embeds"].shape[1])
        text_BLD = fold(text_BLD)
    latents_BCTHW = torch.cat([tensors["latents"], tensors["condition"]], dim=1)
    return transformer(
        hidden_states=latents_BCTHW.to(dtype),
        timestep=tensors["timestep"],
        encoder_hidden_states=text_BLD.to(dtype),
        encoder_hidden_states_image=tensors["image_embeds"].to(dtype),
        return_dict=False,
    )[0]


OPERATIONS: dict[tuple[str, str], Callable[[Any, Tensors, Mapping[str, Any]], Tensor]] = {
    ("text_encoder", "encode"): wan21.encode_text,
    ("image_encoder", "encode_image"): encode_image,
    ("transformer", "velocity"): predict_velocity,
    ("vae", "decode"): wan21.decode_latents,
    ("vae", "encode"): wan21.encode_video,
    ("vae", "encode_condition"): encode_condition,
}

PREPARE: dict[str, Callable[..., dict[str, Tensor]]] = {
    "tokenize": tokenize,
    "encode_image": prepare_image,
    "encode_condition": prepare_condition,
}
