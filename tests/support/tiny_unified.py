"""A tiny random unified folder: a Wan folder of a test's own with a random Qwen3 refiner in ``llm/``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.support.tiny_qwen3 import save_tiny_qwen3

CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""The instruction and one token that asks for the prompt; the system message is left out."""


def save_tiny_unified(wan_folder: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """``folder``, which ``cards.unified.card.card_from_folder`` reads. Weights of the refiner are drawn wide, so that
    what it says depends on all that was said before."""
    from transformers import AutoTokenizer

    shutil.copytree(wan_folder, folder)
    save_tiny_qwen3(folder / "llm", seed=seed, **config)
    tokenizer = AutoTokenizer.from_pretrained(folder / "llm")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "llm")
    return folder


def save_tiny_unified_export(wan_folder: Path, folder: Path, **config: Any) -> Path:
    """The same with a card.json, as an export has it, so that a program takes it as ``ckpt``."""
    from cards.card import CARD_FILE, Source
    from cards.unified.card import card_from_folder

    save_tiny_unified(wan_folder, folder, **config)
    card = card_from_folder(folder).model_copy(update={"source": Source(kind="folder", location=".")})
    (folder / CARD_FILE).write_text(card.to_json())
    return folder
