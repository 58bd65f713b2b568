"""Draws a scene as a short video.

Knows layout, motion and anti-aliased drawing. Leaves the words to ``scene.py`` and the verdict to ``judge.py``.

Everything is in pixels of the frame and frames of the clip. Objects never touch each other and never leave the frame;
they start on a grid of 4 pixels and move a pixel a frame at 9 frames. Pixel values stay within 26..230, well inside
what a clamping decoder can reproduce.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from methods.shapeworld.scene import MOTIONS, Scene, Thing
from methods.shapeworld.shapes import EXTENT_ABOVE, EXTENT_BELOW, rgb, signed_distance

Array = NDArray[np.float64]

MARGIN = 1.0  # pixels between an object and the frame's edge
GAP = 3.0  # least pixels between two objects' bounding boxes, along one axis
SUPERSAMPLE = 4  # sub-pixels a pixel and axis
REFERENCE_SIZE = 32.0  # the frame size at which these lengths hold; others scale
DIAMETER = 9.0  # pixels, the side of an object's bounding box
GRID, OFFSET = 4.0, 2.0  # pixels; a box starts at OFFSET plus a multiple of GRID on both axes
TRAVEL = 8.0  # pixels that a moving object covers in a clip, however many frames it has
HIGH, LOW = 216.0, 40.0  # levels of a colour's strong and weak channels
BACKGROUND = (120.0, 136.0)  # level, drawn for each clip

_DIRECTION = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
_CANDIDATES = 64  # layouts drawn at once
_ROUNDS = 20


def render(scene: Scene, rng: np.random.Generator, frames: int = 9, size: int = 32) -> NDArray[np.uint8]:
    """A clip of ``scene``: uint8 (frames, size, size, 3). Positions and grey level come from ``rng``."""
    scale = size / REFERENCE_SIZE
    things = scene.things * scene.count
    motion = scene.motion if scene.motion is not None else MOTIONS[int(rng.integers(len(MOTIONS)))]
    path = _path(motion, frames, scale)
    extent = 0.5 * DIAMETER * scale
    centres = _layout(scene, things, extent, path, rng, size, scale)

    clip = np.full((frames, size, size, 3), rng.uniform(*BACKGROUND))
    for thing, centre in zip(things, centres, strict=True):
        draw(clip, thing.shape, rgb(thing.colour, HIGH, LOW), centre + path, extent)
    return np.rint(clip).astype(np.uint8)


def _path(motion: str, frames: int, scale: float) -> Array:
    """Displacement (x, y) of every frame from the first, (frames, 2)."""
    along = np.linspace(0.0, TRAVEL * scale, frames) if frames > 1 else np.zeros(1)
    return along[:, None] * np.array(_DIRECTION[motion], dtype=np.float64)


def _layout(
    scene: Scene,
    things: tuple[Thing, ...],
    extent: float,
    path: Array,
    rng: np.random.Generator,
    size: int,
    scale: float,
) -> Array:
    """First-frame centroids (n, 2), whose boxes start on the grid, such that nothing touches or leaves the frame.

    Draws many candidates at once and takes the first that fits; each further round spreads the objects further apart.
    """
    before = extent * np.array([[1.0, EXTENT_ABOVE[t.shape]] for t in things])  # centroid to the box's left and top
    after = extent * np.array([[1.0, EXTENT_BELOW[t.shape]] for t in things])
    lower = before + MARGIN * scale - path.min(axis=0)
    upper = size - after - MARGIN * scale - path.max(axis=0)
    for attempt in range(_ROUNDS):
        places = _places(len(things), scene.relation, 0.5 * (1.0 - attempt / _ROUNDS), rng)
        corner = lower + (upper - lower) * places - before
        centres = scale * (OFFSET + GRID * np.rint((corner / scale - OFFSET) / GRID)) + before
        fits = np.all((centres >= lower - 1e-6) & (centres <= upper + 1e-6), axis=(1, 2))
        fits &= _apart(centres, before, after, GAP * scale) & _related(scene, centres, scale)
        if fits.any():
            return centres[int(np.argmax(fits))]
    raise RuntimeError(f"no layout found for {scene} in a frame of {size} pixels")


def _places(n: int, relation: str | None, reach: float, rng: np.random.Generator) -> Array:
    """Candidate positions as shares of the allowed range, (candidates, n, 2): anywhere, or in half of the candidates
    within ``reach`` of different corners (three and more objects) or of opposite ends (a relation): few others fit."""
    places = rng.random((_CANDIDATES, n, 2))
    near = reach * places
    if relation is not None:
        axis = 0 if relation in ("left of", "right of") else 1
        last = 1 if relation in ("left of", "above") else 0  # which object is further right or down
        guided = places.copy()
        guided[:, 1 - last, axis] = near[:, 1 - last, axis]
        guided[:, last, axis] = 1.0 - near[:, last, axis]
    elif n >= 3:
        corners = rng.permuted(np.tile(np.arange(4), (_CANDIDATES, 1)), axis=1)[:, :n]
        guided = np.abs(np.stack([corners % 2, corners // 2], axis=-1) - near)
    else:
        return places
    half = rng.random(_CANDIDATES) < 0.5
    return np.where(half[:, None, None], guided, places)


def _apart(centres: Array, before: Array, after: Array, gap: float) -> NDArray[np.bool_]:
    """Which candidates keep every two bounding boxes at least ``gap`` apart along x or along y."""
    fits = np.ones(len(centres), dtype=bool)
    n = centres.shape[1]
    for i in range(n):
        for j in range(i + 1, n):
            i_first = centres[:, j] - before[j] - centres[:, i] - after[i]
            j_first = centres[:, i] - before[i] - centres[:, j] - after[j]
            fits &= np.any(np.maximum(i_first, j_first) >= gap - 1e-6, axis=1)
    return fits


def _related(scene: Scene, centres: Array, scale: float) -> NDArray[np.bool_]:
    """Which candidates hold the asked relation clearly: apart on its axis, and mostly along it."""
    if scene.relation is None:
        return np.ones(len(centres), dtype=bool)
    step = centres[:, 1] - centres[:, 0]  # from the first to the second
    axis = 0 if scene.relation in ("left of", "right of") else 1
    sign = 1.0 if scene.relation in ("left of", "above") else -1.0
    along, across = sign * step[:, axis], step[:, 1 - axis]
    return (along >= 9.0 * scale) & (np.abs(across) <= 0.6 * along)


def draw(
    clip: Array,
    shape: str,
    colour: Array,
    centres: Array,
    extent: float,
) -> None:
    """Blends one object into every frame of ``clip``, by the covered share of each pixel."""
    frames, size = clip.shape[:2]
    reach = int(np.ceil(extent * 4.0 / 3.0)) + 2
    offsets = np.arange(-reach, reach + 1)
    corner = np.floor(centres).astype(int)  # (frames, 2), the pixel that holds the centroid
    sub = (np.arange(SUPERSAMPLE) + 0.5) / SUPERSAMPLE
    grid = (offsets[:, None] + sub[None, :]).reshape(-1)  # sub-pixel positions relative to the corner
    frac = centres - corner
    dx = grid[None, None, :] - frac[:, 0, None, None]
    dy = grid[None, :, None] - frac[:, 1, None, None]
    inside = signed_distance(shape, dx, dy, extent) <= 0.0
    n = len(offsets)
    cover = inside.reshape(frames, n, SUPERSAMPLE, n, SUPERSAMPLE).mean(axis=(2, 4))
    for f in range(frames):
        x0, y0 = corner[f] - reach
        xs, ys = max(x0, 0), max(y0, 0)
        xe, ye = min(x0 + n, size), min(y0 + n, size)
        part = cover[f, ys - y0 : ye - y0, xs - x0 : xe - x0, None]
        window = clip[f, ys:ye, xs:xe]
        window += part * (colour - window)
