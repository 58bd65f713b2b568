"""Words and splits of ShapeWorld: parsing inverts saying, training never sees what is held out."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from cards.errors import UserError
from methods.shapeworld.heldout import (
    EVAL_SET,
    RESERVED_PROMPTS,
    VALIDATION_SET,
    combination,
    held_out_combinations,
    is_held_out,
    training_allows,
    training_caption,
    training_scene,
)
from methods.shapeworld.scene import (
    COLOURS,
    COUNTS,
    MOTIONS,
    RELATIONS,
    SHAPES,
    Scene,
    Thing,
    canonical,
    caption,
    captions,
    parse,
    phrasings,
    sample_scene,
)


def every_scene() -> list[Scene]:
    """All scenes of the world, with every motion and none where it may be left out."""
    things = [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]
    scenes = [Scene((thing,), motion=motion) for thing in things for motion in MOTIONS]
    scenes += [Scene((t,), motion=m, count=n) for t in things for m in (*MOTIONS, None) for n in COUNTS]
    scenes += [
        Scene((a, b), motion=m, relation=r)
        for a in things
        for b in things
        if a.colour != b.colour
        for r in RELATIONS
        for m in (*MOTIONS, None)
    ]
    return scenes


def test_parse_inverts_every_phrasing_of_every_scene() -> None:
    said: dict[str, Scene] = {}
    for scene in every_scene():
        for text in captions(scene):
            assert parse(text) == scene
            assert said.setdefault(text, scene) == scene, f"{text!r} says two scenes"
            assert text == text.lower() == text.strip()


def test_each_kind_has_at_least_four_phrasings_and_all_are_drawn() -> None:
    rng = np.random.default_rng(0)
    for kind in ("single", "pair", "count"):
        scene = sample_scene(rng, kind)
        assert len(set(captions(scene))) == len(phrasings(kind)) >= 4
        assert {caption(scene, rng) for _ in range(200)} == set(captions(scene))


def test_parse_forgives_case_blanks_and_a_final_stop() -> None:
    assert parse("  A red  Circle moves left. ") == Scene((Thing("red", "circle"),), motion="left")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a cat",
        "a red circle",
        "a purple circle moves left",
        "a red circle moves left and a dog barks",
        "five red circles",
        "three blue square",
    ],
)
def test_parse_says_what_it_expects(text: str) -> None:
    with pytest.raises(UserError, match=r"colours red, yellow.*shapes circle"):
        parse(text)


def test_a_pair_of_one_colour_is_refused() -> None:
    with pytest.raises(UserError, match="different colours"):
        parse("a red circle left of a red square")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"things": (Thing("pink", "circle"),), "motion": "up"}, "unknown colour 'pink'"),
        ({"things": (Thing("red", "star"),), "motion": "up"}, "unknown shape 'star'"),
        ({"things": (Thing("red", "circle"),), "motion": "round"}, "unknown motion 'round'"),
        ({"things": (Thing("red", "circle"),)}, "needs a motion"),
        ({"things": (Thing("red", "circle"),), "count": 9}, "count must be"),
        ({"things": (Thing("red", "circle"), Thing("blue", "circle"))}, "needs a relation"),
        ({"things": ()}, "one or two things"),
    ],
)
def test_a_scene_that_cannot_be_said_is_refused(wrong: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        Scene(**wrong)


def test_canonical_joins_two_ways_of_saying_one_scene() -> None:
    one = parse("a red circle left of a blue square")
    other = parse("a blue square is to the right of a red circle")
    assert one != other and canonical(one) == canonical(other)
    assert canonical(one) != canonical(parse("a red circle right of a blue square"))
    keys = {canonical(scene) for scene in every_scene()}
    assert len(keys) == 90 + 18 * 3 * 6 + 18 * 15 * 2 * 6


def test_training_never_emits_what_is_held_out_or_reserved() -> None:
    rng = np.random.default_rng(0)
    eval_scenes = {combination(parse(item.prompt)) for item in EVAL_SET if item.held_out}
    seen: set[tuple[str, ...]] = set()
    for _ in range(20_000):
        text = training_caption(rng)
        scene = parse(text)
        assert text not in RESERVED_PROMPTS and not is_held_out(scene) and training_allows(text)
        seen.add(combination(scene))
    assert not seen & held_out_combinations() and not seen & eval_scenes
    # Everything that is not held out is seen: 90 + 54 + 135 combinations, of which 30 are held out.
    assert len(seen) == 279 - len(held_out_combinations())
    assert not any(is_held_out(training_scene(rng)) for _ in range(5_000))


def test_about_a_tenth_is_held_out_and_each_part_is_seen_in_other_company() -> None:
    held = held_out_combinations()
    assert 0.08 <= len(held) / 279 <= 0.13
    all_of = {combination(scene) for scene in every_scene()}
    assert len(all_of) == 279 and held <= all_of
    seen = all_of - held
    for kind in ("single", "count"):
        rows = [c for c in seen if c[0] == kind]
        for a, b in ((1, 2), (1, 3), (2, 3)):  # all pairs of attributes
            assert {(c[a], c[b]) for c in rows} == {(c[a], c[b]) for c in all_of if c[0] == kind}
    in_pairs = Counter(name for c in seen if c[0] == "pair" for name in c[1:])
    assert len(in_pairs) == 18 and min(in_pairs.values()) >= 10  # of 15 partners each


def test_training_caption_refuses_a_held_out_scene() -> None:
    scene = next(parse(item.prompt) for item in EVAL_SET if item.held_out)
    with pytest.raises(ValueError, match="held out"):
        training_caption(np.random.default_rng(0), scene)


def test_the_evaluation_set_is_fixed_and_balanced() -> None:
    text = "\n".join(f"{item.prompt}\t{item.seed}" for item in EVAL_SET)
    assert hashlib.sha256(text.encode()).hexdigest() == EVAL_SHA256
    assert len({item.prompt for item in EVAL_SET}) == len({item.seed for item in EVAL_SET}) == len(EVAL_SET) == 128
    scenes = [parse(item.prompt) for item in EVAL_SET]
    kinds = Counter(scene.kind for scene in scenes)
    assert kinds == {"single": 52, "pair": 51, "count": 25}
    assert Counter(item.kind for item in EVAL_SET) == kinds
    assert 0.2 <= sum(is_held_out(scene) for scene in scenes) / 128 <= 0.3
    assert [is_held_out(scene) for scene in scenes] == [item.held_out for item in EVAL_SET]
    for values, least in (
        ((scene.relation for scene in scenes if scene.kind == "pair"), 12),
        ((scene.count for scene in scenes if scene.kind == "count"), 8),
        ((scene.motion for scene in scenes if scene.kind == "single"), 5),
        ((thing.colour for scene in scenes for thing in scene.things), 15),
        ((thing.shape for scene in scenes for thing in scene.things), 40),
    ):
        assert min(Counter(values).values()) >= least


def test_the_validation_list_is_disjoint() -> None:
    prompts = {item.prompt for item in VALIDATION_SET}
    assert len(prompts) == len(VALIDATION_SET) == 64
    assert not prompts & {item.prompt for item in EVAL_SET} and prompts < RESERVED_PROMPTS


EVAL_SHA256 = "f8ddbc8a37dacdf94ef987479081f10812c2ea77614e743a05c453587ac9bdde"
