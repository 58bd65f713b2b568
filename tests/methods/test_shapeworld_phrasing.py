"""Instructions in unseen words mean what their metadata says, keep the split, share no telling word with captions."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from methods.shapeworld.heldout import EVAL_SET, is_held_out
from methods.shapeworld.phrasing import (
    FRAMES,
    SYNONYMS,
    WORDS,
    Instruction,
    held_out_instructions,
    instruct,
    slots_of,
    training_instruction,
)
from methods.shapeworld.scene import KINDS, canonical, captions, parse, sample_scene

FUNCTION_WORDS = {"a", "an", "of", "on", "the", "to"}


def _words(text: str) -> set[str]:
    return set(text.replace(",", "").split())


@pytest.fixture(scope="module")
def training() -> list[Instruction]:
    return [training_instruction(np.random.default_rng([5, i])) for i in range(2500)]


def test_no_word_that_tells_anything_is_a_captions() -> None:
    rng = np.random.default_rng(0)
    of_captions = set().union(*(_words(c) for _ in range(3000) for c in captions(sample_scene(rng))))
    synonyms = itertools.chain.from_iterable(w for slot in WORDS.values() for w in slot.values())
    frames = re.sub(r"\{.*?\}", "", " ".join(itertools.chain.from_iterable(FRAMES.values())))
    said = set().union(*map(_words, synonyms)) | _words(frames)
    assert said & of_captions <= FUNCTION_WORDS


def test_a_synonym_means_one_concept() -> None:
    for slot in WORDS.values():
        assert all(len(synonyms) == SYNONYMS for synonyms in slot.values())
    everything = [word for slot in WORDS.values() for synonyms in slot.values() for word in synonyms]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_says_the_scene(kind: str) -> None:
    """Read back by a table of our own: every synonym stands in the text, in the order of the scene's things."""
    for i in range(100):
        rng = np.random.default_rng([7, i])
        scene = sample_scene(rng, kind)
        said = instruct(scene, rng, held_out=bool(i % 2))
        assert canonical(parse(said.meaning)) == canonical(scene)
        assert [(slot, concept) for slot, concept, _ in said.words] == list(slots_of(scene))
        at = 0
        for slot, _, word in said.words:
            found = said.text.find(word, at if slot in ("colour", "shape") else 0)
            assert found >= 0, (said.text, word)
            at = found if slot in ("colour", "shape") else at


def test_the_same_generator_says_the_same() -> None:
    first, again = (training_instruction(np.random.default_rng([1, 2])) for _ in range(2))
    other = training_instruction(np.random.default_rng([1, 3]))
    assert first == again and first != other


def test_training_meets_every_word_and_no_held_out_scene(training: list[Instruction]) -> None:
    met = {word for instruction in training for word in instruction.words}
    assert met == {(slot, c, w) for slot, table in WORDS.items() for c, words in table.items() for w in words}
    assert not any(instruction.held_out for instruction in training)
    assert not any(is_held_out(parse(instruction.meaning)) for instruction in training)
    assert len({instruction.text for instruction in training}) > 2000


def test_held_out_instructions_say_the_fixed_scenes_in_pairs_that_training_never_sees(
    training: list[Instruction],
) -> None:
    held = held_out_instructions()
    assert [canonical(parse(i.meaning)) for i in held] == [canonical(parse(item.prompt)) for item in EVAL_SET]
    assert all(instruction.held_out for instruction in held)
    assert not {instruction.text for instruction in held} & {instruction.text for instruction in training}


def test_a_held_out_pair_of_words_never_meets_in_training(training: list[Instruction]) -> None:
    def pairs(instruction: Instruction) -> set[tuple[str, str]]:
        said = [word for slot, _, word in instruction.words if slot in ("colour", "shape")]
        return set(zip(said[::2], said[1::2], strict=True))

    colours = {w for words in WORDS["colour"].values() for w in words}
    shapes = {w for words in WORDS["shape"].values() for w in words}
    met = set().union(*map(pairs, training))
    absent = set(itertools.product(colours, shapes)) - met
    assert 0.1 < len(absent) / (len(colours) * len(shapes)) < 0.35
    assert absent & set().union(*map(pairs, held_out_instructions()))
