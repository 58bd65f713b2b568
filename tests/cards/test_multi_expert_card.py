"""Cards of a chain of experts: any names in any order, of any sources; what they begin as is as weak as recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cards.card import CARD_FILE, ModelCard, Source
from cards.errors import UserError
from cards.multi_expert.card import BUNDLED, build_card, card_from_folder, experts_of, system_of
from cards.registry import family
from cards.source import check_source, component_folder, resolve_folder
from tests.support.tiny_experts import save_tiny_experts, tiny_chain


@pytest.fixture(scope="module")
def refiners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_tiny_experts(tmp_path_factory.mktemp("experts"), ("one", "two"))


@pytest.mark.parametrize("names", [("colour",), ("motion", "colour"), ("a", "b", "c", "d", "e")])
def test_any_number_of_experts_in_any_order(names: tuple[str, ...], wan_folder: Path, refiners: dict[str, str]) -> None:
    card = build_card("tiny", source=str(wan_folder), experts=names, refiners=refiners["one"])
    card.validate()
    check_source(card)
    assert experts_of(card) == names
    nodes = [node for node in card.programs["t2v"].nodes if node.loop is not None]
    assert [node.id for node in nodes] == [*(f"refine_{name}" for name in names), "denoise"]
    assert all((node.reads, node.writes, node.when) == (("prompt",), "prompt", "refined") for node in nodes[:-1])
    trainable = [cid for cid, component in card.components.items() if component.trainable]
    assert trainable == ["transformer", *(f"llm_{name}" for name in names)]
    for name in names:
        loop = card.loops[f"refine_{name}"]
        assert loop.components == {"lm": f"llm_{name}", "tokenizer": f"llm_{name}_tokenizer"}
        assert loop.options["system"] == system_of(name) and f"words of {name} " in system_of(name)


def test_each_has_its_own_source(wan_folder: Path, refiners: dict[str, str]) -> None:
    card = build_card("tiny", source=str(wan_folder), experts=["one", "two"], refiners=refiners)
    folder = check_source(card)
    for name, place in refiners.items():
        for component in (f"llm_{name}", f"llm_{name}_tokenizer"):
            assert component_folder(card.components[component], folder) == Path(place)
    again = ModelCard.from_json(card.to_json())
    assert again == card and again.digest == card.digest
    swapped = build_card("tiny", source=str(wan_folder), experts=["two", "one"], refiners=refiners)
    assert swapped.digest != card.digest
    assert card.recipe.parents[0] == family("wan21").card("tiny", str(wan_folder)).digest


@pytest.mark.parametrize("size", ["1.3b", "14b"])
def test_published_sizes_take_published_experts(size: str) -> None:
    card = family("multi_expert").card(size)
    card.validate()
    assert {card.components[f"llm_{name}"].source.location for name in experts_of(card)} == {"Qwen/Qwen3-0.6B"}  # type: ignore[union-attr]
    mixed = {"colour": "Qwen/Qwen3-4B", "shape": "Qwen/Qwen3-0.6B", "motion": "Qwen/Qwen3-1.7B"}
    other = family("multi_expert").card(size, refiners=mixed)
    assert other.components["llm_colour"].config["hidden_size"] == 2560


# -- mistakes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": []}, r"card experts: got \[\], expected a list of words, each once"),
        ({"experts": "colour"}, "card experts: got 'colour'"),
        ({"experts": ["a", "a"]}, "each once"),
        ({"experts": ["a b"]}, "expected a list of words"),
        ({"experts": ["a", "b"], "refiners": {"a": "x"}}, "card refiners: got a, expected one place for each of a, b"),
        ({"refiners": "nowhere/at/all"}, "no such folder, and not a hub id"),
    ],
)
def test_mistakes_are_named(wan_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_card("tiny", source=str(wan_folder), **options)


def test_experts_with_other_bounds_of_a_text_are_refused(
    wan_folder: Path, refiners: dict[str, str], tmp_path: Path
) -> None:
    shorter = save_tiny_experts(tmp_path, ("two",), max_position_embeddings=128)
    with pytest.raises(UserError, match=r"expert 'two': its model has the text bounds context=128 .* context=256"):
        build_card("tiny", source=str(wan_folder), experts=["one", "two"], refiners={**refiners, **shorter})


def test_an_export_brings_its_experts(wan_folder: Path, refiners: dict[str, str], tmp_path: Path) -> None:
    card = tiny_chain(wan_folder, tmp_path / "experts", ("one", "two"))
    (tmp_path / CARD_FILE).write_text(card.to_json())
    assert build_card("tiny", source=str(tmp_path), experts=["one", "two"]).digest == card.digest
    with pytest.raises(UserError, match=r"the export has one, two; use card.experts=\[one,two\]"):
        build_card("tiny", source=str(tmp_path))
    other = build_card("tiny", source=str(tmp_path), experts=["one", "two"], refiners=refiners["two"])
    assert other.components["llm_one"].source == Source(kind="folder", location=refiners["two"])
    with pytest.raises(UserError, match="which tells the order of the experts"):
        card_from_folder(wan_folder)


# -- what the bundled experts begin as


def test_the_bundled_base_is_small_and_weak_enough_to_mend() -> None:
    folder = resolve_folder(BUNDLED)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1.5e6
    assert {path.suffix for path in folder.iterdir()} <= {".safetensors", ".json", ".md", ".jinja"}
    figures = json.loads((folder / "FIGURES.json").read_text())
    for split in ("held_out", "train"):
        rates = figures[split]
        assert rates["chain_caption_greedy"] >= 0.9 and rates["chain_exact_greedy"] <= 0.45
        assert all(0.5 <= rates[f"{name}_greedy"] <= 0.8 for name in ("colour", "shape", "motion"))


def test_the_engine_says_what_plain_transformers_says() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from inference.engine import Engine
    from inference.request import Request
    from methods.shapeworld.phrasing import held_out_instructions
    from scripts.pretrain.experts import chat_ids
    from scripts.pretrain.refiner import rewrite_ids

    folder = resolve_folder(BUNDLED)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    asked = [instruction.text for instruction in held_out_instructions()[:6]]
    texts = asked
    for name in ("colour", "shape", "motion"):
        ids = [chat_ids(tokenizer, name, text) for text in texts]
        texts = rewrite_ids(model, tokenizer, ids, temperature=0, seed=0)
    instance = Engine().load(family("multi_expert").card("tiny"))
    ours = [
        Engine().run(
            Request(text, seed=1, steps=1, guidance=1.0, frames=1, temperature=0.0, output="latents"), instance
        )
        for text in asked
    ]
    assert [artifact.refined for artifact in ours] == texts
