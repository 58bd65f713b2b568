"""ShapeEval: passes real clips, fails wrong prompts, and cannot be paid with garbage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from cards.errors import UserError
from methods.shapeworld.judge import Verdict, evaluate, judge, observe, summarise
from methods.shapeworld.render import render
from methods.shapeworld.scene import COLOURS, COUNTS, KINDS, MOTIONS, RELATIONS, SHAPES, Scene, parse, sample_scene

Clip = NDArray[np.uint8]

RED = "a red circle moves left"
PAIR = "a red circle left of a blue square, both moving up"
THREE = "three blue squares moving to the right"


def clip_of(text: str, seed: int = 0) -> Clip:
    return render(parse(text), np.random.default_rng(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_real_clips_are_all_correct(kind: str) -> None:
    rng = np.random.default_rng(11)
    scenes = [sample_scene(rng, kind) for _ in range(120)]
    verdicts = [judge(render(scene, rng), scene) for scene in scenes]
    assert summarise(verdicts)["all_correct"] >= 0.99
    assert all(verdict.score == 1.0 for verdict in verdicts if verdict.all_correct)


@pytest.mark.parametrize(("frames", "size"), [(9, 48), (17, 32), (5, 32), (13, 64)])
def test_other_sizes_and_lengths_are_read_too(frames: int, size: int) -> None:
    rng = np.random.default_rng(3)
    scenes = [sample_scene(rng) for _ in range(40)]
    assert summarise([judge(render(s, rng, frames, size), s) for s in scenes])["all_correct"] >= 0.95


def test_the_renderer_keeps_its_promises() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        scene = sample_scene(rng)
        clip = render(scene, rng)
        assert clip.dtype == np.uint8 and clip.shape == (9, 32, 32, 3)
        assert clip.min() >= 26 and clip.max() <= 230
        edge = np.concatenate([clip[:, 0], clip[:, -1], clip[:, :, 0], clip[:, :, -1]], axis=1).astype(int)
        assert (edge.max(-1) - edge.min(-1)).max() <= 2, "an object touches the frame's edge"
    again = [render(parse(PAIR), np.random.default_rng(5)) for _ in range(2)]
    assert np.array_equal(*again)


def wrong_scenes(scene: Scene) -> list[tuple[str, Scene]]:
    """Every way of asking for one thing that the clip does not show, with the category that must say so."""
    thing = scene.things[0]
    out: list[tuple[str, Scene]] = []
    taken = {t.colour for t in scene.things}
    for colour in COLOURS:
        if colour not in taken:
            changed = (dataclasses.replace(thing, colour=colour), *scene.things[1:])
            out.append(("colour", dataclasses.replace(scene, things=changed)))
    for shape in SHAPES:
        if shape != thing.shape:
            changed = (dataclasses.replace(thing, shape=shape), *scene.things[1:])
            out.append(("shape", dataclasses.replace(scene, things=changed)))
            if scene.kind == "pair":
                out.append(("two_objects", dataclasses.replace(scene, things=changed)))
    if scene.motion is not None:
        out += [("motion", dataclasses.replace(scene, motion=m)) for m in MOTIONS if m != scene.motion]
    if scene.relation is not None:
        out += [("position", dataclasses.replace(scene, relation=r)) for r in RELATIONS if r != scene.relation]
    if scene.count > 1:
        out += [("count", dataclasses.replace(scene, count=n)) for n in COUNTS if n != scene.count]
    return out


@pytest.mark.parametrize("text", [RED, PAIR, THREE, "a green triangle stays still", "two cyan circles moving down"])
def test_a_wrong_prompt_fails_in_its_own_category(text: str) -> None:
    clip, scene = clip_of(text), parse(text)
    right = judge(clip, scene)
    assert right.all_correct
    cases = wrong_scenes(scene)
    assert {"colour", "shape", "motion"} <= {category for category, _ in cases}
    for category, asked in cases:
        verdict = judge(clip, asked)
        assert getattr(verdict, category) is False and not verdict.all_correct and verdict.valid
        assert 0.0 <= verdict.score < right.score


def test_categories_that_are_not_asked_are_none() -> None:
    single, pair, three = judge(clip_of(RED), RED), judge(clip_of(PAIR), PAIR), judge(clip_of(THREE), THREE)
    assert (single.two_objects, single.position, single.count) == (None, None, None)
    assert (pair.two_objects, pair.position, pair.count) == (True, True, None)
    assert (three.two_objects, three.position, three.count) == (None, None, True)
    silent = "a red circle above a blue square"
    assert judge(clip_of(silent), silent).motion is None


def test_an_extra_or_a_missing_object_is_not_paid() -> None:
    assert not judge(clip_of("two red circles moving to the left"), RED).all_correct
    assert judge(clip_of("two red circles moving to the left"), RED).score == 0.0
    assert judge(clip_of(RED), "a red circle left of a blue square").score == 0.0


def noise(clip: Clip, rng: np.random.Generator) -> Clip:
    return rng.integers(0, 256, clip.shape, dtype=np.uint8)


def blank(clip: Clip, rng: np.random.Generator) -> Clip:
    return np.full_like(clip, 128)


def flat_red(clip: Clip, rng: np.random.Generator) -> Clip:
    return np.broadcast_to(np.array([220, 40, 40], np.uint8), clip.shape).copy()


def flicker(clip: Clip, rng: np.random.Generator) -> Clip:
    out = clip.copy()
    out[4] = 128  # the object vanishes for one frame
    return out


def brightness_flicker(clip: Clip, rng: np.random.Generator) -> Clip:
    shift = np.where(np.arange(len(clip)) % 2 == 0, 20, -20)[:, None, None, None]
    return np.clip(clip.astype(int) + shift, 0, 255).astype(np.uint8)


def shuffled(clip: Clip, rng: np.random.Generator) -> Clip:
    return clip[[0, 5, 2, 7, 4, 1, 6, 3, 8]]


def two_halves(clip: Clip, rng: np.random.Generator) -> Clip:
    """Half of the time the object is another shape in the same place."""
    other = clip_of("a red triangle moves left", seed=0)
    return np.concatenate([clip[:5], other[5:]])


def two_colours(clip: Clip, rng: np.random.Generator) -> Clip:
    """The right half of every object is green instead of red."""
    out = clip.copy()
    for frame in out:
        x = int(np.nonzero(frame[..., 0] > 190)[1].mean())
        frame[:, x:] = frame[:, x:][..., [1, 0, 2]]
    return out


def dirty(clip: Clip, rng: np.random.Generator) -> Clip:
    """A second, small saturated patch beside the object."""
    out = clip.copy()
    y = 2 if np.nonzero(clip[0, ..., 0] > 190)[0].mean() > 16 else 27
    out[:, y : y + 3, 2:6] = (40, 220, 40)
    return out


def washed_out(clip: Clip, rng: np.random.Generator) -> Clip:
    return (128 + (clip.astype(float) - 128) * 0.4).astype(np.uint8)


def noisy(clip: Clip, rng: np.random.Generator) -> Clip:
    return np.clip(clip + rng.normal(0.0, 25.0, clip.shape), 0, 255).astype(np.uint8)


def teleport(clip: Clip, rng: np.random.Generator) -> Clip:
    out = clip.copy()
    out[4:] = np.roll(out[4:], 8, axis=1)
    return out


def tinted(clip: Clip, rng: np.random.Generator) -> Clip:
    return np.clip(clip.astype(int) + np.array([40, 0, 0]), 0, 255).astype(np.uint8)


def striped(clip: Clip, rng: np.random.Generator) -> Clip:
    out = clip.astype(int)
    out[:, ::2] += 24
    return np.clip(out, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "spoil",
    [noise, blank, flat_red, flicker, brightness_flicker, shuffled, two_colours, dirty, washed_out, noisy, teleport,
     tinted, striped],
)  # fmt: skip
def test_spoilt_clips_are_invalid_and_score_nothing(spoil: Callable[[Clip, np.random.Generator], Clip]) -> None:
    verdict = judge(spoil(clip_of(RED), np.random.default_rng(0)), RED)
    assert not verdict.valid and verdict.reason
    assert verdict.score == 0.0 and not verdict.all_correct
    assert not verdict.colour and not verdict.shape and not verdict.motion


def test_a_shape_that_changes_half_way_is_not_paid() -> None:
    assert not judge(two_halves(clip_of(RED), np.random.default_rng(0)), RED).shape


@pytest.mark.parametrize("size", [5, 9, 20])
def test_a_blob_is_no_shape(size: int) -> None:
    """A soft disc is neither circle, square nor triangle at any size."""
    y, x = np.mgrid[:32, :32] - 15.5
    cover = np.exp(-(x**2 + y**2) / (2.0 * (size / 2.0) ** 2))[..., None]
    frame = 128 + cover * (np.array([220.0, 40.0, 40.0]) - 128)
    verdict = judge(np.repeat(frame[None], 9, axis=0).round().astype(np.uint8), "a red circle stays still")
    assert not verdict.all_correct and not verdict.shape


def test_a_hue_between_two_colours_is_none() -> None:
    clip = clip_of("a red circle stays still").astype(float)
    inside = (clip[..., 0] - clip[..., 2]) / (clip[..., 0] - clip[..., 2]).max()
    clip[..., 1] += inside * 85.0  # red towards yellow: orange
    seen = observe(clip.round().astype(np.uint8))
    assert seen.things[0].colour is None


def test_evaluate_reports_rates_of_what_was_asked() -> None:
    clips = [clip_of(RED), clip_of(RED), clip_of(PAIR), np.full((9, 32, 32, 3), 128, np.uint8)]
    rates = evaluate(clips, [RED, "a red circle moves right", PAIR, RED])
    assert rates["valid"] == 0.75 and rates["all_correct"] == 0.5
    assert rates["motion"] == 0.5 and rates["colour"] == 0.75
    assert rates["two_objects"] == rates["position"] == 1.0
    assert "count" not in rates
    assert rates["score"] == pytest.approx((1.0 + 2.0 / 3.0 + 1.0 + 0.0) / 4.0)


def test_bad_input_is_named() -> None:
    with pytest.raises(UserError, match="uint8 frames of shape"):
        judge(np.zeros((9, 32, 32, 3), np.float32), RED)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="uint8 frames of shape"):
        judge(np.zeros((3, 9, 32, 32), np.uint8), RED)
    with pytest.raises(UserError, match="1 videos for 2 prompts"):
        evaluate([clip_of(RED)], [RED, RED])
    with pytest.raises(UserError, match="not a ShapeWorld caption"):
        judge(clip_of(RED), "a cat")


def test_verdicts_are_plain_values() -> None:
    verdict = judge(clip_of(RED), RED)
    assert isinstance(verdict, Verdict) and type(verdict.all_correct) is bool and type(verdict.colour) is bool
