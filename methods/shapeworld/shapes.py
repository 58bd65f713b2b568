"""The geometry and colours that the renderer draws and the judge looks for.

Knows outlines (as inside tests and signed distances, in pixels) and the RGB of a colour word. Knows no scene, no
layout and no file.

Outlines are given by ``extent``, half the bounding box's larger side in pixels, and centred on the AREA centroid, so
that a shape's centroid is where it is drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from methods.shapeworld.scene import COLOURS

FloatArray = NDArray[np.floating]

# Area divided by extent squared.
AREA_FACTOR: dict[str, float] = {"circle": np.pi, "square": 4.0, "triangle": 2.0}

# An upright triangle as wide as high: apex at -4/3 extent, base at +2/3 extent from the centroid (y grows downwards).
_APEX, _BASE = -4.0 / 3.0, 2.0 / 3.0
_SIDE_NORM = np.sqrt(5.0)  # the sides run 2 down for 1 across

EXTENT_ABOVE: dict[str, float] = {"circle": 1.0, "square": 1.0, "triangle": -_APEX}  # centroid to top, in extents
EXTENT_BELOW: dict[str, float] = {"circle": 1.0, "square": 1.0, "triangle": _BASE}


def signed_distance(shape: str, dx: FloatArray, dy: FloatArray, extent: FloatArray | float) -> FloatArray:
    """Signed distance (pixels, negative inside, a bound at corners) of points (dx, dy) from the centroid."""
    if shape == "circle":
        return np.sqrt(dx * dx + dy * dy) - extent
    if shape == "square":
        return np.maximum(np.abs(dx), np.abs(dy)) - extent
    if shape == "triangle":
        side = (2.0 * np.abs(dx) - (dy - _APEX * extent)) / _SIDE_NORM
        return np.maximum(side, dy - _BASE * extent)
    raise KeyError(shape)


def rgb(colour: str, high: float, low: float) -> NDArray[np.float64]:
    """RGB of a fully saturated hue whose strong channels are ``high`` and weak ones ``low`` (both 0..255)."""
    strong = {
        "red": (1, 0, 0),
        "yellow": (1, 1, 0),
        "green": (0, 1, 0),
        "cyan": (0, 1, 1),
        "blue": (0, 0, 1),
        "magenta": (1, 0, 1),
    }[colour]
    return np.where(np.array(strong, dtype=bool), high, low).astype(np.float64)


HUE_DEGREES: dict[str, float] = {colour: 60.0 * i for i, colour in enumerate(COLOURS)}
