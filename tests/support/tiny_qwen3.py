"""Tiny random Qwen3 folders, written by transformers' own save: a byte-level tokenizer of 263 tokens and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

END = 2
"""Id of <|im_end|>, the end token."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("a", "b"), ("ab", "c"), ("e", "n"), ("en", "d"))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIGS: dict[str, dict[str, Any]] = {
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16},
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3},
    "mqa tied": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True},
    "mha bias": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True},
    "sliding": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
}


def tiny_tokenizer(*, chat: bool = True) -> Any:
    """Qwen's tokenizer class over single bytes and four merges: any text survives it."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    words = [*SPECIAL, *sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=list(MERGES),
        additional_special_tokens=list(SPECIAL[1:]),
    )
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tiny_qwen3(folder: Path, *, seed: int = 0, chat: bool = True, **config: Any) -> Path:
    """Weights are drawn wide, so that what is said depends on all that was said before."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer(chat=chat)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "eos_token_id": END,
        "pad_token_id": 0,
        **CONFIGS["gqa"],
    }
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**{**settings, **config})).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
