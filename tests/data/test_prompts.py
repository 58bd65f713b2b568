"""Prompt streams: complete, reproducible, resumable; a bad file is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cards.errors import UserError
from fastvideo_train.data.phrasing_prompts import PhrasingPrompts
from fastvideo_train.data.prompts import FilePrompts, Prompt, PromptSource
from fastvideo_train.data.shapeworld_prompts import ShapeWorldPrompts
from fastvideo_train.data.video_folder import DataError
from methods.shapeworld.heldout import training_allows
from methods.shapeworld.scene import canonical, parse


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n two \n\nthree\nfour\nfive\n")
    return path


def sources(text_file: Path, seed: int) -> list[PromptSource]:
    return [FilePrompts(path=text_file, seed=seed), ShapeWorldPrompts(seed=seed), PhrasingPrompts(seed=seed)]


def test_each_pass_is_a_new_shuffle_of_the_file(text_file: Path) -> None:
    texts = [prompt.text for prompt in FilePrompts(path=text_file, seed=0).take(20)]
    passes = [texts[5 * k : 5 * k + 5] for k in range(4)]
    assert all(sorted(one) == ["five", "four", "one", "three", "two"] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_jsonl_keeps_the_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "tag": "x", "count": 0}\n\n{"caption": "b"}\n')
    drawn = sorted(FilePrompts(path=path, seed=0).take(2), key=lambda prompt: prompt.text)
    assert drawn == [Prompt("a", {"tag": "x", "count": 0}), Prompt("b", {})]


def test_how_the_stream_is_cut_does_not_matter(text_file: Path) -> None:
    for whole, pieces in zip(sources(text_file, 3), sources(text_file, 3), strict=True):
        assert whole.take(17) == pieces.take(4) + pieces.take(0) + pieces.take(13)


def test_seeds_differ(text_file: Path) -> None:
    for one, other in zip(sources(text_file, 0), sources(text_file, 1), strict=True):
        assert one.take(12) != other.take(12)


def test_resume_is_exact(text_file: Path) -> None:
    for source, resumed in zip(sources(text_file, 3), sources(text_file, 3), strict=True):
        source.take(7)
        resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert resumed.take(9) == source.take(9)


def test_resuming_over_other_prompts_or_another_seed_is_an_error(text_file: Path, tmp_path: Path) -> None:
    state = FilePrompts(path=text_file, seed=3).state_dict()
    with pytest.raises(DataError, match="seed was 3 in the checkpoint and is 4"):
        FilePrompts(path=text_file, seed=4).load_state_dict(state)
    other = tmp_path / "other.txt"
    other.write_text("six\n")
    with pytest.raises(DataError, match="digest"):
        FilePrompts(path=other, seed=3).load_state_dict(state)


def test_shapeworld_draws_are_allowed_and_varied() -> None:
    texts = [prompt.text for prompt in ShapeWorldPrompts(seed=0).take(200)]
    assert all(training_allows(text) for text in texts)
    assert len(set(texts)) > 100


@pytest.mark.parametrize("content", ["", "\n  \n"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str, suffix: str) -> None:
    path = tmp_path / f"prompts.{suffix}"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"prompts\.{suffix} is empty"):
        FilePrompts(path=path, seed=0)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": \n"text"\n{"prompt": ""}\n{"tag": 1}\n')
    with pytest.raises(DataError, match=r"4 bad line\(s\)") as caught:
        FilePrompts(path=path, seed=0)
    message = str(caught.value)
    for line, words in ((2, "bad JSON"), (3, "JSON str"), (4, "no prompt"), (5, "no prompt")):
        assert any(f"prompts.jsonl:{line}:" in part and words in part for part in message.splitlines())


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        FilePrompts(path=tmp_path / "absent.txt", seed=0)
    with pytest.raises(DataError, match=r"\.csv.*\.txt, \.jsonl"):
        FilePrompts(path=tmp_path / "prompts.csv", seed=0)


def test_phrasings_carry_their_meaning_and_an_evaluation_asks_what_training_never_sees() -> None:
    source = PhrasingPrompts(seed=3)
    stream = source.take(300)
    assert [p.text for p in stream] == [PhrasingPrompts(seed=3).at(i).text for i in range(300)]
    assert stream[0].text != PhrasingPrompts(seed=4).at(0).text
    assert all(canonical(parse(p.metadata["meaning"])) for p in stream)
    held = source.held_out(128)
    assert len(held) == 128 and source.held_out(3) == held[:3]
    assert not {p.text for p in held} & {p.text for p in stream}
    with pytest.raises(UserError, match="not a ShapeWorld caption"):
        parse(held[0].text)


def test_a_source_without_an_evaluation_of_its_own_asks_far_down_its_stream() -> None:
    source = ShapeWorldPrompts(seed=0)
    assert source.held_out(2) == [source.at(10**9), source.at(10**9 + 1)] and source.position == 0
