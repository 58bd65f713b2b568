"""ShapeEval: says from the pixels alone whether a clip shows what its caption asks. GenEval in miniature.

Analysis by synthesis: find the saturated objects, fit each with an ideal circle, square and triangle of its own area
and centroid, follow them through the clip, and compare the whole clip with what the fit would draw. Knows pixels and
scenes; leaves words to ``scene.py``. Rule based, without a learned part, the same for every caller.

It is used as a reward, so it is strict about what a policy would exploit. A clip is ``valid`` only if every frame shows
the same number of well-formed objects of constant size and colour, moving smoothly and together, on a flat grey
background without debris or flicker; an invalid clip scores 0 whatever it was asked for. A shape that is not clearly
one of the three, or a hue between two colours, counts as wrong, never as the nearest one.

Axes: F frames, H x W pixels, 3 RGB; K objects of a frame; S shapes. Lengths are in pixels of a 32-pixel frame and are
scaled to others; levels are 0..255.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from cards.errors import UserError
from methods.shapeworld.scene import COLOURS, SHAPES, Scene, Thing, parse
from methods.shapeworld.shapes import AREA_FACTOR, signed_distance

Array = NDArray[np.float32]

CATEGORIES: tuple[str, ...] = ("colour", "shape", "motion", "two_objects", "position", "count")

# What a clean clip is. Real clips are drawn with objects of 7.5 to 11 pixels and a chroma of 155 to 200.
MASK_CHROMA = 70.0  # levels between the largest and smallest channel; above it a pixel belongs to an object
LEAST_PEAK_CHROMA = 115.0  # a washed-out object is no object
SPECK_PIXELS = 4  # connected pixels up to this many are left to the residual test; more, and too few, are debris
EXTENT_RANGE = (3.1, 6.6)  # half the side of an object's bounding box
MOST_OBJECTS = 6
MOST_STEP = 3.2  # a frame's displacement
MOST_PATH_ERROR = 0.6  # rms distance of the centroids from uniform motion
MOST_DRIFT_SPREAD = 2.6  # difference of two objects' travel over the clip
MOST_SIZE_CHANGE = 0.16  # standard deviation of the area over the clip, as a share of it
BACKGROUND_LEVEL = (92.0, 162.0)
MOST_BACKGROUND_SPREAD = 9.0  # rms difference of background pixels from their common mean, all frames together
MOST_BACKGROUND_CHROMA = 14.0  # mean
MOST_RESIDUAL = 15.0  # rms level difference between a frame and its synthesis
LEAST_HUE_PURITY = 0.965  # length of the mean hue vector of an object's pixels, 1 = all equal
MOST_HUE_ERROR = 17.0  # degrees from a named colour
MOST_SHAPE_ERROR = 0.28  # wrongly covered area as a share of the object's; beyond it the thing is not well formed
CLEAR_SHAPE = (0.2, 0.84)  # a shape is named below this error, and below this share of the runner-up's
STEADY_SHAPE = 0.75  # share of the frames that must agree on it
STILL_TRAVEL = 2.0  # pixels over the clip
MOVING_TRAVEL = 5.5
LEAST_APART = 6.0  # pixels along a relation's axis
MOST_ASKEW = 0.85  # across it, as a share of along


@dataclass(frozen=True)
class Seen:
    """One object as the judge sees it."""

    colour: str | None  # None = no named hue
    shape: str | None  # None = not clearly one of SHAPES
    centre: tuple[float, float]  # mean x, y over the clip, pixels
    shape_error: float  # of the best shape


@dataclass(frozen=True)
class Observation:
    """What a clip shows, whatever it was asked for."""

    valid: bool
    reason: str  # why it is not valid; "" when it is
    things: tuple[Seen, ...] = ()
    motion: str | None = None  # shared by all objects; None = none of MOTIONS
    scale: float = 1.0  # pixels for one pixel of a 32-pixel frame


@dataclass(frozen=True)
class Verdict:
    """Each category: True, False, or None when the caption does not ask for it."""

    valid: bool  # a clean clip of well-formed objects, whatever was asked
    colour: bool | None
    shape: bool | None
    motion: bool | None
    two_objects: bool | None
    position: bool | None
    count: bool | None
    all_correct: bool  # valid, and every asked category is True
    score: float  # share of the asked categories that are True; 0 when not valid
    reason: str = ""  # why the clip is not valid


def judge(frames_FHWC: NDArray[np.uint8], asked: Scene | str) -> Verdict:
    """The verdict on one decoded clip, uint8 (F, H, W, 3), against the scene or caption that it was asked for."""
    scene = parse(asked) if isinstance(asked, str) else asked
    return compare(observe(frames_FHWC), scene)


def evaluate(videos: Iterable[NDArray[np.uint8]], prompts: Sequence[str]) -> dict[str, float]:
    """Rates over many clips: ``valid``, ``all_correct``, ``score`` and each category among the prompts that ask it."""
    clips = list(videos)
    if len(clips) != len(prompts) or not clips:
        raise UserError(f"got {len(clips)} videos for {len(prompts)} prompts; expected as many, and at least one")
    return summarise([judge(clip, prompt) for clip, prompt in zip(clips, prompts, strict=True)])


def summarise(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Mean of every field over ``verdicts``; a category that nobody asked for is left out."""
    rates: dict[str, float] = {}
    for name in (f.name for f in fields(Verdict) if f.name != "reason"):
        values = [float(v) for v in (getattr(verdict, name) for verdict in verdicts) if v is not None]
        if values:
            rates[name] = sum(values) / len(values)
    return rates


