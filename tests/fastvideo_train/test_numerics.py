"""Folded text padding: the same function in other bits, and a card that says so and passes its own gates."""

from __future__ import annotations

from pathlib import Path

import pytest

from cards.card import CARD_FILE
from cards.wan21.card import card_from_folder
from fastvideo_train.numerics import FOLDED_TOLERANCE, with_text_padding
from inference.parity.__main__ import main


def test_a_folded_card_promises_the_librarys_bits_no_more(wan_folder: Path) -> None:
    card = card_from_folder(wan_folder)
    assert with_text_padding(card, "full").digest == card.digest
    folded = with_text_padding(card, "folded")
    assert folded.precision.text_padding == "folded"
    assert folded.parity.tolerances == {**card.parity.tolerances, "C0": FOLDED_TOLERANCE, "C1": FOLDED_TOLERANCE}
    assert with_text_padding(folded, "folded").digest == folded.digest


def test_an_export_in_folded_padding_passes_the_parity_command(
    make_wan_folder: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What every DiffusionNFT run of the tiny card exports."""
    import shutil

    folder = make_wan_folder(seed=5)  # type: ignore[operator]
    export = tmp_path / "export"
    shutil.copytree(folder, export)
    card = with_text_padding(card_from_folder(folder), "folded")
    source = card.source.model_copy(update={"location": "."})
    (export / CARD_FILE).write_text(card.model_copy(update={"source": source}).to_json())
    assert main([f"card={export}"]) == 0
    assert "rows hold" in capsys.readouterr().out
