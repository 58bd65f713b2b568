"""Operations of an omni-like family: Wan's for clips, Qwen3's for text, over one tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cards.qwen3 import components as qwen3
from cards.wan21 import components as wan21

ENCODER_TOKENS = 16
"""Prompts of clips are padded to this; the text task asks for its whole context, which is another number."""


def tokenize(tokenizer: Any, prompt: Any, length: int) -> dict[str, Tensor]:
    if length == ENCODER_TOKENS:
        return wan21.tokenize(tokenizer, prompt, length)
    return {"ids": torch.tensor([tokenizer(prompt).input_ids])}


OPERATIONS = {**wan21.OPERATIONS, **qwen3.OPERATIONS}
PREPARE = {"tokenize": tokenize}