# ----------------------------------------------------------------------------------------------------------------
# From an observation to a verdict


def compare(seen: Observation, scene: Scene) -> Verdict:
    """What the caption asks, ticked off."""
    marks: dict[str, bool | None] = dict.fromkeys(CATEGORIES)
    things = seen.things
    if scene.motion is not None:
        marks["motion"] = seen.motion == scene.motion
    if scene.kind == "pair":
        marks.update(_compare_pair(seen, scene))
    else:
        alone = scene.kind == "count" or len(things) == 1  # an extra object beside a single one spoils everything
        asked = scene.things[0]
        marks["colour"] = bool(things) and alone and all(t.colour == asked.colour for t in things)
        marks["shape"] = bool(things) and alone and all(t.shape == asked.shape for t in things)
        if scene.kind == "count":
            marks["count"] = len(things) == scene.count
        elif scene.motion is not None:
            marks["motion"] = alone and bool(marks["motion"])
    if not seen.valid:
        marks = {name: None if mark is None else False for name, mark in marks.items()}
    given = [mark for mark in marks.values() if mark is not None]
    return Verdict(
        valid=seen.valid,
        **marks,
        all_correct=seen.valid and all(given),
        score=sum(given) / len(given) if seen.valid else 0.0,
        reason=seen.reason,
    )


def _compare_pair(seen: Observation, scene: Scene) -> dict[str, bool]:
    if len(seen.things) != 2:
        return dict.fromkeys(("colour", "shape", "two_objects", "position"), False)
    first, second = max((seen.things, seen.things[::-1]), key=lambda order: _likeness(order, scene.things))
    asked_first, asked_second = scene.things
    colour = first.colour == asked_first.colour and second.colour == asked_second.colour
    shape = first.shape == asked_first.shape and second.shape == asked_second.shape
    dx, dy = (b - a for a, b in zip(first.centre, second.centre, strict=True))
    along, across = {
        "left of": (dx, dy),
        "right of": (-dx, dy),
        "above": (dy, dx),
        "below": (-dy, dx),
    }[str(scene.relation)]
    placed = along >= LEAST_APART * seen.scale and abs(across) <= MOST_ASKEW * along
    return {"colour": colour, "shape": shape, "two_objects": colour and shape, "position": colour and placed}


