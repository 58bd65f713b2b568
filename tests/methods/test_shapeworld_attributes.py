"""Instructions whose attributes are made plain one at a time."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from cards.errors import UserError
from methods.shapeworld.attributes import ATTRIBUTES, partly_plain, scene_of, with_words
from methods.shapeworld.phrasing import Instruction, held_out_instructions, training_instruction
from methods.shapeworld.scene import canonical, parse

SOME = (*(training_instruction(np.random.default_rng([7, i])) for i in range(200)), *held_out_instructions())


def by_hand(text: str, meaning: str, *words: tuple[str, str, str]) -> Instruction:
    return Instruction(text, meaning, parse(meaning).kind, False, words)


@pytest.mark.parametrize("one", SOME[::16])
def test_from_the_instruction_to_the_caption_in_any_order(one: Instruction) -> None:
    assert partly_plain(one, ()) == one.text
    for order in itertools.permutations(ATTRIBUTES):
        texts = [partly_plain(one, order[:n]) for n in range(4)]
        assert texts[-1] == one.meaning and len(set(texts)) == 4


def says(text: str, words: str) -> bool:
    return re.search(rf"\b{re.escape(words)}(e?s)?\b", text) is not None


def test_only_its_own_words_change() -> None:
    for one in SOME:
        for attribute, slots in ATTRIBUTES.items():
            text = partly_plain(one, [attribute])
            for slot, concept, word in one.words:
                assert says(text, word) == (slot not in slots), (text, one.text, word)
                assert attribute == "motion" or slot not in slots or says(text, concept)


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (["colour"], "show me a trio of cyan boxes"),
        (["shape"], "show me a trio of icy squares"),
        (["motion"], "three icy boxes"),
    ],
)
def test_plurals(plain: list[str], text: str) -> None:
    words = (("count", "3", "a trio of"), ("colour", "cyan", "icy"), ("shape", "square", "box"))
    assert partly_plain(by_hand("show me a trio of icy boxes", "three cyan squares", *words), plain) == text


def test_articles_and_two_things_of_one_shape() -> None:
    words = (
        ("colour", "green", "emerald"),
        ("shape", "circle", "ball"),
        ("colour", "red", "ruby"),
        ("shape", "circle", "disc"),
        ("relation", "above", "atop"),
    )
    one = by_hand("an emerald ball atop a ruby disc", "a green circle above a red circle", *words)
    assert partly_plain(one, ["colour"]) == "a green ball atop a red disc"
    assert partly_plain(one, ["motion"]) == "an emerald ball above a ruby disc"
    assert partly_plain(one, ["motion", "colour"]) == "a green ball above a red disc"


def test_other_concepts_for_the_same_words() -> None:
    one = SOME[0]
    assert canonical(scene_of(one.words)) == canonical(parse(one.meaning))
    words = tuple((s, "blue" if s == "colour" else c, w) for s, c, w in one.words)
    if len([s for s, _, _ in words if s == "colour"]) == 1:
        other = with_words(one, words)
        assert other.text == one.text and "blue" in partly_plain(other, ["colour"])
    pair = next(one for one in SOME if one.kind == "pair")
    with pytest.raises(UserError, match="different colours"):
        with_words(pair, tuple((s, "blue" if s == "colour" else c, w) for s, c, w in pair.words))
