"""``python -m fastvideo_train.card``: what it shows is what the cards say, and a chain names every card at hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cards.card import ModelCard
from cards.registry import family
from fastvideo_train.card import main, metrics_table
from fastvideo_train.export import derived_card
from fastvideo_train.lineage import chain, differences, known_cards


@dataclass(frozen=True)
class Family:
    """base -> NFT -> DMD2, the last two written as runs export them."""

    base: ModelCard
    nft: ModelCard
    dmd2: ModelCard
    runs: Path

    def export(self, run: str) -> str:
        return str(self.runs / run / "export")


def child(card: ModelCard, method: str, before: float, after: float, **changes: Any) -> ModelCard:
    derived = derived_card(
        card,
        method=method,
        guidance=1.0,
        data="ShapeWorld",
        metrics={"before_all_correct": before, "after_all_correct": after},
        weights={"transformer": "ab" * 32},
        parent=card,
    )
    return derived.model_copy(update=changes)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Family:
    """The NFT run trains in folded text padding, as its method asks: its parent is the base so changed."""
    monkeypatch.chdir(tmp_path)
    base = family("wan21").card("tiny")
    folded = base.model_copy(update={"precision": base.precision.model_copy(update={"text_padding": "folded"})})
    nft = child(folded, "diffusion_nft", 0.25, 0.5)
    ladder = (1.0, 0.75, 0.5, 0.25)
    denoise = nft.loops["denoise"]
    distilled = denoise.model_copy(update={"schedule": denoise.schedule.model_copy(update={"ladder": ladder})})
    dmd2 = child(nft, "dmd2", 0.5, 0.75, loops={"denoise": distilled})
    for run, card in (("nft", nft), ("dmd2", dmd2)):
        folder = tmp_path / "runs" / run / "export"
        folder.mkdir(parents=True)
        (folder / "card.json").write_text(card.to_json())
    return Family(base, nft, dmd2, tmp_path / "runs")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "json=true"))


def test_a_chain_of_three_digests_nearest_first(tree: Family, capsys: pytest.CaptureFixture[str]) -> None:
    links = run_json(capsys, "lineage", tree.export("dmd2"))
    assert [link["digest"] for link in links] == [tree.dmd2.digest, *tree.dmd2.recipe.parents]
    assert len(links) == 3 and links[1]["digest"] == tree.nft.digest
    assert [link["method"] for link in links] == ["dmd2", "diffusion_nft", "pretrained"]
    assert [link["name"] for link in links] == [tree.dmd2.name, tree.nft.name, "wan21-tiny"]
    assert links[0]["metrics"] == {"before_all_correct": 0.5, "after_all_correct": 0.75}
    assert [link["numerics"] for link in links] == [None, None, "text_padding=folded"]
    assert [link["place"] for link in links] == [tree.export("dmd2"), tree.export("nft"), "registered"]


def test_the_table_names_every_parent_and_the_strangers(tree: Family, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "lineage", tree.export("dmd2"), "qwen3")
    positions = [text.index(digest) for digest in (tree.dmd2.digest, *tree.dmd2.recipe.parents)]
    assert positions == sorted(positions)
    assert "all_correct 0.5 -> 0.75" in text and "wan21-tiny (text_padding=folded)" in text
    assert text.rstrip().endswith("not in this lineage: qwen3")


def test_parents_are_found_in_the_folders_given_and_under_outputs(tree: Family, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    (alone / "card.json").write_text(tree.dmd2.to_json())
    lone = ModelCard.load(alone)
    unknown = chain(lone, known_cards([("alone", lone)]))[1]
    assert unknown.digest == tree.nft.digest and unknown.name is None
    given = known_cards([("alone", lone), ("nft", tree.nft)])
    assert chain(lone, given)[1].place == "nft"
    tree.runs.rename(tmp_path / "outputs")
    assert chain(lone, known_cards([("alone", lone)]))[1].name == tree.nft.name


def test_an_unknown_parent_is_shown_by_its_digest_alone(tree: Family, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = tree.runs / "orphan" / "export"
    orphan.mkdir(parents=True)
    stranger = child(tree.base.model_copy(update={"name": "gone"}), "finetune", 0.0, 0.0)
    (orphan / "card.json").write_text(stranger.to_json())
    links = run_json(capsys, "lineage", str(orphan))
    assert len(links) == 2 and links[1]["name"] is None and links[1]["digest"] == stranger.recipe.parents[0]
    assert "not at hand" in run(capsys, "lineage", str(orphan))


def test_a_broken_card_beside_it_is_passed_over(tree: Family, capsys: pytest.CaptureFixture[str]) -> None:
    (tree.runs / "nft" / "export" / "card.json").write_text("{")
    links = run_json(capsys, "lineage", tree.export("dmd2"))
    assert [link["name"] for link in links] == [tree.dmd2.name, None, "wan21-tiny"]


def test_differences_are_the_nested_fields_that_were_changed(tree: Family, capsys: pytest.CaptureFixture[str]) -> None:
    changed = tree.nft.model_copy(
        update={
            "sampling": tree.nft.sampling.model_copy(update={"steps": 7}),
            "loops": {"denoise": tree.nft.loops["denoise"].model_copy(update={"caches": ("feature",)})},
        }
    )
    found = {d.field: (d.expected, d.got) for d in differences(tree.nft, changed)}
    assert found == {"loops.denoise.caches": ([], ["feature"]), "sampling.steps": (20, 7)}
    assert differences(tree.nft, tree.nft) == []

    data = run_json(capsys, "diff", tree.export("nft"), tree.export("dmd2"))
    assert (data["expected"]["digest"], data["got"]["digest"]) == (tree.nft.digest, tree.dmd2.digest)
    fields = {row["field"]: row for row in data["differences"]}
    assert fields["loops.denoise.schedule.ladder"]["got"] == [1.0, 0.75, 0.5, 0.25]
    assert fields["recipe.metrics.after_all_correct"] == {
        "field": "recipe.metrics.after_all_correct",
        "expected": 0.5,
        "got": 0.75,
    }
    text = run(capsys, "diff", tree.export("nft"), tree.export("dmd2"))
    assert "loops.denoise.schedule.ladder" in text and "expected (" in text and "got (" in text
    assert "the same card" in run(capsys, "diff", "wan21", "wan21")


def test_fields_that_one_card_lacks_and_items_of_a_program_are_named(tree: Family) -> None:
    text = family("qwen3").card("0.6b")
    found = {d.field: (d.expected, d.got) for d in differences(tree.base, text)}
    assert found["components.vae.class_name"] == ("AutoencoderKLWan", None)
    assert found["programs.t2v.nodes.0.id"] == ("encode_prompt", None)


def test_show_prints_what_the_card_says(tree: Family, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "show", tree.export("dmd2"))
    for part in (
        tree.dmd2.digest,
        *tree.dmd2.recipe.parents,
        "dmd2",
        "1, 0.75, 0.5, 0.25",
        "unipc",
        "1 sequential (standard)",
        "diffusers.WanTransformer3DModel",
        "abababababab",
        "all_correct",
        "9 frames of 32x32 at 8 fps, 20 steps",
        "C0, C1, C2, C3",
    ):
        assert part in text, part
    first, second = run_json(capsys, "show", tree.export("dmd2"), "wan21")
    assert first["metrics"] == {"all_correct": {"before": 0.5, "after": 0.75, "change": 0.25}}
    assert first["loops"]["denoise"]["schedule"]["ladder"] == [1.0, 0.75, 0.5, 0.25]
    assert (second["digest"], second["metrics"]) == (tree.base.digest, {})


def test_metrics_that_are_neither_before_nor_after_keep_their_value() -> None:
    assert metrics_table({"before_x": 0.0, "speed": 2.0}) == {"x": {"before": 0.0}, "speed": {"value": 2.0}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "expected one of: show, diff, lineage"),
        (("list", "wan21"), "unknown command 'list'"),
        (("show",), "got no folder"),
        (("show", "nowhere"), "got 'nowhere': no such folder"),
        (("diff", "wan21"), "got 1 folder(s), expected two"),
        (("show", "wan21", "json=yes"), "json: got 'yes', expected true or false"),
        (("show", "wan21", "--json"), "got '--json'"),
        (("show", "wan21", "depth=3"), "the only option is json=true"),
        (("lineage", "broken"), "is not JSON"),
    ],
)
def test_a_mistake_ends_in_one_message_and_exit_code_2(
    argv: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "card.json").write_text("{")
    assert main(argv) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("error: ") and "Traceback" not in said.err and not said.out


def test_every_missing_folder_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("show", "nowhere", "wan21", "nobody")) == 2
    error = capsys.readouterr().err
    assert "'nowhere'" in error and "'nobody'" in error
