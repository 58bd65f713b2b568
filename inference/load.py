"""``ckpt=`` and ``card=`` strings -> cards: a registered name, an export, a run folder, a plain diffusers or
transformers folder."""

from __future__ import annotations

from pathlib import Path

from cards.card import CARD_FILE, ModelCard
from cards.errors import UserError
from cards.registry import FAMILIES, family, family_of_architectures, family_of_pipeline
from cards.source import read_json


def card_of(place: str | Path) -> ModelCard:
    """The card of a registered name (its default size), an export, a run folder, a diffusers or a transformers folder.

    Raises ``UserError`` that says what was expected.
    """
    if str(place) in FAMILIES:
        entry = family(str(place))
        return entry.card(entry.sizes[0])
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"got {str(place)!r}: no such folder, and not a card name ({', '.join(sorted(FAMILIES))}); "
            "expected an export, a run folder or a diffusers folder"
        )
    for candidate in (folder, folder / "export"):
        if (candidate / CARD_FILE).is_file():
            return ModelCard.load(candidate)
    if (folder / "model_index.json").is_file():
        pipeline = str(read_json(folder / "model_index.json").get("_class_name"))
        return family_of_pipeline(pipeline, str(folder)).card_from_folder(folder)
    if (folder / "config.json").is_file():
        names = read_json(folder / "config.json").get("architectures")
        architectures = [str(name) for name in names] if isinstance(names, list) else []
        return family_of_architectures(architectures, str(folder)).card_from_folder(folder)
    raise UserError(
        f"{folder} holds no {CARD_FILE}, no export/{CARD_FILE} no model_index.json and no config.json; "
        "expected an export, a run folder that has exported, or a diffusers or transformers folder"
    )