def _likeness(order: Sequence[Seen], asked: Sequence[Thing]) -> int:
    pairs = list(zip(order, asked, strict=True))
    return 2 * sum(s.colour == a.colour for s, a in pairs) + sum(s.shape == a.shape for s, a in pairs)


# ----------------------------------------------------------------------------------------------------------------
# From pixels to an observation


class _Invalid(Exception):
    """Ends an observation early; its text is the reason."""


def observe(frames_FHWC: NDArray[np.uint8]) -> Observation:
    """Reads objects, their motion and the clip's soundness off uint8 frames (F, H, W, 3)."""
    if frames_FHWC.ndim != 4 or frames_FHWC.shape[-1] != 3 or frames_FHWC.dtype != np.uint8:
        raise UserError(
            f"the judge reads uint8 frames of shape (frames, height, width, 3), got {frames_FHWC.dtype} "
            f"{tuple(frames_FHWC.shape)}; decode to uint8 first"
        )
    try:
        return _observe(frames_FHWC.astype(np.float32))
    except _Invalid as reason:
        return Observation(valid=False, reason=str(reason), scale=min(frames_FHWC.shape[1:3]) / 32.0)


def _observe(rgb_FHWC: Array) -> Observation:
    scale = min(rgb_FHWC.shape[1:3]) / 32.0
    chroma_FHW = rgb_FHWC.max(axis=-1) - rgb_FHWC.min(axis=-1)
    boxes_FK4 = _find_objects(chroma_FHW > MASK_CHROMA, scale)
    owner_FKHW, near_FHW = _ownership(boxes_FK4, chroma_FHW.shape, scale)
    background = _check_background(rgb_FHWC, chroma_FHW, ~near_FHW)

    # An object's full chroma, over its whole clip; a pixel's share of it is how much of the pixel the object covers.
    order_FK = _follow(_centroids(chroma_FHW[:, None] * owner_FKHW), scale)
    owner_FKHW = np.take_along_axis(owner_FKHW, order_FK[:, :, None, None], axis=1)
    own_chroma = chroma_FHW[:, None] * owner_FKHW
    peak_K = np.array([np.percentile(c[c > MASK_CHROMA], 80) for c in own_chroma.swapaxes(0, 1)], dtype=np.float32)
    if peak_K.min() < LEAST_PEAK_CHROMA:
        raise _Invalid("an object is washed out")
    cover_FKHW = np.clip(own_chroma / peak_K[:, None, None], 0.0, 1.0)
    cover_FKHW[cover_FKHW < 0.08] = 0.0
    area_FK = cover_FKHW.sum(axis=(2, 3))
    centre_FK2 = _centroids(cover_FKHW)

    if np.any(area_FK.std(axis=0) > MOST_SIZE_CHANGE * area_FK.mean(axis=0)):
        raise _Invalid("an object changes its size")
    motion = _motion(centre_FK2, scale)
    shape_K, error_K, fit_FKHW = _fit_shapes(cover_FKHW, area_FK, centre_FK2, scale)
    colour_K, mean_K3 = _colours(rgb_FHWC, cover_FKHW)

    drawn = background + np.einsum("fkhw,kc->fhwc", fit_FKHW, mean_K3 - background)
    residual_F = np.sqrt(np.mean((drawn - rgb_FHWC) ** 2, axis=(1, 2, 3)))
    if residual_F.max() > MOST_RESIDUAL:
        raise _Invalid("the clip shows more than its objects explain")
    centre_K2 = centre_FK2.mean(axis=0)
    things = tuple(
        Seen(colour_K[k], shape_K[k], (float(centre_K2[k, 0]), float(centre_K2[k, 1])), float(error_K[k]))
        for k in range(len(shape_K))
    )
    return Observation(valid=True, reason="", things=things, motion=motion, scale=scale)


