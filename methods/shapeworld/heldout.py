"""Which scenes and sentences training may see, and the fixed evaluation set that it may not.

Knows splits. About a tenth of all combinations is held out: training never sees such a scene, nor a caption that says
one. Every part of a held-out combination is seen in other company, so that a model can in principle compose it. The
evaluation set asks for held-out combinations in a quarter of its prompts; no training caption is ever one of its
sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from methods.shapeworld.scene import (
    COLOURS,
    COUNTS,
    KINDS,
    MOTIONS,
    RELATIONS,
    SHAPES,
    Scene,
    Thing,
    captions,
    parse,
    sample_scene,
)

EVAL_SIZE = 128
VALIDATION_SIZE = 64


@dataclass(frozen=True)
class EvalItem:
    """One request of a fixed list."""

    prompt: str
    seed: int  # of the request's noise
    kind: str  # single, pair or count
    held_out: bool  # whether the combination is one that training never sees


def combination(scene: Scene) -> tuple[str, ...]:
    """What must not be seen together: (colour, shape, motion), the two objects in either order, or
    (colour, shape, count)."""
    if scene.kind == "pair":
        return ("pair", *sorted(f"{t.colour} {t.shape}" for t in scene.things))
    thing = scene.things[0]
    if scene.kind == "count":
        return ("count", thing.colour, thing.shape, str(scene.count))
    return ("single", thing.colour, thing.shape, str(scene.motion))


@cache
def held_out_combinations() -> frozenset[tuple[str, ...]]:
    """All combinations that training never sees."""
    held: set[tuple[str, ...]] = set()
    for c, colour in enumerate(COLOURS):
        for s, shape in enumerate(SHAPES):
            # One motion of every second (colour, shape): 9 of 90; each motion is held out for a few only.
            if (c + s) % 2 == 0:
                held.add(("single", colour, shape, MOTIONS[(2 * c + s) % len(MOTIONS)]))
            # One count of every third (colour, shape): 6 of 54.
            if (c + 2 * s) % 3 == 0:
                held.add(("count", colour, shape, str(COUNTS[c % len(COUNTS)])))
    for c1, c2 in ((a, b) for a in range(len(COLOURS)) for b in range(a + 1, len(COLOURS))):
        # One pair of shapes of each pair of colours: 15 of 135.
        pick = (2 * c1 + c2) % 9
        held.add(
            combination(
                Scene(
                    (Thing(COLOURS[c1], SHAPES[pick // 3]), Thing(COLOURS[c2], SHAPES[pick % 3])),
                    relation="left of",
                )
            )
        )
    return frozenset(held)


def is_held_out(scene: Scene) -> bool:
    """Whether training must not see this scene."""
    return combination(scene) in held_out_combinations()


def _draw_list(size: int, seed: int, taken: frozenset[str]) -> tuple[EvalItem, ...]:
    """A balanced list: kinds 2 : 2 : 1, a quarter held out, motions, relations and counts in turn."""
    rng = np.random.default_rng(seed)
    pattern = ("single", "pair", "single", "pair", "count")
    items: list[EvalItem] = []
    used = set(taken)
    turn = dict.fromkeys(KINDS, 0)
    for i in range(size):
        kind, want_held_out = pattern[i % len(pattern)], (i // len(pattern)) % 4 == 0
        number = turn[kind]
        turn[kind] += 1
        while True:
            scene = sample_scene(rng, kind)
            wanted = is_held_out(scene) == want_held_out
            if kind == "pair":
                wanted &= scene.relation == RELATIONS[number % 4] and (scene.motion is None) == (number // 4 % 2 == 0)
            elif kind == "count":
                wanted &= scene.count == COUNTS[number % 3] and (scene.motion is None) == (number // 3 % 2 == 0)
            elif not want_held_out:
                wanted &= scene.motion == MOTIONS[number % 5]
            options = captions(scene)
            prompt = options[int(rng.integers(len(options)))]
            if wanted and prompt not in used:
                break
        used.add(prompt)
        items.append(EvalItem(prompt=prompt, seed=1000 + i, kind=kind, held_out=want_held_out))
    return tuple(items)


EVAL_SET: tuple[EvalItem, ...] = _draw_list(EVAL_SIZE, seed=2024, taken=frozenset())
_EVAL_PROMPTS: frozenset[str] = frozenset(item.prompt for item in EVAL_SET)
VALIDATION_SET: tuple[EvalItem, ...] = _draw_list(VALIDATION_SIZE, seed=77, taken=_EVAL_PROMPTS)
RESERVED_PROMPTS: frozenset[str] = _EVAL_PROMPTS | frozenset(item.prompt for item in VALIDATION_SET)


def training_scene(rng: np.random.Generator, kind: str | None = None) -> Scene:
    """A scene that is not held out."""
    while True:
        scene = sample_scene(rng, kind)
        if not is_held_out(scene):
            return scene


def training_caption(rng: np.random.Generator, scene: Scene | None = None) -> str:
    """A sentence that training may see: for ``scene``, or for one drawn here.

    Never says a held-out combination and is never a sentence of the evaluation or validation list.
    """
    while True:
        said = training_scene(rng) if scene is None else scene
        options = [text for text in captions(said) if text not in RESERVED_PROMPTS]
        if options and not is_held_out(said):
            return options[int(rng.integers(len(options)))]
        if scene is not None:
            raise ValueError(f"training may not see {scene}: it is held out, or every sentence for it is reserved")


def training_allows(prompt: str) -> bool:
    """Whether training may see this sentence; one that is not of this world is allowed."""
    return prompt not in RESERVED_PROMPTS and not is_held_out(parse(prompt))
