"""Reward cards: read off a transformers folder, strict about it, and what they declare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cards.card import ModelCard
from cards.errors import UserError
from cards.program import Input, Node, Program
from cards.registry import family
from cards.reward.card import build_card, card_from_folder
from cards.source import SourceError, build_on_meta, check_source
from inference.instance import ModelInstance
from inference.load import card_of
from tests.support.tiny_clip import TEXT_LENGTH, save_tiny_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "own"))


def test_a_folder_is_read_as_it_is(folder: Path) -> None:
    card = card_of(folder)
    assert (card.name, card.family, card.size, tuple(card.programs)) == (
        "reward-custom",
        "reward",
        "custom",
        ("score",),
    )
    assert card.sampling.max_sequence_length == TEXT_LENGTH
    assert card.components["clip"].config == {}
    assert card.problems() == []
    check_source(card)
    again = ModelCard.from_json(card.to_json())
    assert again == card
    assert again.programs["score"].inputs[0].shape == ("frames", "height", "width", 3)


def test_the_family_builds_a_folder_by_any_size(folder: Path) -> None:
    assert family("reward").card("clip-b32", source=str(folder)) == card_from_folder(folder)
    with pytest.raises(UserError, match=r"'clip-x'.*clip-b32, clip-l14"):
        build_card("clip-x")


@pytest.mark.parametrize(("size", "millions"), [("clip-l14", 427.6), ("clip-b32", 151.3)])
def test_a_published_size_builds_the_published_module(size: str, millions: float) -> None:
    """Parameters of the released models: 427,616,513 and 151,277,313."""
    card = build_card(size)
    assert card.problems() == []
    assert card.source.kind == "hub"
    module = build_on_meta(card.components["clip"])
    assert sum(p.numel() for p in module.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert card.sampling.max_sequence_length == 77


def test_a_folder_without_its_processor_is_refused(own: Path) -> None:
    (own / "processor_config.json").unlink()
    with pytest.raises(SourceError, match=r"processor_config\.json or preprocessor_config\.json"):
        check_source(card_of(own))


def test_a_folder_without_its_tokenizer_is_refused(own: Path) -> None:
    (own / "tokenizer_config.json").unlink()
    with pytest.raises(SourceError, match=r"tokenizer_config\.json"):
        check_source(card_of(own))


def test_weights_that_do_not_fit_are_named(own: Path) -> None:
    tensors = load_file(own / "model.safetensors")
    tensors["extra"] = tensors.pop("visual_projection.weight")
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"missing keys: visual_projection\.weight; unexpected keys: extra"):
        check_source(card_of(own))


def test_the_position_ids_of_older_files_are_no_fault(own: Path, folder: Path) -> None:
    """transformers of 2022 saved them; the library makes them anew."""
    tensors = load_file(own / "model.safetensors")
    tensors["text_model.embeddings.position_ids"] = torch.arange(TEXT_LENGTH)[None]
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    old, new = ModelInstance.load(card_of(own)), ModelInstance.load(card_of(folder))
    for a, b in zip(old.module("clip").parameters(), new.module("clip").parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_architecture_is_refused(own: Path) -> None:
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["SiglipModel"]}))
    with pytest.raises(UserError, match=r"SiglipModel.*CLIPModel"):
        card_of(own)
    with pytest.raises(SourceError, match=r"SiglipModel.*CLIPModel"):
        card_from_folder(own)


def test_a_card_whose_pictures_are_frames_says_nothing_of_a_grid(folder: Path) -> None:
    """So that cards from before there were grids keep their digest."""
    card = card_of(folder)
    assert card.sampling.score is not None and card.sampling.score.grid == 1
    assert "grid" not in card.to_json()
    grid = card.sampling.score.model_copy(update={"grid": 2})
    other = card.model_copy(update={"sampling": card.sampling.model_copy(update={"score": grid})})
    assert other.digest != card.digest and ModelCard.from_json(other.to_json()) == other


# -- inputs of a program


def test_a_program_without_inputs_says_nothing_of_them() -> None:
    """So that cards from before there were inputs keep their digest."""
    assert "inputs" not in Program(nodes=()).model_dump(mode="json")


def test_an_input_is_a_slot() -> None:
    node = Node(id="n", component="c", op="o", reads=("x",), writes="y")
    x = Input(name="x", dtype="uint8", shape=("any", 3), low=0, high=255)
    assert Program(nodes=(node,)).problems({"c"}, ()) != []
    assert Program(nodes=(node,), inputs=(x,)).problems({"c"}, ()) == []
    (problem,) = Program(nodes=(node,), inputs=(x, x.model_copy(update={"name": "prompt"}))).problems({"c"}, ())
    assert "'prompt'" in problem
