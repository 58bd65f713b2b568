"""Tiny random experts: one Qwen3 folder a name, each of its own weights, and a card with them before a Wan folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.tiny_qwen3 import save_tiny_qwen3
from tests.support.tiny_unified import CHAT


def save_tiny_experts(folder: Path, names: Sequence[str], **config: Any) -> dict[str, str]:
    """Name -> folder, as ``card.refiners`` takes it."""
    from transformers import AutoTokenizer

    places = {}
    for seed, name in enumerate(names):
        place = save_tiny_qwen3(folder / name, seed=seed, **config)
        tokenizer = AutoTokenizer.from_pretrained(place)
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(place)
        places[name] = str(place)
    return places


def tiny_chain(wan_folder: Path, folder: Path, names: Sequence[str], **config: Any) -> Any:
    """A card whose generator is ``wan_folder`` and whose experts are saved in ``folder``."""
    from cards.multi_expert.card import build_card

    refiners = save_tiny_experts(folder, names, **config)
    return build_card("tiny", source=str(wan_folder), experts=list(names), refiners=refiners)
