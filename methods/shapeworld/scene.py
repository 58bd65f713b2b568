"""The vocabulary of ShapeWorld: what a scene is, how it is said in English, and how a sentence is read back.

Knows words and scenes. Leaves pixels to ``render.py`` and ``judge.py``, and which scenes training may see to
``heldout.py``.

Three kinds of scene exist:
    single   one object with a colour, a shape and a motion
    pair     two objects of different colours and a relation between them; a motion that both share is optional
    count    two to four equal objects of one colour and shape; a motion that all share is optional
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cards.errors import UserError

COLOURS: tuple[str, ...] = ("red", "yellow", "green", "cyan", "blue", "magenta")  # hues 0, 60, ... 300 degrees
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
MOTIONS: tuple[str, ...] = ("left", "right", "up", "down", "still")
RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
COUNTS: tuple[int, ...] = (2, 3, 4)
KINDS: tuple[str, ...] = ("single", "pair", "count")

_NUMBER_WORDS: dict[int, str] = {2: "two", 3: "three", 4: "four"}
_OPPOSITE: dict[str, str] = {"right of": "left of", "below": "above"}  # said from the other object's side


@dataclass(frozen=True)
class Thing:
    """One object's looks."""

    colour: str  # one of COLOURS
    shape: str  # one of SHAPES


@dataclass(frozen=True)
class Scene:
    """What a caption says. ``things`` holds one entry a named object: two for a pair, one otherwise."""

    things: tuple[Thing, ...]
    motion: str | None = None  # one of MOTIONS, shared by all objects; None = the caption does not say
    relation: str | None = None  # one of RELATIONS: things[0] is <relation> things[1]; pairs only
    count: int = 1  # equal objects; above 1 for count scenes only

    def __post_init__(self) -> None:
        _check_scene(self)

    @property
    def kind(self) -> str:
        """``single``, ``pair`` or ``count``."""
        if len(self.things) == 2:
            return "pair"
        return "count" if self.count > 1 else "single"


def _check_scene(scene: Scene) -> None:
    for thing in scene.things:
        _check_word("colour", thing.colour, COLOURS)
        _check_word("shape", thing.shape, SHAPES)
    if scene.motion is not None:
        _check_word("motion", scene.motion, MOTIONS)
    if len(scene.things) == 2:
        if scene.relation is None or scene.count != 1:
            raise UserError("a scene with two things needs a relation and count=1; give relation=, or one thing")
        _check_word("relation", scene.relation, RELATIONS)
        if scene.things[0].colour == scene.things[1].colour:
            raise UserError(f"the two things of a pair need different colours, got {scene.things[0].colour!r} twice")
    elif len(scene.things) == 1:
        if scene.relation is not None:
            raise UserError(f"relation={scene.relation!r} needs two things, got one")
        if scene.count != 1 and scene.count not in COUNTS:
            raise UserError(f"count must be 1 or one of {COUNTS}, got {scene.count}")
        if scene.count == 1 and scene.motion is None:
            raise UserError(f"a single object needs a motion, one of: {', '.join(MOTIONS)}")
    else:
        raise UserError(f"a scene has one or two things, got {len(scene.things)}")


def _check_word(kind: str, got: str, names: tuple[str, ...]) -> None:
    if got not in names:
        raise UserError(f"unknown {kind} {got!r}; expected one of: {', '.join(names)}")


def canonical(scene: Scene) -> tuple[Any, ...]:
    """Hashable key; equal for two ways of saying the same ("a left of b" and "b right of a")."""
    things, relation = scene.things, scene.relation
    if relation in _OPPOSITE:
        things, relation = things[::-1], _OPPOSITE[relation]
    return (scene.kind, tuple((t.colour, t.shape) for t in things), scene.motion, relation, scene.count)


# ----------------------------------------------------------------------------------------------------------------
# Phrasings. Each is a sentence with slots; ``motions`` gives the words of {motion} for that sentence's grammar and
# ``tail`` the optional ending that carries it.


def _directions(left: str, right: str, up: str, down: str, still: str) -> dict[str, str]:
    return dict(zip(MOTIONS, (left, right, up, down, still), strict=True))


_MOVES = _directions("moves left", "moves right", "moves up", "moves down", "stays still")
_MOVING = _directions("moving to the left", "moving to the right", "moving up", "moving down", "standing still")
_SLIDES = _directions("slides left", "slides right", "slides up", "slides down", "rests in place")
_GOING = _directions("going left", "going right", "going up", "going down", "holding still")
_MOVE = _directions("move left", "move right", "move up", "move down", "stay still")

_BESIDE = dict(zip(RELATIONS, ("left of", "right of", "above", "below"), strict=True))
_TO_THE = dict(zip(RELATIONS, ("to the left of", "to the right of", "above", "below"), strict=True))
_ON_SIDE = dict(zip(RELATIONS, ("on the left side of", "on the right side of", "over", "under"), strict=True))