def _find_objects(mask_FHW: NDArray[np.bool_], scale: float) -> NDArray[np.intp]:
    """Bounding boxes (F, K, 4) as x0, x1, y0, y1, inclusive; the same number K in every frame."""
    frames, height, _ = mask_FHW.shape
    label_of_run, row, start, stop = _components(mask_FHW)
    count = int(label_of_run.max(initial=-1)) + 1
    size = np.bincount(label_of_run, weights=stop - start, minlength=count)
    least_area = 0.75 * AREA_FACTOR["triangle"] * (EXTENT_RANGE[0] * scale) ** 2
    if np.any((size > SPECK_PIXELS * scale * scale) & (size < least_area)):
        raise _Invalid("debris beside the objects")
    box = np.empty((count, 4), dtype=np.intp)
    box[:, 0::2] = np.iinfo(np.int32).max
    box[:, 1::2] = -1
    np.minimum.at(box[:, 0], label_of_run, start)
    np.maximum.at(box[:, 1], label_of_run, stop - 1)
    np.minimum.at(box[:, 2], label_of_run, row % height)
    np.maximum.at(box[:, 3], label_of_run, row % height)
    frame_of = np.zeros(count, dtype=np.intp)
    frame_of[label_of_run] = row // height
    keep = size >= least_area
    per_frame = np.bincount(frame_of[keep], minlength=frames)
    if per_frame.min() == 0:
        raise _Invalid("a frame shows no object")
    if per_frame.min() != per_frame.max():
        raise _Invalid("objects appear or vanish")
    if per_frame[0] > MOST_OBJECTS:
        raise _Invalid("too many objects")
    order = np.argsort(frame_of[keep], kind="stable")
    return box[keep][order].reshape(frames, int(per_frame[0]), 4)


