"""What a CLIP computes: prompt to tokens, frames to pixels, and how well they agree.

The processor is the folder's own, so tokens and pixels are those of transformers. The similarity is that of
``CLIPModel.forward``; only the norm is written differently, which is a last bit. ``methods`` builds its CLIP rewards of
these same functions. Nothing here knows of requests, loops or batching.

Legend: B rows, N prompts or frames, L tokens, D width of the joint space, H W pixels, S side of the model's image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


# -- prepare: slots -> tensors of a call


def tokenize(processor: Any, prompt: str | Sequence[str], length: int) -> dict[str, Tensor]:
    """``ids`` and ``mask`` (N, L) of one prompt or several, padded and cut to ``length`` tokens."""
    out = processor.tokenizer(
        [prompt] if isinstance(prompt, str) else list(prompt),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_attention_mask=True,
        return_tensors="pt",
    )
    return {"ids": out.input_ids, "mask": out.attention_mask}


def pixels(processor: Any, frames_NHWC: Tensor) -> Tensor:
    """(N, 3, S, S) float32 of uint8 RGB frames (N, H, W, 3): resized, cropped and normalised as the processor says."""
    images = list(frames_NHWC.cpu().numpy())
    prepared = processor.image_processor(images=images, input_data_format="channels_last", return_tensors="pt")
    return prepared["pixel_values"]


# -- features


def text_features(clip: Any, ids_NL: Tensor, mask_NL: Tensor) -> Tensor:
    """Unit embeddings (N, D) float32 of prompts."""
    return _unit(clip.get_text_features(input_ids=ids_NL, attention_mask=mask_NL).pooler_output)


def image_features(clip: Any, pixels_NCSS: Tensor) -> Tensor:
    """Unit embeddings (N, D) float32 of prepared frames."""
    return _unit(clip.get_image_features(pixel_values=pixels_NCSS.to(clip.dtype)).pooler_output)


def similarity(clip: Any, image_ND: Tensor, text_ND: Tensor) -> Tensor:
    """(N,) float32: exp(logit_scale) cos(image, text), row by row; the ``logits_per_image`` of ``CLIPModel``."""
    return clip.logit_scale.float().exp() * (image_ND * text_ND).sum(-1)


def _unit(features_ND: Tensor) -> Tensor:
    return torch.nn.functional.normalize(features_ND.float(), dim=-1)


# -- operations


def encode_text(clip: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """Unit embeddings (B, D) of ``ids`` and ``mask`` (B, L)."""
    return text_features(clip, tensors["ids"], tensors["mask"])


def score(clip: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """(B,): the similarity of ``pixels`` (B, 3, S, S), as :func:`pixels` prepares them, with ``text`` (B, D)."""
    return similarity(clip, image_features(clip, tensors["pixels"]), tensors["text"])


OPERATIONS: dict[tuple[str, str], Callable[[Any, Tensors, Mapping[str, Any]], Tensor]] = {
    ("scorer", "encode"): encode_text,
    ("scorer", "score"): score,
}

PREPARE: dict[str, Callable[..., Any]] = {"tokenize": tokenize, "pixels": pixels}
