"""Folded text padding: cross-attention to one padding token that stands for all of them.

WanPipeline pads every prompt's embedding with zeros to 512 tokens and attends to them all. Equal keys and values weigh
in a softmax like a single one whose logit is raised by the log of their number, so keeping one of ``n`` and raising
it by ``log n`` is the same function; in floating point it differs in the last bits. Where the video is short, the
padding is most of a forward's work.

Legend: B rows, L text tokens with padding, D text width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

BUCKET = 16  # kept tokens come in multiples of this


class FoldedPadding(WanAttnProcessor):  # type: ignore[misc]
    """Cross-attention whose text may be cut: its last token then stands for all padding up to ``length`` tokens.

    Text of ``length`` tokens is attended to exactly as the library does. Stateless, so activation checkpointing may
    call it again at any time.
    """

    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        assert encoder_hidden_states is not None
        kept = encoder_hidden_states.shape[1]
        if kept < self.length:
            attention_mask = hidden_states.new_zeros(1, 1, 1, kept)
            attention_mask[..., -1] = math.log(self.length - kept + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


def install(transformer: Any, length: int) -> None:
    """Lets the cross-attention of every block take cut text; again is no harm, and full text is as before."""
    for block in transformer.blocks:
        processor = block.attn2.processor
        if not isinstance(processor, FoldedPadding) or processor.length != length:
            block.attn2.set_processor(FoldedPadding(length))


def kept_tokens(used_L: Tensor) -> int:
    """How many of L tokens are kept where ``used_L`` (bool) are not padding: a multiple of ``BUCKET``, the last of them
    padding; all L when a prompt fills them too far for that."""
    length = used_L.shape[0]
    tokens = int(torch.nonzero(used_L).max()) + 1 if bool(used_L.any()) else 0
    return min((tokens // BUCKET + 1) * BUCKET, length)


def fold(text_BLD: Tensor) -> Tensor:
    """``text_BLD`` without most of its zero padding, see :func:`kept_tokens`."""
    return text_BLD[:, : kept_tokens((text_BLD != 0).any(2).any(0))]
