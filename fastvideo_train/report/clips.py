"""Sample clips as data URIs: H.264 in mp4, small enough for one page.

Knows files, sizes in bytes and pixels. Leaves what a clip shows to the page.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
from PIL import Image

from inference.media import encode_video_bytes, read_video

_SIDES = (320, 224, 160, 112)  # longest side in pixels, tried in turn until a clip is small enough
_MOST_FRAMES = 48


def data_uri(path: Path, most_bytes: int) -> str:
    """The clip as it is when it is small enough, else shrunk and thinned out until it is, or as small as it gets."""
    payload = path.read_bytes()
    if len(payload) > most_bytes:
        frames_FHWC, fps = read_video(path)
        every = -(-len(frames_FHWC) // _MOST_FRAMES)
        for side in _SIDES:
            payload = encode_video_bytes(_shrunk(frames_FHWC[::every], side), fps / every)
            if len(payload) <= most_bytes:
                break
    return "data:video/mp4;base64," + base64.b64encode(payload).decode()


def _shrunk(frames_FHWC: np.ndarray, side: int) -> np.ndarray:
    """Frames whose longer side is at most ``side`` pixels."""
    _, height, width, _ = frames_FHWC.shape
    scale = min(1.0, side / max(height, width))
    size = (max(2, round(width * scale)), max(2, round(height * scale)))
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, Image.Resampling.BOX)) for frame in frames_FHWC])
