"""Instructions for ShapeWorld scenes in words that its generator never saw: "a crimson ball drifting to the west".

Every concept of the vocabulary (a colour, a shape, a motion, a relation, a number) has synonyms, and every kind of
scene has sentence frames to put them in; what these words tell, no word of a caption tells. A refiner that knows what
they mean can say the scene as a caption, which is what the generator understands.

Knows words. Which word means what is one table here; what a scene is, and how captions say it, is ``scene.py``'s.

The split: about a fifth of the pairs (colour word, shape word) and of the pairs (frame, word that leads its motion or
relation) are held out. An instruction for training holds none of them; an instruction for evaluation holds at least
one. Every word and every frame is met in training in other company.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from methods.shapeworld.heldout import EVAL_SET, training_scene
from methods.shapeworld.scene import Scene, captions, parse

WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "colour": {
        "red": ("crimson", "scarlet", "ruby", "cherry"),
        "yellow": ("golden", "lemon", "amber", "canary"),
        "green": ("emerald", "jade", "lime", "mossy"),
        "cyan": ("turquoise", "aqua", "teal", "icy"),
        "blue": ("navy", "cobalt", "sapphire", "indigo"),
        "magenta": ("fuchsia", "pink", "orchid", "rosy"),
    },
    "shape": {
        "circle": ("ball", "disc", "bubble", "coin"),
        "square": ("box", "block", "tile", "cube"),
        "triangle": ("wedge", "pyramid", "spike", "arrowhead"),
    },
    "motion": {
        "left": ("drifting west", "heading westward", "sailing toward sunset", "bound for the western edge"),
        "right": ("drifting east", "heading eastward", "sailing toward sunrise", "bound for the eastern edge"),
        "up": ("climbing", "rising", "ascending", "soaring"),
        "down": ("falling", "sinking", "descending", "plunging"),
        "still": ("frozen", "motionless", "parked", "not budging"),
    },
    "relation": {
        "left of": ("west of", "just west of", "on the western flank of", "sunset-side of"),
        "right of": ("east of", "just east of", "on the eastern flank of", "sunrise-side of"),
        "above": ("atop", "higher than", "overhead of", "north of"),
        "below": ("beneath", "lower than", "underneath", "south of"),
    },
    "count": {
        "2": ("a couple of", "a duo of", "twin", "a brace of"),
        "3": ("a trio of", "a triplet of", "a threesome of", "triple"),
        "4": ("a quartet of", "a foursome of", "quadruple", "a quad of"),
    },
}
"""Slot -> concept -> its synonyms, as many for every concept."""
SYNONYMS = 4
PLURALS = {"box": "boxes"}
"""Of shape words that take more than an s."""

FRAMES: Mapping[str, tuple[str, ...]] = {
    "single": (
        "{a} {m}",
        "show me {a} {m}",
        "please draw {a}, {m}",
        "i want to see {a} which keeps {m}",
        "one clip with {a} {m}",
    ),
    "pair": (
        "{a} {r} {b}",
        "show me {a} {r} {b}",
        "please draw {a} sitting {r} {b}",
        "i want to see {a} placed {r} {b}",
    ),
    "count": ("{n}", "show me {n}", "please draw {n}", "i want to see {n}"),
}
"""Kind -> sentences: {a} and {b} things, {m} a motion, {r} a relation, {n} several equal things."""
TAILS: Mapping[str, tuple[str, ...]] = {"pair": (", each {m}", ", the duet {m}"), "count": (" {m}", ", everyone {m}")}
"""What a shared motion adds, where a scene of this kind says one."""
HELD_OUT_SHARE = 5
"""One pair in so many is held out."""


@dataclass(frozen=True)
class Instruction:
    """A scene in unseen words."""

    text: str
    meaning: str
    """A caption of the scene: what the words mean, and what is judged."""
    kind: str
    """single, pair or count."""
    held_out: bool
    """Whether it holds a pair of words that training never sees together."""
    words: tuple[tuple[str, str, str], ...]
    """(slot, concept, synonym) in the order of the sentence's slots."""


