"""A card of two programs, text over a causal LM and clips over Wan's parts, and the folder that it is of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cards.card import ModelCard, Source
from cards.registry import FAMILIES, Family
from inference.load import card_of
from tests.support.omni.components import ENCODER_TOKENS
from tests.support.tiny_qwen3 import save_tiny_qwen3

FAMILY = Family("omni", (), ("tiny",), "tests.support.omni")
VOCABULARY = 14
"""Words of the tokenizer of a test's Wan folder."""


def save_omni(wan_folder: Path, folder: Path) -> Path:
    """A Wan folder with a language model beside its parts; its tokenizer serves both."""
    shutil.copytree(wan_folder, folder)
    save_tiny_qwen3(folder / "lm", vocab_size=VOCABULARY)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "lm": ["transformers", "Qwen3ForCausalLM"]}))
    return folder


def omni_card(folder: Path) -> ModelCard:
    """The card of such a folder; its family must be registered (:func:`registered`)."""
    clips, text = card_of(folder), card_of(folder / "lm")
    tokenizer = clips.components["tokenizer"].model_copy(update={"required_for": ("t2v", "text")})
    lm = text.components["lm"].model_copy(update={"subfolder": "lm", "trainable": False})
    sampling = clips.sampling.model_copy(update={"max_sequence_length": ENCODER_TOKENS, "text": text.sampling.text})
    card = clips.model_copy(
        update={
            "name": "omni-tiny",
            "family": "omni",
            "size": "tiny",
            "source": Source(kind="folder", location=str(folder)),
            "components": {**clips.components, "tokenizer": tokenizer, "lm": lm},
            "loops": {**clips.loops, **text.loops},
            "programs": {**clips.programs, **text.programs},
            "sampling": sampling,
        }
    )
    return card


def registered() -> dict[str, Family]:
    """The families with this one among them, for ``monkeypatch.setattr``."""
    return {**FAMILIES, FAMILY.name: FAMILY}
