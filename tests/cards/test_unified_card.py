"""Unified cards: a Wan card behind a refiner of any source; the bundled refiner is small and as weak as recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cards.card import ModelCard
from cards.errors import UserError
from cards.registry import family
from cards.source import check_source, component_folder, resolve_folder
from cards.unified.card import BUNDLED, LLM, LLM_TOKENIZER, build_card, card_from_folder
from inference.load import card_of
from tests.support.tiny_unified import save_tiny_unified_export

REFINER = resolve_folder(BUNDLED)


def test_two_loops_over_components_that_are_trained_apart() -> None:
    card = card_of("unified")
    card.validate()
    assert [node.loop for node in card.programs["t2v"].nodes if node.loop] == ["refine", "denoise"]
    assert card.loops["refine"].components == {"lm": LLM, "tokenizer": LLM_TOKENIZER}
    assert card.loops["denoise"].components == {"denoiser": "transformer"}
    assert [cid for cid, component in card.components.items() if component.trainable] == ["transformer", LLM]
    check_source(card)


def test_it_is_a_child_of_its_generators_card() -> None:
    wan, card = family("wan21").card("tiny"), family("unified").card("tiny")
    assert card.recipe.parents == (wan.digest, *wan.recipe.parents)
    assert card.recipe.data != wan.recipe.data  # the generator's captions are not what is asked of it
    assert {cid: card.components[cid] for cid in wan.components} == wan.components
    assert card.loops["denoise"] == wan.loops["denoise"] and card.geometry == wan.geometry


@pytest.mark.parametrize("size", ["1.3b", "14b"])
def test_published_sizes_take_a_published_refiner(size: str) -> None:
    card = family("unified").card(size)
    card.validate()
    source = card.components[LLM].source
    assert source is not None and source.kind == "hub" and source.location == "Qwen/Qwen3-0.6B"
    other = family("unified").card(size, refiner="Qwen/Qwen3-4B")
    assert other.components[LLM].config["hidden_size"] == 2560 and other.digest != card.digest


def test_no_other_option_is_known() -> None:
    with pytest.raises(UserError, match="option of card 'unified' 'refiners'"):
        family("unified").card("tiny", refiners="x")


def test_json_keeps_every_source(tmp_path: Path) -> None:
    card = family("unified").card("tiny", refiner=str(REFINER))
    again = ModelCard.from_json(card.to_json())
    assert again == card and again.digest == card.digest
    assert again.components[LLM].source is not None and again.components[LLM].source.location == str(REFINER)
    plain = family("wan21").card("tiny").to_json()
    assert '"beside"' not in plain and plain.count('"source"') == 1


# -- exports


@pytest.fixture(scope="module")
def export(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_unified_export(wan_folder, tmp_path_factory.mktemp("unified") / "run" / "export")


def test_an_export_holds_its_refiner_beside_the_pipeline(export: Path) -> None:
    card = card_of(export)
    folder = check_source(card)
    assert component_folder(card.components[LLM], folder) == export / "llm"
    assert "llm" not in json.loads((export / "model_index.json").read_text())
    assert build_card("tiny", source=str(export)).digest == card.digest
    assert build_card("tiny", source=str(export.parent)).digest == card.digest


def test_an_export_gives_its_refiner_to_another_generator(export: Path, make_wan_folder: Any) -> None:
    other = make_wan_folder(seed=9)
    card = build_card("tiny", source=str(other), refiner=str(export))
    assert component_folder(card.components[LLM], check_source(card)) == export / "llm"


def test_an_export_takes_another_refiner(export: Path) -> None:
    card = build_card("tiny", source=str(export), refiner=str(REFINER))
    folder = check_source(card)
    assert folder == export and component_folder(card.components[LLM], folder) == REFINER
    assert card.sampling.text is not None and card.sampling.text.context == 96


@pytest.mark.parametrize(
    ("gone", "words"),
    [("llm", "missing file"), ("llm/model.safetensors", "missing file"), ("llm/tokenizer_config.json", "missing file")],
)
def test_an_export_without_a_part_is_refused(export: Path, tmp_path: Path, gone: str, words: str) -> None:
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()
    with pytest.raises(UserError, match=words):
        check_source(card_of(folder))


def test_a_folder_without_a_refiner_is_refused(wan_folder: Path) -> None:
    with pytest.raises(UserError, match="holds no llm/"):
        card_from_folder(wan_folder)


def test_a_refiner_of_another_class_is_refused(export: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    shutil.copytree(export, folder)
    config = json.loads((folder / "llm" / "config.json").read_text())
    (folder / "llm" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*expected transformers.Qwen3ForCausalLM"):
        check_source(card_of(folder))


# -- the bundled refiner


def test_the_bundled_refiner_is_small_and_holds_safetensors_only() -> None:
    files = [path for path in REFINER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4e6
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md", ".jinja"}


def test_it_is_a_weak_start_that_sampling_can_mend() -> None:
    figures = json.loads((REFINER / "FIGURES.json").read_text())
    for split in ("held_out", "train"):
        rates = figures[split]
        assert rates["caption_greedy"] >= 0.95
        assert 0.2 <= rates["exact_greedy"] <= 0.45
        assert rates["exact_best_of_8"] >= 0.7
        assert rates["mixed_of_8"] >= 0.5


def test_it_does_as_its_figures_say_in_the_engine_and_in_plain_transformers() -> None:
    from dataclasses import replace

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from inference.engine import Engine
    from inference.request import Request
    from methods.shapeworld.phrasing import held_out_instructions
    from scripts.pretrain.refiner import means, rewrite

    asked = held_out_instructions()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(REFINER).eval(), AutoTokenizer.from_pretrained(REFINER)
    said = rewrite(model, tokenizer, [i.text for i in asked], temperature=0, seed=0)
    exact = sum(means(text, i.meaning)[1] for text, i in zip(said, asked, strict=True)) / len(asked)
    figures = json.loads((REFINER / "FIGURES.json").read_text())
    assert exact == pytest.approx(figures["held_out"]["exact_greedy"], abs=2 / 128)
    engine = Engine()
    engine.load(card_of("unified"))
    request = Request(prompt="", seed=1, steps=1, guidance=1.0, frames=1, temperature=0.0, output="latents")
    ours = [engine.run(replace(request, prompt=i.text)).refined for i in asked[:12]]
    assert ours == said[:12]
