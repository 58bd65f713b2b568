"""Instructions whose words are made plain one attribute at a time, for a chain of experts each of whom knows one.

"an emerald ball drifting west" is "a green ball drifting west" once its colour is plain, "an emerald circle drifting
west" once its shape is, and "an emerald ball moves left" once its motion is. The last attribute holds all that a
caption says beside its things, and so the sentence too: an instruction of which every attribute is plain is a caption.

Knows attributes. Which word means what is ``phrasing.py``'s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from methods.shapeworld.phrasing import PLURALS, Instruction
from methods.shapeworld.scene import Scene, Thing, captions

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "colour": ("colour",),
    "shape": ("shape",),
    "motion": ("motion", "relation", "count"),
}
"""Attribute -> slots of an instruction."""
_OF_THINGS = ("colour", "shape")


def scene_of(words: Collection[tuple[str, str, str]]) -> Scene:
    """The scene that the concepts of an instruction's ``words`` make; raises ``UserError`` where they make none."""
    concepts: dict[str, list[str]] = {}
    for slot, concept, _ in words:
        concepts.setdefault(slot, []).append(concept)
    things = tuple(Thing(c, s) for c, s in zip(concepts["colour"], concepts["shape"], strict=True))
    one = {slot: said[0] for slot, said in concepts.items()}
    return Scene(things, motion=one.get("motion"), relation=one.get("relation"), count=int(one.get("count", "1")))


def with_words(instruction: Instruction, words: tuple[tuple[str, str, str], ...]) -> Instruction:
    """The same sentence with other concepts for its words; raises ``UserError`` where these make no scene."""
    return replace(instruction, words=words, meaning=captions(scene_of(words))[0])


def partly_plain(instruction: Instruction, plain: Collection[str]) -> str:
    """The instruction with the words of the ``plain`` attributes as captions say them."""
    if "motion" in plain:
        text = instruction.meaning
        swaps = [
            (concept, word) for slot, concept, word in instruction.words if slot in _OF_THINGS and slot not in plain
        ]
    else:
        text = instruction.text
        swaps = [(word, concept) for slot, concept, word in instruction.words if slot in plain]
    for old, new in swaps:  # in the order of the sentence: the first match is the one that is meant
        text = _swap(text, old, new)
    return text


def _swap(text: str, old: str, new: str) -> str:
    """``new`` for the first ``old``, with its article and its plural."""
    article = "an " if new[0] in "aeiou" else "a "
    plurals = {word: PLURALS.get(word, f"{word}s") for word in (old, new)}

    def put(match: re.Match[str]) -> str:
        said = plurals[new] if match["word"] == plurals[old] else new
        return (article if match["article"] else "") + said

    pattern = rf"(?P<article>\ban? )?\b(?P<word>{re.escape(old)}|{re.escape(plurals[old])})\b"
    return re.sub(pattern, put, text, count=1)