def _components(mask_FHW: NDArray[np.bool_]) -> tuple[NDArray[np.intp], ...]:
    """Connected components (8 neighbours, within a frame) of horizontal runs: label, row (over all frames), start and
    stop column of every run. Labels are 0, 1, ..."""
    frames, height, width = mask_FHW.shape
    padded = np.zeros((frames * height, width + 2), dtype=np.int8)
    padded[:, 1:-1] = mask_FHW.reshape(-1, width)
    edges = np.diff(padded, axis=1)
    row, start = np.nonzero(edges == 1)
    stop = np.nonzero(edges == -1)[1]
    if len(row) > 40 * MOST_OBJECTS * frames * height // 32:
        raise _Invalid("noise")
    parent = list(range(len(row)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    rows, starts, stops = row.tolist(), start.tolist(), stop.tolist()
    above = 0  # first run that may still touch the current one from the row above
    for i, y in enumerate(rows):
        while above < i and (rows[above] < y - 1 or (rows[above] == y - 1 and stops[above] < starts[i])):
            above += 1
        if y % height == 0:
            continue
        j = above
        while j < i and rows[j] == y - 1 and starts[j] <= stops[i]:
            a, b = root(i), root(j)
            parent[max(a, b)] = min(a, b)
            j += 1
    label = np.unique([root(i) for i in range(len(parent))], return_inverse=True)[1].astype(np.intp)
    return label, row, start, stop


def _ownership(
    boxes_FK4: NDArray[np.intp], shape: tuple[int, ...], scale: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which pixels belong to which object (within 2 pixels of its box, and to the nearest box), and which are near
    any object (within 3 pixels)."""
    _, height, width = shape
    x, y = np.arange(width), np.arange(height)
    x0, x1, y0, y1 = (boxes_FK4[..., i, None] for i in range(4))
    across = np.maximum(x0 - x, x - x1)[:, :, None, :]  # (F, K, 1, W)
    down = np.maximum(y0 - y, y - y1)[:, :, :, None]  # (F, K, H, 1)
    away = np.maximum(across, down)
    nearest = away.min(axis=1, keepdims=True)
    return (away == nearest) & (away <= 2 * scale), (nearest <= 3 * scale)[:, 0]


def _check_background(rgb_FHWC: Array, chroma_FHW: Array, outside_FHW: NDArray[np.bool_]) -> float:
    """The background's level, when it is flat, grey and steady."""
    pixels = rgb_FHWC[outside_FHW]
    if pixels.size == 0:
        raise _Invalid("no background")
    level = float(pixels.mean())
    if not BACKGROUND_LEVEL[0] <= level <= BACKGROUND_LEVEL[1]:
        raise _Invalid("the background is too dark or too bright")
    if float(np.sqrt(np.mean((pixels - level) ** 2))) > MOST_BACKGROUND_SPREAD:
        raise _Invalid("the background is not flat or not steady")
    if float(chroma_FHW[outside_FHW].mean()) > MOST_BACKGROUND_CHROMA:
        raise _Invalid("the background is not grey")
    return level


def _centroids(weight_FKHW: Array) -> Array:
    """Centres of mass (F, K, 2) as x, y."""
    height, width = weight_FKHW.shape[2:]
    by_x, by_y = weight_FKHW.sum(axis=2), weight_FKHW.sum(axis=3)
    mass = np.maximum(by_x.sum(axis=-1), 1e-6)
    x = by_x @ np.arange(width, dtype=np.float32) / mass
    y = by_y @ np.arange(height, dtype=np.float32) / mass
    return np.stack([x, y], axis=-1)


def _follow(centre_FK2: Array, scale: float) -> NDArray[np.intp]:
    """Which object of each frame continues which of the first, (F, K): nearest to nearest, one to one."""
    frames, count, _ = centre_FK2.shape
    order = np.empty((frames, count), dtype=np.intp)
    order[0] = np.arange(count)
    for f in range(1, frames):
        before = centre_FK2[f - 1, order[f - 1]]
        gap = np.linalg.norm(before[:, None] - centre_FK2[f][None], axis=-1)
        order[f] = gap.argmin(axis=1)
        if len(set(order[f].tolist())) != count or gap.min(axis=1).max() > MOST_STEP * scale:
            raise _Invalid("an object jumps")
    return order


def _motion(centre_FK2: Array, scale: float) -> str | None:
    """The direction that all objects share, after checking that they move smoothly and together."""
    frames = len(centre_FK2)
    if frames < 2:
        return None
    time = np.linspace(-0.5, 0.5, frames, dtype=np.float32)
    travel_K2 = np.einsum("f,fkd->kd", time, centre_FK2) / np.square(time).sum()
    path = centre_FK2.mean(axis=0) + time[:, None, None] * travel_K2
    error_K = np.sqrt(np.mean(np.sum((centre_FK2 - path) ** 2, axis=-1), axis=0))
    if error_K.max() > MOST_PATH_ERROR * scale:
        raise _Invalid("an object does not move smoothly")
    if np.linalg.norm(travel_K2 - travel_K2.mean(axis=0), axis=-1).max() > 0.5 * MOST_DRIFT_SPREAD * scale:
        raise _Invalid("the objects do not move together")
    x, y = travel_K2.mean(axis=0) / scale
    if max(abs(x), abs(y)) < STILL_TRAVEL:
        return "still"
    if abs(x) >= MOVING_TRAVEL and abs(y) < STILL_TRAVEL:
        return "right" if x > 0 else "left"
    if abs(y) >= MOVING_TRAVEL and abs(x) < STILL_TRAVEL:
        return "down" if y > 0 else "up"
    return None


def _fit_shapes(
    cover_FKHW: Array, area_FK: Array, centre_FK2: Array, scale: float
) -> tuple[list[str | None], Array, Array]:
    """The shape of each object or None, its error, and the ideal cover of the best shape, (F, K, H, W)."""
    height, width = cover_FKHW.shape[2:]
    dx = np.arange(width, dtype=np.float32) - centre_FK2[..., 0, None]
    dy = np.arange(height, dtype=np.float32) - centre_FK2[..., 1, None]
    area_K = area_FK.mean(axis=0)
    ideals, errors = [], []
    for shape in SHAPES:
        extent = np.sqrt(area_K / AREA_FACTOR[shape]).astype(np.float32)[:, None, None]
        ideal = np.clip(0.5 - signed_distance(shape, dx[:, :, None, :], dy[:, :, :, None], extent), 0.0, 1.0)
        ideals.append(ideal)
        errors.append(np.abs(ideal - cover_FKHW).sum(axis=(2, 3)) / area_K)
    error_SFK = np.stack(errors)
    error_SK = error_SFK.mean(axis=1)
    best_K = error_SK.argmin(axis=0)
    ranked = np.sort(error_SK, axis=0)
    names: list[str | None] = []
    for k, best in enumerate(best_K):
        extent_k = float(np.sqrt(area_K[k] / AREA_FACTOR[SHAPES[best]]))
        if not EXTENT_RANGE[0] * scale <= extent_k <= EXTENT_RANGE[1] * scale:
            raise _Invalid("an object is too small or too large")
        if ranked[0, k] > MOST_SHAPE_ERROR:
            raise _Invalid("an object has no clear outline")
        clear = ranked[0, k] <= CLEAR_SHAPE[0] and ranked[0, k] <= CLEAR_SHAPE[1] * ranked[1, k]
        steady = float(np.mean(error_SFK[:, :, k].argmin(axis=0) == best)) >= STEADY_SHAPE
        names.append(SHAPES[best] if clear and steady else None)
    fit = np.stack([ideals[best][:, k] for k, best in enumerate(best_K)], axis=1)
    return names, ranked[0], fit


_HUE_AXES = np.array([[1.0, 0.0], [-0.5, np.sqrt(0.75)], [-0.5, -np.sqrt(0.75)]], dtype=np.float32)


def _colours(rgb_FHWC: Array, cover_FKHW: Array) -> tuple[list[str | None], Array]:
    """The colour of each object or None, and its mean RGB (K, 3) where it covers a pixel fully."""
    full = (cover_FKHW > 0.85).astype(np.float32)
    mean_FK3 = np.einsum("fkhw,fhwc->fkc", full, rgb_FHWC) / np.maximum(full.sum(axis=(2, 3)), 1.0)[..., None]
    hue_FHW2 = rgb_FHWC @ _HUE_AXES
    solid = (cover_FKHW > 0.5).astype(np.float32)
    sums_FK2 = np.einsum("fkhw,fhwd->fkd", solid, hue_FHW2)
    lengths_FK = np.einsum("fkhw,fhw->fk", solid, np.linalg.norm(hue_FHW2, axis=-1))
    names: list[str | None] = []
    for k in range(cover_FKHW.shape[1]):
        purity = np.linalg.norm(sums_FK2[:, k].sum(axis=0)) / max(float(lengths_FK[:, k].sum()), 1e-6)
        if purity < LEAST_HUE_PURITY:
            raise _Invalid("an object has several colours")
        degrees = np.degrees(np.arctan2(sums_FK2[:, k, 1], sums_FK2[:, k, 0]))
        total = sums_FK2[:, k].sum(axis=0)
        mean = float(np.degrees(np.arctan2(total[1], total[0])))
        index = round(mean / 60.0) % len(COLOURS)
        off = np.abs((degrees - 60.0 * index + 180.0) % 360.0 - 180.0)
        off_mean = abs((mean - 60.0 * index + 180.0) % 360.0 - 180.0)
        names.append(COLOURS[index] if off_mean <= MOST_HUE_ERROR and off.max() <= 1.5 * MOST_HUE_ERROR else None)
    return names, mean_FK3.mean(axis=0)
