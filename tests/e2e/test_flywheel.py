"""Stages: each on the export of the one before, with the whole way in the last card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cards.card import ModelCard
from inference.load import card_of


def stages(*parts: tuple[str, tuple[str, ...]]) -> str:
    rows = [f"{{name: {name}, overrides: {json.dumps(list(overrides))}}}" for name, overrides in parts]
    return f"stages=[{', '.join(rows)}]"


@pytest.mark.slow
def test_the_last_card_knows_the_whole_way_and_a_complete_stage_is_not_run_again(
    runs: Any, wan_folder: Path, method_overrides: dict[str, tuple[str, ...]]
) -> None:
    command = (
        stages(("rl", method_overrides["diffusion_nft"]), ("distil", method_overrides["dmd2"])),
        f"card.source={wan_folder}",
        "run=wheel",
        "steps=2",
    )
    output = runs.run(*command)
    rows = json.loads((runs.outputs / "wheel" / "stages.json").read_text())["stages"]
    assert [row["method"] for row in rows] == ["diffusion_nft", "dmd2"]
    first, last = (ModelCard.load(Path(row["export"])) for row in rows)
    base = rows[0]["parents"][-1]
    assert last.recipe.parents == (first.digest, base) and first.recipe.parents == (base,)
    assert len({base, first.digest, last.digest}) == 3
    assert card_of(wan_folder).components == first.components
    assert f"stage 2/2  distil  {runs.outputs / 'wheel-2-distil'}" in output

    # Killed after the first stage: the second runs alone.
    (runs.outputs / "wheel-2-distil" / "summary.json").unlink()
    kept = (runs.outputs / "wheel-1-rl" / "summary.json").stat().st_mtime_ns
    runs.run(*command, "resume=auto")
    assert (runs.outputs / "wheel-1-rl" / "summary.json").stat().st_mtime_ns == kept
    again = json.loads((runs.outputs / "wheel" / "stages.json").read_text())["stages"]
    assert [row["card_digest"] for row in again] == [row["card_digest"] for row in rows]


def test_a_mistake_in_the_last_stage_is_told_before_the_first_one_runs(runs: Any, wan_folder: Path) -> None:
    for bad, message in (
        (stages(("rl", ("method=diffusion_nft",)), ("distil", ("method=dmd2", "method.ttur=0"))), "ttur: got 0"),
        (stages(("rl", ()), ("rl", ())), "expected a name each"),
        ("stages=[{name: rl}]", "expected {name: ..., overrides:"),
    ):
        process = runs.start(bad, f"card.source={wan_folder}", "run=bad")
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 2 and message in output and "Traceback" not in output, output
        assert not list(runs.outputs.glob("bad*"))
