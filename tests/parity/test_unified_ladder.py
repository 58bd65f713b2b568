"""The whole ladder of a card that rewrites prompts, against generate and WanPipeline on its own folder."""

from __future__ import annotations

from pathlib import Path

from cards.unified.card import card_from_folder
from inference.parity.ladder import run_ladder
from tests.support.tiny_unified import save_tiny_unified


def test_every_row_holds(wan_folder: Path, tmp_path: Path) -> None:
    folder = save_tiny_unified(wan_folder, tmp_path / "model", initializer_range=0.12)
    card = card_from_folder(folder)
    small = card.sampling.model_copy(update={"frames": 5, "height": 16, "width": 16})
    text = small.text.model_copy(update={"max_tokens": 8})  # type: ignore[union-attr]
    rows = list(run_ladder(card.model_copy(update={"sampling": small.model_copy(update={"text": text})})))
    assert [row.what for row in rows if not row.passed] == []
    assert {row.level for row in rows} == {"C0", "C1", "C2", "C3", "interleave"}
    assert sum("refine: rollout log-probs" in row.what for row in rows) == 2
