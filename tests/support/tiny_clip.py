"""Tiny random CLIP folders, written by transformers' own save: a tokenizer of letters, its image processor, a model."""

from __future__ import annotations

from pathlib import Path

import torch

TEXT_LENGTH = 12
"""Tokens, start and end included."""
SIDE = 16
"""Pixels of the model's image, a side."""


def save_tiny_clip(folder: Path, *, seed: int = 0) -> Path:
    """Two layers a tower, images of ``SIDE`` pixels in patches of 8, prompts of ``TEXT_LENGTH`` tokens."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=TEXT_LENGTH)
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **sizes,
            "vocab_size": len(words),
            "max_position_embeddings": TEXT_LENGTH,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
        vision_config={**sizes, "image_size": SIDE, "patch_size": 8},
        projection_dim=8,
        logit_scale_init_value=3.1,
    )
    torch.manual_seed(seed)
    CLIPModel(config).save_pretrained(folder)
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder
