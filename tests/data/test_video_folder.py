"""A folder of videos: every mistake is named with its line, damaged files are left out, geometry is brought to size."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from fastvideo_train.data.video_folder import (
    DataError,
    Geometry,
    read_clip,
    read_metadata,
    resize_and_crop,
    scan_folder,
)
from inference.media import MediaError, write_video

GEOMETRY = Geometry(num_frames=5, height=16, width=16)


def write_folder(folder: Path, frames: dict[str, int], extra_lines: list[str] | None = None) -> Path:
    """A folder of noise clips: name -> frame count."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (name, count) in enumerate(frames.items()):
        clip = np.random.default_rng(number).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        write_video(folder / name, clip, 8.0, lossless_chroma=True)
        lines.append(json.dumps({"file_name": name, "caption": f"clip {name}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines + (extra_lines or [])) + "\n")
    return folder


def test_rows_in_order_with_either_caption_key(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a.mp4": 5, "b.webm": 5})
    with (tmp_path / "metadata.jsonl").open("a") as file:
        file.write('\n{"file_name": "a.mp4", "text": " again ", "score": 3}\n')
    rows = read_metadata(tmp_path)
    assert [(row.line, row.file_name, row.caption) for row in rows] == [
        (1, "a.mp4", "clip a.mp4"),
        (2, "b.webm", "clip b.webm"),
        (4, "a.mp4", "again"),
    ]


def test_every_bad_row_is_named_at_once(tmp_path: Path) -> None:
    bad = [
        '{"file_name": "a.mp4"}',
        '{"file_name": "a.mp4", "caption": "  "}',
        '{"file_name": "gone.mp4", "caption": "x"}',
        '{"file_name": "a.mp4", "caption": ',
        '["a.mp4"]',
        '{"caption": "x"}',
        '{"file_name": "metadata.jsonl", "caption": "x"}',
    ]
    write_folder(tmp_path, {"a.mp4": 5}, bad)
    with pytest.raises(DataError) as caught:
        read_metadata(tmp_path)
    message = str(caught.value)
    assert "7 bad row(s)" in message
    expected = ["no caption", "no caption", "gone.mp4: no such file", "bad JSON", "JSON list", "no file_name", "suffix"]
    for line, words in enumerate(expected, start=2):
        assert any(f"metadata.jsonl:{line}:" in part and words in part for part in message.splitlines()), (line, words)


def test_at_most_twenty_problems_are_shown(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a.mp4": 5}, ['{"file_name": "a.mp4"}'] * 33)
    with pytest.raises(DataError, match=r"33 bad row\(s\)") as caught:
        read_metadata(tmp_path)
    assert str(caught.value).count("no caption") == 20
    assert "and 13 more" in str(caught.value)


def test_no_folder_no_metadata_no_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_metadata(tmp_path / "absent")
    with pytest.raises(DataError, match=r"has no metadata\.jsonl"):
        read_metadata(tmp_path)
    (tmp_path / "metadata.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        read_metadata(tmp_path)


def test_damaged_and_short_files_are_skipped_and_listed(tmp_path: Path) -> None:
    write_folder(tmp_path, {"good.mp4": 9, "cut.mp4": 9, "short.gif": 4, "fine.webm": 5})
    payload = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(payload[: len(payload) // 2])
    scan = scan_folder(tmp_path, GEOMETRY)
    assert [clip.row.file_name for clip in scan.clips] == ["good.mp4", "fine.webm"]
    assert scan.clips[0].sha256 == hashlib.sha256((tmp_path / "good.mp4").read_bytes()).hexdigest()
    assert [(item.line, item.file_name) for item in scan.skipped] == [(2, "cut.mp4"), (3, "short.gif")]
    assert "got 4 frames, expected at least 5" in scan.skipped[1].reason


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path, {"short.mp4": 3})
    with pytest.raises(DataError, match="no usable video is left") as caught:
        scan_folder(tmp_path, GEOMETRY)
    assert "metadata.jsonl:1" in str(caught.value)


@pytest.mark.parametrize("frames, better", [(8, "use 5 or 9"), (2, "use 1 or 5"), (0, "use 1 or 5")])
def test_frames_must_be_4k_plus_1(frames: int, better: str) -> None:
    with pytest.raises(DataError, match="expected 4k\\+1") as caught:
        Geometry(frames, 16, 16).check(temporal_factor=4, spatial_factor=8)
    assert better in str(caught.value)


def test_all_geometry_problems_come_together() -> None:
    with pytest.raises(DataError) as caught:
        Geometry(6, 20, 30).check(temporal_factor=4, spatial_factor=8)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["num_frames", "height", "width"]
    Geometry(9, 16, 24).check(temporal_factor=4, spatial_factor=8)


def test_a_longer_clip_loses_its_tail(tmp_path: Path) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8)
    path = write_video(tmp_path / "clip.gif", clip // 64 * 64, 8.0)  # 64 colours: a gif keeps them exactly
    assert np.array_equal(read_clip(path, GEOMETRY), (clip // 64 * 64)[:5])
    with pytest.raises(MediaError, match="too short"):
        read_clip(path, Geometry(num_frames=13, height=16, width=16))


def test_resize_covers_and_cuts_the_centre() -> None:
    """Three vertical thirds, red, green, blue: a square cut from a 3:1 picture is green alone."""
    picture = np.zeros((1, 40, 120, 3), np.uint8)
    for third in range(3):
        picture[:, :, 40 * third : 40 * third + 40, third] = 255
    square = resize_and_crop(picture, 20, 20)
    assert square.shape == (1, 20, 20, 3)
    assert np.abs(square[0, :, 3:-3].astype(int) - (0, 255, 0)).max() == 0
    tall = resize_and_crop(picture.transpose(0, 2, 1, 3), 80, 40)  # 120 x 40 -> rows 20..100, at the same scale
    assert np.abs(tall[0, 30:50].astype(int) - (0, 255, 0)).max() == 0
    assert np.abs(tall[0, :15].astype(int) - (255, 0, 0)).max() == 0