@dataclass(frozen=True)
class Phrasing:
    """One way to say one kind of scene."""

    kind: str
    body: str  # with {c} {s} (first thing), {c2} {s2} (second), {r} relation, {n} number word
    tail: str  # ends the sentence when a motion is said; holds {m}
    motions: Mapping[str, str]  # motion -> words
    relations: Mapping[str, str] | None = None  # relation -> words; pairs only

    def say(self, scene: Scene) -> str:
        """The sentence for ``scene``, which must be of this kind."""
        first, second = scene.things[0], scene.things[-1]
        words = {"c": first.colour, "s": first.shape, "c2": second.colour, "s2": second.shape}
        if self.relations is not None and scene.relation is not None:
            words["r"] = self.relations[scene.relation]
        if scene.count > 1:
            words["n"] = _NUMBER_WORDS[scene.count]
        text = self.body.format(**words)
        return text if scene.motion is None else text + self.tail.format(m=self.motions[scene.motion])

    def regex(self) -> re.Pattern[str]:
        """Matches exactly the sentences of this phrasing, with the slots as named groups."""
        slots = {"c": COLOURS, "c2": COLOURS, "s": SHAPES, "s2": SHAPES, "n": tuple(_NUMBER_WORDS.values())}
        slots["m"] = tuple(self.motions.values())
        slots["r"] = () if self.relations is None else tuple(self.relations.values())
        groups = {name: f"(?P<{name}>{'|'.join(map(re.escape, words))})" for name, words in slots.items()}
        tail = self.tail.format(**groups)
        return re.compile(self.body.format(**groups) + (tail if self.kind == "single" else f"(?:{tail})?"))


PHRASINGS: tuple[Phrasing, ...] = (
    Phrasing("single", "a {c} {s}", " {m}", _MOVES),
    Phrasing("single", "a {c} {s}", " {m}", _MOVING),
    Phrasing("single", "there is a {c} {s}", " that {m}", _SLIDES),
    Phrasing("single", "a video of a {c} {s}", " {m}", _GOING),
    Phrasing("single", "the {s} is {c}", " and {m}", _MOVES),
    Phrasing("pair", "a {c} {s} {r} a {c2} {s2}", ", both {m}", _MOVING, _BESIDE),
    Phrasing("pair", "a {c} {s} is {r} a {c2} {s2}", " and both {m}", _MOVE, _TO_THE),
    Phrasing("pair", "there is a {c} {s} {r} a {c2} {s2}", ", {m} together", _GOING, _ON_SIDE),
    Phrasing("pair", "a video of a {c} {s} {r} a {c2} {s2}", " {m}", _GOING, _TO_THE),
    Phrasing("count", "{n} {c} {s}s", " {m}", _MOVING),
    Phrasing("count", "there are {n} {c} {s}s", " that {m}", _MOVE),
    Phrasing("count", "a video of {n} {c} {s}s", " {m}", _GOING),
    Phrasing("count", "a group of {n} {c} {s}s", ", all {m}", _MOVING),
)

_READERS: tuple[tuple[Phrasing, re.Pattern[str]], ...] = tuple((p, p.regex()) for p in PHRASINGS)


def phrasings(kind: str) -> tuple[Phrasing, ...]:
    """All ways to say a kind of scene."""
    return tuple(p for p in PHRASINGS if p.kind == kind)


def captions(scene: Scene) -> tuple[str, ...]:
    """Every sentence that says ``scene``."""
    return tuple(p.say(scene) for p in phrasings(scene.kind))


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """One sentence that says ``scene``, its phrasing drawn from ``rng``."""
    options = phrasings(scene.kind)
    return options[int(rng.integers(len(options)))].say(scene)


def parse(text: str) -> Scene:
    """The scene that ``text`` says: inverts every phrasing (case, outer blanks and a final stop do not matter).

    Raises:
        UserError: for a sentence that is not one of ShapeWorld's.
    """
    clean = " ".join(text.lower().split()).removesuffix(".").strip()
    for phrasing, reader in _READERS:
        match = reader.fullmatch(clean)
        if match is not None:
            return _read(phrasing, match.groupdict())
    raise UserError(
        f"not a ShapeWorld caption: {text!r}. Expected for example 'a red circle moves left', "
        "'a red circle left of a blue square' or 'three blue squares moving up', with "
        f"colours {', '.join(COLOURS)}; shapes {', '.join(SHAPES)}; motions {', '.join(MOTIONS)}; "
        f"relations {', '.join(RELATIONS)}; numbers {', '.join(_NUMBER_WORDS.values())}."
    )


def _read(phrasing: Phrasing, words: Mapping[str, str | None]) -> Scene:
    first = Thing(str(words["c"]), str(words["s"]))
    motion = None if words["m"] is None else _key_of(phrasing.motions, words["m"])
    if phrasing.kind == "pair":
        relation = _key_of(phrasing.relations or {}, str(words["r"]))
        return Scene((first, Thing(str(words["c2"]), str(words["s2"]))), motion=motion, relation=relation)
    if phrasing.kind == "count":
        count = next(n for n, word in _NUMBER_WORDS.items() if word == words["n"])
        return Scene((first,), motion=motion, count=count)
    return Scene((first,), motion=motion)


def _key_of(table: Mapping[str, str], words: str) -> str:
    return next(key for key, value in table.items() if value == words)


# ----------------------------------------------------------------------------------------------------------------
# Drawing scenes


def sample_scene(rng: np.random.Generator, kind: str | None = None) -> Scene:
    """A scene drawn uniformly within its kind; kinds single : pair : count are drawn 2 : 2 : 1."""
    if kind is None:
        kind = str(rng.choice(KINDS, p=(0.4, 0.4, 0.2)))
    first = Thing(_pick(rng, COLOURS), _pick(rng, SHAPES))
    if kind == "single":
        return Scene((first,), motion=_pick(rng, MOTIONS))
    motion = _pick(rng, MOTIONS) if rng.random() < 0.5 else None
    if kind == "count":
        return Scene((first,), motion=motion, count=COUNTS[int(rng.integers(len(COUNTS)))])
    other = _pick(rng, tuple(c for c in COLOURS if c != first.colour))
    return Scene((first, Thing(other, _pick(rng, SHAPES))), motion=motion, relation=_pick(rng, RELATIONS))


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]
