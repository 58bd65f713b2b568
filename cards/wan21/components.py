"""What Wan2.1's components compute: each operation as a function of tensors with a leading batch dim.

The operations repeat, value for value, what ``diffusers.WanPipeline`` does around its modules, so the results are
those of the library. Nothing here knows of requests, loops or batching.

Legend: B batch, C latent channels, T latent frames, H W latent cells, F frames, L tokens, D text width.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor
from torch.nn.functional import pad

from cards.errors import UserError
from cards.wan21.first_block import first_block_cache
from cards.wan21.padding import fold, install, kept_tokens

Tensors = Mapping[str, Tensor]


def clean_prompt(text: str) -> str:
    """Text repair, HTML unescape and white space, as WanPipeline cleans a prompt (ftfy is optional there too)."""
    try:
        import ftfy

        text = ftfy.fix_text(text)
    except ImportError:
        pass
    text = html.unescape(html.unescape(text)).strip()
    return re.sub(r"\s+", " ", text).strip()


# -- prepare: slots -> tensors of a call


def tokenize(tokenizer: Any, prompt: str, max_sequence_length: int) -> dict[str, Tensor]:
    """``ids`` and ``mask`` (1, L), padded to ``max_sequence_length``."""
    out = tokenizer(
        [clean_prompt(prompt)],
        padding="max_length",
        max_length=max_sequence_length,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {"ids": out.input_ids, "mask": out.attention_mask}


# -- operations


def encode_text(encoder: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """(B, L, D) last hidden states, zero after each prompt's end.

    In folded text padding the encoder reads no more of the padding, which it masks anyway, than a forward will.
    """
    ids_BL, mask_BL = tensors["ids"], tensors["mask"]
    length = ids_BL.shape[1]
    if static.get("text_padding") == "folded":
        kept = kept_tokens(mask_BL.bool().any(0))
        ids_BL, mask_BL = ids_BL[:, :kept], mask_BL[:, :kept]
    hidden_BLD = encoder(ids_BL, mask_BL).last_hidden_state
    hidden_BLD = hidden_BLD.masked_fill(~mask_BL.bool().unsqueeze(-1), 0)
    return pad(hidden_BLD, (0, 0, 0, length - hidden_BLD.shape[1]))


def predict_velocity(transformer: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Velocity (B, C, T, H, W) at ``latents``, ``timestep`` (B,) under ``text`` (B, L, D)."""
    dtype = getattr(torch, static["dtype"])
    text_BLD = tensors["text"]
    if static["text_padding"] == "folded":
        install(transformer, text_BLD.shape[1])
        text_BLD = fold(text_BLD)
    return transformer(
        hidden_states=tensors["latents"].to(dtype),
        timestep=tensors["timestep"],
        encoder_hidden_states=text_BLD.to(dtype),
        return_dict=False,
    )[0]


def predict_velocity_first_block(transformer: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """As :func:`predict_velocity`; the first block alone where it has changed by no more than ``static["threshold"]``.

    ``static["state"]``: what earlier forwards of the same request and branch remember.
    """
    with first_block_cache(transformer, static["threshold"], static["state"]):
        return predict_velocity(transformer, tensors, static)


def _moments(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and 1 / std per latent channel, shaped (1, C, 1, 1, 1)."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(like.device, like.dtype)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(like.device, like.dtype)
    return mean, inverse_std


def _denormalised(vae: Any, tensors: Tensors) -> Tensor:
    """Latents (B, C, T, H, W) as the VAE's decoder takes them."""
    latents_BCTHW = tensors["latents"].to(vae.dtype)
    mean, inverse_std = _moments(vae, latents_BCTHW)
    return latents_BCTHW / inverse_std + mean


def decode_latents(vae: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Video (B, 3, F, 8H, 8W) in [-1, 1] of normalised latents (B, C, T, H, W)."""
    return vae.decode(_denormalised(vae, tensors), return_dict=False)[0]


def decode_tile(vae: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Video (B, 3, F, 8H, 8W), not clamped yet, of one tile (B, C, T, H, W) of normalised latents.

    What ``AutoencoderKLWan.tiled_decode`` evaluates for a tile: latent frame by latent frame, with the causal features
    of the frames before in a list of this call's own, not on the module.
    """
    return decoder_frames(vae, tensors, None)[0]


def decoder_frames(vae: Any, tensors: Tensors, features: list[Any] | None) -> tuple[Tensor, list[Any]]:
    """Video (B, 3, F, 8H, 8W), not clamped yet, of normalised latents (B, C, T, H, W) that follow earlier ones.

    ``features``: what the decoder's causal convolutions keep of the frames before, None where there are none; comes
    back as it is after these frames, in a new list.
    """
    if vae.config.patch_size is not None:
        raise UserError(f"got a VAE with patch_size={vae.config.patch_size}, expected none; decode it untiled")
    latents_BCTHW = _denormalised(vae, tensors)
    first = features is None
    convolutions = sum(isinstance(module, WanCausalConv3d) for module in vae.decoder.modules())
    kept: list[Any] = [None] * convolutions if features is None else [*features]
    frames = [
        vae.decoder(vae.post_quant_conv(frame), feat_cache=kept, feat_idx=[0], first_chunk=first and k == 0)
        for k, frame in enumerate(latents_BCTHW.split(1, dim=2))
    ]
    return torch.cat(frames, dim=2), kept


def encode_video(vae: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Normalised latents (B, C, T, H, W): the posterior's mode of a video (B, 3, F, H, W) in [-1, 1]."""
    latents_BCTHW = vae.encode(tensors["video"].to(vae.dtype)).latent_dist.mode()
    mean, inverse_std = _moments(vae, latents_BCTHW)
    return (latents_BCTHW - mean) * inverse_std


OPERATIONS: dict[tuple[str, str], Callable[[Any, Tensors, Mapping[str, Any]], Tensor]] = {
    ("text_encoder", "encode"): encode_text,
    ("transformer", "velocity"): predict_velocity,
    ("transformer", "velocity_first_block"): predict_velocity_first_block,
    ("vae", "decode"): decode_latents,
    ("vae", "decode_tile"): decode_tile,
    ("vae", "encode"): encode_video,
}

PREPARE: dict[str, Callable[..., dict[str, Tensor]]] = {"tokenize": tokenize}
