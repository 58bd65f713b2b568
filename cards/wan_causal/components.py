"""What the causal Wan's components compute: those of ``cards.wan21`` and five operations more.

Nothing here knows of requests or loops. A chunk's operation reads and grows the state that its call carries.

Legend: B batch, C latent channels, T latent frames, H W latent cells, F frames, L tokens, D text width, J chunks,
N width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cards.errors import UserError
from cards.wan21 import components as wan21
from cards.wan21.components import PREPARE, Tensors, decoder_frames
from cards.wan21.padding import fold, install
from cards.wan_causal.transformer import Causal, FromSnapshot, FromStore, block_causal, teacher_forced

__all__ = ["OPERATIONS", "PREPARE"]


def predict_block_causal(transformer: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Velocity (B, C, T, H, W) of a whole clip at ``latents``, ``timestep`` (B,) or (B, J), under ``text`` (B, L, D).

    ``static``: ``chunk`` latent frames a chunk, ``window`` chunks (None = all) and ``sinks``. ``action`` (B, J, N), of
    each chunk, where the card has actions.
    """
    latents, timestep, action = tensors["latents"], tensors["timestep"], tensors.get("action")
    chunks, tokens = _chunking(transformer, latents, static["chunk"])
    causal = block_causal(chunks, tokens, static["window"], static["sinks"])
    if action is not None:
        timestep = timestep.reshape(latents.shape[0], -1).expand(-1, chunks)
    return _velocity(transformer, latents, timestep, tensors["text"], static, causal, action)


def predict_teacher_forced(transformer: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """As :func:`predict_block_causal`, for noisy ``latents`` whose past is ``clean`` (B, C, T, H, W), at once.

    ``clean_timestep`` (B,) is that of the clean clip, which is context alone: no velocity is given for it.
    """
    noisy, clean = tensors["latents"], tensors["clean"]
    chunks, tokens = _chunking(transformer, noisy, static["chunk"])
    causal = teacher_forced(chunks, tokens, static["window"], static["sinks"])
    timestep_BJ = tensors["timestep"].reshape(noisy.shape[0], -1).expand(-1, chunks)
    clean_BJ = tensors["clean_timestep"].unsqueeze(1).expand(-1, chunks).to(timestep_BJ.dtype)
    timestep = torch.cat([clean_BJ, timestep_BJ], dim=1)
    both = torch.cat([clean.to(noisy.dtype), noisy], dim=2)
    action = tensors.get("action")
    actions = None if action is None else torch.cat([action, action], dim=1)
    return _velocity(transformer, both, timestep, tensors["text"], static, causal, actions)[:, :, noisy.shape[2] :]


def predict_chunk(transformer: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Velocity (B, C, T, H, W) of chunk ``static["index"]`` (from 0), after the chunks in ``static["state"].store``.

    The chunk's own keys and values are written there, over those of an earlier forward of it. With gradient the past is
    frozen for the backward, and what is written is cut from the graph unless ``static["keep_graph"]``.
    """
    latents, chunk, store = tensors["latents"], static["index"], static["state"].store
    timestep, text, action = tensors["timestep"], tensors["text"], tensors.get("action")
    starts = (chunk * latents.shape[2],)
    if not torch.is_grad_enabled():
        causal = Causal(FromStore(store, chunk), starts)
        return _velocity(transformer, latents, timestep, text, static, causal, action)
    attend = FromSnapshot(store, chunk)
    velocity = _velocity(transformer, latents, timestep, text, static, Causal(attend, starts), action)
    attend.commit(keep_graph=static.get("keep_graph", False))
    return velocity


def decode_chunk(vae: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Video (B, 3, F, 8H, 8W) in [-1, 1] of the next latent frames (B, C, T, H, W) of a clip.

    ``static["state"].features``: what the decoder's causal convolutions keep of the frames before; None at the first.
    """
    state = static["state"]
    video, state.features = decoder_frames(vae, tensors, state.features)
    return torch.clamp(video, min=-1.0, max=1.0)


def _chunking(transformer: Any, latents_BCTHW: Tensor, chunk: int) -> tuple[int, int]:
    """(chunks, tokens a chunk)."""
    frames, height, width = latents_BCTHW.shape[2:]
    if frames % chunk:
        raise UserError(f"got {frames} latent frames, expected a multiple of {chunk} (frames a chunk)")
    return frames // chunk, chunk * height * width // math.prod(transformer.config.patch_size)


def _velocity(
    transformer: Any,
    latents: Tensor,
    timestep: Tensor,
    text_BLD: Tensor,
    static: Mapping[str, Any],
    causal: Causal,
    action: Tensor | None,
) -> Tensor:
    dtype = getattr(torch, static["dtype"])
    if static["text_padding"] == "folded":
        install(transformer, text_BLD.shape[1])
        text_BLD = fold(text_BLD)
    return transformer(latents.to(dtype), timestep, text_BLD.to(dtype), causal=causal, action=action)[0]


def embed_actions(embedding: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Vectors (B, J, N) of action ``ids`` (B, J)."""
    return embedding(tensors["ids"])


OPERATIONS: dict[tuple[str, str], Callable[[Any, Tensors, Mapping[str, Any]], Tensor]] = {
    **{key: op for key, op in wan21.OPERATIONS.items() if key != ("transformer", "velocity_first_block")},
    ("transformer", "velocity_block_causal"): predict_block_causal,
    ("transformer", "velocity_teacher_forced"): predict_teacher_forced,
    ("transformer", "velocity_chunk"): predict_chunk,
    ("vae", "decode_chunk"): decode_chunk,
    ("action_embedding", "embed"): embed_actions,
}
