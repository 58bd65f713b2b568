"""The card of a transformers causal LM folder: what is read, what is refused, and strict loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from cards.card import ModelCard, Source
from cards.errors import UserError
from cards.registry import family
from cards.source import SourceError, build_on_meta, check_source
from inference.engine import Engine
from inference.load import card_of
from tests.support.tiny_qwen3 import END, save_tiny_qwen3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_is_found_by_its_architectures(saved: Path) -> None:
    card = card_of(saved)
    assert (card.family, card.size, list(card.programs)) == ("qwen3", "custom", ["text"])
    assert card.loops["decode"].kind == "ar_decode"
    assert card.problems() == []
    text = card.sampling.text
    assert text is not None
    assert (text.context, text.eos, text.temperature) == (256, (END,), 0.0)


def test_a_card_survives_json_and_has_no_text_part_unless_it_makes_text(saved: Path, wan_folder: Path) -> None:
    card = card_of(saved)
    again = ModelCard.from_json(card.to_json())
    assert again == card
    assert again.digest == card.digest
    clip = json.loads(card_of(wan_folder).to_json())
    assert set(clip["sampling"]) == {
        "frames",
        "height",
        "width",
        "fps",
        "steps",
        "negative_prompt",
        "max_sequence_length",
    }


def test_end_tokens_and_sampling_are_those_of_generation_config(folder: Path) -> None:
    edit_json(
        folder / "generation_config.json",
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        eos_token_id=[2, 0],
    )
    text = card_of(folder).sampling.text
    assert text is not None
    assert (text.temperature, text.top_p, text.top_k, text.eos) == (0.6, 0.95, 20, (2, 0))
    (folder / "generation_config.json").unlink()
    text = card_of(folder).sampling.text
    assert text is not None
    assert (text.temperature, text.eos) == (0.0, (END,))


def test_loaded_weights_are_those_of_the_library(saved: Path) -> None:
    ours = Engine().load(saved).module("lm").state_dict()
    theirs = Qwen3ForCausalLM.from_pretrained(saved).state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_card_beside_its_weights_moves_with_them(folder: Path, tmp_path: Path) -> None:
    card = card_of(folder).derive(name="student", source=Source(kind="folder", location="."))
    (folder / "card.json").write_text(card.to_json())
    moved = folder.rename(tmp_path / "moved")
    assert card_of(moved).digest == card.digest
    assert check_source(card_of(moved)) == moved.resolve()


# -- refusals, before any weight loads


def weights_without(folder: Path, key: str, **extra: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(key, None)
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_keys_are_named(folder: Path) -> None:
    weights_without(folder, "model.norm.weight", stray=torch.zeros(1), **{"lm_head.weight": torch.zeros(2, 2)})
    with pytest.raises(SourceError) as error:
        check_source(card_of(folder))
    message = str(error.value)
    assert "missing keys: model.norm.weight" in message
    assert "unexpected keys: stray" in message
    assert "lm_head.weight: got [2, 2]" in message


def test_tied_embeddings_need_no_head_of_their_own(tmp_path: Path) -> None:
    tied = save_tiny_qwen3(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    check_source(card_of(tied))
    module: Any = Engine().load(tied).module("lm")
    assert module.lm_head.weight is module.model.embed_tokens.weight


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(SourceError, match="truncated"):
        check_source(card_of(folder))


def test_another_architecture_names_what_is_read(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match=r"LlamaForCausalLM.*Qwen3ForCausalLM"):
        card_of(folder)
    with pytest.raises(SourceError, match=r"LlamaForCausalLM.*Qwen3ForCausalLM"):
        family("qwen3").card("0.6b", str(folder))


def test_a_config_changed_after_the_card_was_made_is_refused(folder: Path) -> None:
    card = card_of(folder)
    edit_json(folder / "config.json", architectures=["Qwen3Model"])
    with pytest.raises(SourceError, match=r"Qwen3Model for 'lm', expected transformers\.Qwen3ForCausalLM"):
        check_source(card)
    edit_json(folder / "config.json", architectures=None)
    with pytest.raises(SourceError, match="expected a list of one class"):
        check_source(card)


@pytest.mark.parametrize(
    ("file", "changes", "word"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "SomeTokenizer"}, "SomeTokenizer"),
        ("config.json", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("config.json", {"dtype": "int8"}, "int8"),
    ],
)
def test_what_the_card_cannot_stand_for_is_named(folder: Path, file: str, changes: dict[str, Any], word: str) -> None:
    edit_json(folder / file, **changes)
    with pytest.raises(UserError, match=word):
        card_of(folder)


# -- published sizes


@pytest.mark.parametrize(("size", "billions"), [("0.6b", 0.596), ("1.7b", 1.72), ("4b", 4.02), ("8b", 8.19)])
def test_published_sizes_have_the_published_number_of_parameters(size: str, billions: float) -> None:
    """Parameters as the model cards give them (0.6B .. 8.2B), tied embeddings counted once."""
    card = family("qwen3").card(size)
    assert card.problems() == []
    assert card.source == Source(kind="hub", location=f"Qwen/Qwen3-{size.upper()}")
    module = build_on_meta(card.components["lm"])
    module.tie_weights()  # type: ignore[operator]
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=3e-3)


def test_a_size_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(UserError, match=r"'7b'.*0\.6b.*8b"):
        family("qwen3").card("7b")
