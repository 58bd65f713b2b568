"""Steerable ShapeWorld: one shape that goes where a chunk's action says, and ActionEval, which says whether it did.

A clip shows one object on the grid of ``render.py``. While a chunk lasts the object moves a pixel a frame to its
action's side, or stays; at the frame's edge it stays too. Chunks are those of a causal card: ``chunk`` latent frames,
of which the very first is one frame and every other ``TEMPORAL``.

ActionEval rolls sessions out under random actions and reads the object's way off the decoded pixels. Rule based: an act
counts when the object is there before and after it, of a plausible size and in one piece, and has moved to the action's
side and not across, or for none has stayed. Actions are drawn from those that the object, where it is seen, has room
for.

Lengths are in pixels of a 32-pixel frame and are scaled to others. Axes: F frames, H x W pixels, 3 RGB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cards.errors import UserError, unknown_name
from inference.engine import Engine
from inference.handle import Handle
from inference.instance import ModelInstance
from inference.session import WorldModelSession
from methods.shapeworld.render import (
    BACKGROUND,
    DIAMETER,
    GRID,
    HIGH,
    LOW,
    OFFSET,
    REFERENCE_SIZE,
    draw,
)
from methods.shapeworld.scene import COLOURS, SHAPES, Thing
from methods.shapeworld.shapes import AREA_FACTOR, EXTENT_ABOVE, rgb

Array = NDArray[np.float64]

ACTIONS: tuple[str, ...] = ("none", "left", "right", "up", "down")
DIRECTION: dict[str, tuple[int, int]] = {
    "none": (0, 0),
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
TEMPORAL = 4  # frames a latent frame, after the first
SPEED = 1.0  # pixels a frame
EXTENT = 0.5 * DIAMETER
LAST = OFFSET + GRID * np.floor((REFERENCE_SIZE - OFFSET - DIAMETER) / GRID)  # a box starts from OFFSET to here

# What ActionEval takes for the object, and for its move.
MASK_CHROMA = 60.0  # levels between the largest and smallest channel
AREA_RANGE = (0.5, 1.8)  # of the mask, as a share of the shape's own
MOST_SPREAD = 1.5  # rms distance of the mask's pixels from their centre, as a share of the object's extent
LEAST_MOVE = 0.5  # along the action, as a share of the true one
MOST_ASTRAY = 0.4  # across it, or for none at all, as a share of a move


def frames_of(chunks: int, chunk: int = 1) -> int:
    """Frames of a clip of ``chunks`` chunks of ``chunk`` latent frames."""
    return (chunks * chunk - 1) * TEMPORAL + 1


def chunk_frames(index: int, chunk: int = 1) -> slice:
    """The frames of a clip's chunk."""
    return slice(0 if index == 0 else frames_of(index, chunk), frames_of(index + 1, chunk))


# -- clips


def caption_of(thing: Thing) -> str:
    """What a steerable clip is called: its object alone, since where that goes is no matter of words."""
    return f"a {thing.colour} {thing.shape}"


def sample_thing(rng: np.random.Generator) -> Thing:
    return Thing(COLOURS[int(rng.integers(len(COLOURS)))], SHAPES[int(rng.integers(len(SHAPES)))])


def sample_actions(rng: np.random.Generator, chunks: int) -> tuple[str, ...]:
    """Actions of a training clip, uniform; the first chunk, whose first frame has no frame before it, has none."""
    return ("none", *(ACTIONS[i] for i in rng.integers(len(ACTIONS), size=chunks - 1)))


def path_of(actions: Sequence[str], start: Array, chunk: int = 1) -> Array:
    """Top left corner (x, y) of the object's box in every frame, (F, 2), in pixels of a 32-pixel frame."""
    corners = [start]
    for index, action in enumerate(actions):
        if action not in DIRECTION:
            raise unknown_name("action of the steerable ShapeWorld", action, ACTIONS)
        frames = chunk_frames(index, chunk)
        for _ in range(frames.stop - max(frames.start, 1)):
            corners.append(np.clip(corners[-1] + SPEED * np.array(DIRECTION[action]), OFFSET, LAST))
    return np.stack(corners)


def steer_clip(
    thing: Thing, actions: Sequence[str], rng: np.random.Generator, *, chunk: int = 1, size: int = 32
) -> NDArray[np.uint8]:
    """A clip (F, size, size, 3) of a thing that follows ``actions``, one a chunk. Place and grey level come from
    ``rng``."""
    if not actions:
        raise UserError("actions: got none, expected one a chunk")
    scale = size / REFERENCE_SIZE
    places = int((LAST - OFFSET) / GRID) + 1
    start = OFFSET + GRID * rng.integers(places, size=2).astype(np.float64)
    centres = scale * (path_of(actions, start, chunk) + EXTENT * np.array([1.0, EXTENT_ABOVE[thing.shape]]))
    clip = np.full((len(centres), size, size, 3), rng.uniform(*BACKGROUND))
    draw(clip, thing.shape, rgb(thing.colour, HIGH, LOW), centres, EXTENT * scale)
    return np.rint(clip).astype(np.uint8)


# -- ActionEval