@dataclass(frozen=True)
class _Choice:
    """Which synonyms, frame and tail say a scene."""

    frame: int
    tail: int
    synonyms: tuple[int, ...]


def slots_of(scene: Scene) -> tuple[tuple[str, str], ...]:
    """(slot, concept) of everything that a scene says."""
    things = tuple(pair for t in scene.things for pair in (("colour", t.colour), ("shape", t.shape)))
    found = things if scene.kind != "count" else (("count", str(scene.count)), *things)
    if scene.relation is not None:
        found = (*found, ("relation", scene.relation))
    return found if scene.motion is None else (*found, ("motion", scene.motion))


def instruct(scene: Scene, rng: np.random.Generator, *, held_out: bool) -> Instruction:
    """An instruction for ``scene`` on the wanted side of the split, its words and frame drawn from ``rng``."""
    while True:
        said = _say(scene, _draw(scene, rng))
        if said.held_out == held_out:
            return said


def training_instruction(rng: np.random.Generator) -> Instruction:
    """An instruction that training may see, for a scene that it may see."""
    return instruct(training_scene(rng), rng, held_out=False)


@cache
def held_out_instructions() -> tuple[Instruction, ...]:
    """Of each scene of ``EVAL_SET``, in its order, an instruction that training never sees."""
    return tuple(
        instruct(parse(item.prompt), np.random.default_rng([item.seed, 41]), held_out=True) for item in EVAL_SET
    )


def _draw(scene: Scene, rng: np.random.Generator) -> _Choice:
    count = len(slots_of(scene))
    return _Choice(
        frame=int(rng.integers(len(FRAMES[scene.kind]))),
        tail=int(rng.integers(len(TAILS.get(scene.kind, (0,))))),
        synonyms=tuple(int(n) for n in rng.integers(SYNONYMS, size=count)),
    )


def _say(scene: Scene, choice: _Choice) -> Instruction:
    slots = slots_of(scene)
    words = tuple(
        (slot, concept, WORDS[slot][concept][n]) for (slot, concept), n in zip(slots, choice.synonyms, strict=True)
    )
    said: dict[str, list[str]] = {}
    for slot, _, word in words:
        said.setdefault(slot, []).append(word)
    things = [f"{colour} {shape}" for colour, shape in zip(said["colour"], said["shape"], strict=True)]
    parts = {"a": _a(things[0]), "b": _a(things[-1])}
    if scene.kind == "count":
        parts["n"] = f"{said['count'][0]} {said['colour'][0]} {_plural(said['shape'][0])}"
    if scene.relation is not None:
        parts["r"] = said["relation"][0]
    if scene.motion is not None:
        parts["m"] = said["motion"][0]
    text = FRAMES[scene.kind][choice.frame]
    if scene.motion is not None and scene.kind in TAILS:
        text += TAILS[scene.kind][choice.tail]
    return Instruction(
        text=text.format(**parts),
        meaning=captions(scene)[0],
        kind=scene.kind,
        held_out=any(_is_held_out(pair) for pair in _pairs(scene.kind, choice, said)),
        words=words,
    )


def _pairs(kind: str, choice: _Choice, said: Mapping[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """What the split looks at: colour word beside shape word, frame beside the motion's or the relation's words."""
    yield from zip(said["colour"], said["shape"], strict=True)
    for word in (*said.get("motion", ()), *said.get("relation", ())):
        yield kind, str(choice.frame), word


def _is_held_out(pair: tuple[str, ...]) -> bool:
    """The same on every machine: by the digest of the words."""
    return hashlib.sha256("|".join(pair).encode()).digest()[0] % HELD_OUT_SHARE == 0


def _a(thing: str) -> str:
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def _plural(shape: str) -> str:
    return PLURALS.get(shape, f"{shape}s")
