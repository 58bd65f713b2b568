"""Folded text padding beside image tokens: ``cards.wan21.padding`` for the cross-attention of image to video.

The library's attention takes the last 512 tokens as text, so cut text needs an attention that is told how many tokens
come of the image. Text of full length is attended to exactly as the library does.

Legend: B rows, Q queries, N image tokens, L text tokens, D width.
"""

from __future__ import annotations

import math
from typing import Any

from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class FoldedBesideImage(WanAttnProcessor):  # type: ignore[misc]
    """Cross-attention to ``image_tokens`` and then to text, whose last token, where it is shorter than ``length``,
    stands for all padding up to there. Stateless, so activation checkpointing may call it again at any time."""

    def __init__(self, length: int, image_tokens: int):
        super().__init__()
        self.length = length
        self.image_tokens = image_tokens

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        kept = encoder_hidden_states.shape[1] - self.image_tokens
        if kept == self.length:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        image_BND, text_BLD = encoder_hidden_states.split([self.image_tokens, kept], dim=1)
        query_BQD = attn.norm_q(attn.to_q(hidden_states))
        bias = hidden_states.new_zeros(1, 1, 1, kept)
        bias[..., -1] = math.log(self.length - kept + 1)
        of_text = _attend(attn.heads, query_BQD, attn.norm_k(attn.to_k(text_BLD)), attn.to_v(text_BLD), bias)
        image_key_BND = attn.norm_added_k(attn.add_k_proj(image_BND))
        of_image = _attend(attn.heads, query_BQD, image_key_BND, attn.add_v_proj(image_BND), None)
        projection, dropout = attn.to_out
        return dropout(projection(of_text + of_image))


def _attend(heads: int, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """(B, Q, D) of queries (B, Q, D), keys and values (B, L, D)."""
    query, key, value = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, bias).transpose(1, 2).flatten(2, 3)


def install(transformer: nn.Module, length: int, image_tokens: int) -> None:
    """Lets the cross-attention of every block take cut text; again is no harm, and full text is as before."""
    for block in transformer.blocks:  # type: ignore[union-attr]
        old = block.attn2.processor
        fits = isinstance(old, FoldedBesideImage) and (old.length, old.image_tokens) == (length, image_tokens)
        if not fits:
            block.attn2.set_processor(FoldedBesideImage(length, image_tokens))