def centre_of(frame_HWC: NDArray[np.uint8], shape: str) -> Array | None:
    """Centroid (x, y) of the object, in pixels of a 32-pixel frame; None where there is no such object in one piece."""
    scale = frame_HWC.shape[0] / REFERENCE_SIZE
    values = frame_HWC.astype(np.float64)
    mask = values.max(axis=-1) - values.min(axis=-1) > MASK_CHROMA
    least, most = (share * AREA_FACTOR[shape] * (EXTENT * scale) ** 2 for share in AREA_RANGE)
    if not least <= mask.sum() <= most:
        return None
    points = np.argwhere(mask)[:, ::-1] + 0.5
    centre = points.mean(axis=0)
    if np.sqrt(((points - centre) ** 2).sum(axis=1).mean()) > MOST_SPREAD * EXTENT * scale:
        return None
    return centre / scale


def agrees(before: Array | None, after: Array | None, action: str, frames: int) -> bool:
    """Whether the object's centre moved as the action says over so many frames."""
    if before is None or after is None:
        return False
    step, whole = after - before, SPEED * frames
    along = np.array(DIRECTION[action], dtype=np.float64)
    if not along.any():
        return bool(np.abs(step).max() <= MOST_ASTRAY * whole)
    across = step - (step @ along) * along
    return bool(step @ along >= LEAST_MOVE * whole and np.abs(across).max() <= MOST_ASTRAY * whole)


def judge_actions(frames_FHWC: NDArray[np.uint8], actions: Sequence[str], shape: str, *, chunk: int = 1) -> list[bool]:
    """Of each chunk after the first, whether the clip follows its action."""
    if len(frames_FHWC) != frames_of(len(actions), chunk):
        raise UserError(
            f"got {len(frames_FHWC)} frames for {len(actions)} actions, expected {frames_of(len(actions), chunk)}"
        )
    ends = [centre_of(frames_FHWC[chunk_frames(j, chunk).stop - 1], shape) for j in range(len(actions))]
    return [agrees(ends[j - 1], ends[j], actions[j], TEMPORAL * chunk) for j in range(1, len(actions))]


def possible(centre: Array | None, shape: str, frames: int) -> tuple[str, ...]:
    """Actions that an object at ``centre`` has room for; all where it is not seen."""
    if centre is None:
        return ACTIONS
    corner = centre - EXTENT * np.array([1.0, EXTENT_ABOVE[shape]])
    slack = 0.5 * SPEED  # an object that is seen half a pixel off its grid
    ends = {name: corner + SPEED * frames * np.array(step) for name, step in DIRECTION.items()}
    return tuple(
        name
        for name, end in ends.items()
        if name == "none" or (np.all(end >= OFFSET - slack) and np.all(end <= LAST + slack))
    )


@dataclass
class _World:
    """One session under evaluation."""

    session: WorldModelSession
    thing: Thing
    centre: Array | None = None
    """Of the object in the newest frame."""


def action_eval(instance: ModelInstance, *, worlds: int = 32, acts: int = 8, seed: int = 0) -> dict[str, float]:
    """Rolls sessions out and gives the share of the acts that were followed: ``action_eval``, of each action
    ``action_eval_<name>``, and ``action_seen``, the share of frames at an act's end in which the object is there.

    Args:
        instance: a causal card with ``ACTIONS`` and a bounded window.
        worlds: sessions, each with its own object and seed.
        acts: of each session, after the chunk that begins it.
    """
    if worlds < 1 or acts < 1:
        raise UserError(f"got worlds={worlds}, acts={acts}; expected at least 1 of each")
    rng = np.random.default_rng([seed, worlds, acts])
    engine = Engine(instance.device, batching="off")
    things = [sample_thing(rng) for _ in range(worlds)]
    rows = [
        _World(WorldModelSession(engine, instance, caption_of(thing), seed=seed + i), thing)
        for i, thing in enumerate(things)
    ]
    if rows[0].session.actions != ACTIONS:
        raise UserError(f"actions: got {list(rows[0].session.actions)}, expected {list(ACTIONS)}")
    marks: dict[str, list[bool]] = {name: [] for name in ACTIONS}
    seen: list[bool] = []
    _act(engine, rows, ["none"] * worlds)
    for _ in range(acts):
        before = [row.centre for row in rows]
        frames = TEMPORAL * rows[0].session.latent_frames
        names = [str(rng.choice(possible(row.centre, row.thing.shape, frames))) for row in rows]
        _act(engine, rows, names)
        for row, name, centre in zip(rows, names, before, strict=True):
            marks[name].append(agrees(centre, row.centre, name, frames))
            seen.append(row.centre is not None)
    for row in rows:
        row.session.close()
    every = [mark for row in marks.values() for mark in row]
    rates = {f"action_eval_{name}": float(np.mean(row)) for name, row in marks.items() if row}
    return {"action_eval": float(np.mean(every)), **rates, "action_seen": float(np.mean(seen))}


def _act(engine: Engine, rows: Sequence[_World], names: Sequence[str]) -> None:
    """One act of every world, together, and where its object is then."""
    handles: list[Handle] = [row.session.act(name) for row, name in zip(rows, names, strict=True)]
    while engine.tick():
        pass
    for row, handle in zip(rows, handles, strict=True):
        row.centre = centre_of(handle.result().frames_FHWC()[-1], row.thing.shape)
