"""Equal frames give equal files: what "one seed, one video" means for the file that a person gets."""

from __future__ import annotations

import numpy as np
import pytest

from inference.media import encode_video_bytes


@pytest.mark.parametrize("container", ["mp4", "gif"])  # a webm holds a random segment id
@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 24), (48, 80)])
def test_equal_frames_encode_to_equal_bytes(container: str, height: int, width: int) -> None:
    ramp = np.linspace(0, 40, 9 * height * width * 3).reshape(9, height, width, 3)
    frames_THWC = (127 + 120 * np.sin(ramp)).astype(np.uint8)
    rng = np.random.default_rng(0)
    files, memory = set(), []
    for _ in range(12):
        memory = [*memory[-4:], rng.integers(0, 255, rng.integers(1_000, 200_000), dtype=np.uint8)]  # moves allocations
        files.add(encode_video_bytes(frames_THWC, 8, container=container))
    assert len(files) == 1
