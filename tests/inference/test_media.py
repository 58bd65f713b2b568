"""Media files: what goes in comes out, and a damaged file is found, never read short."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from cards.errors import UserError
from inference.media import MediaError, encode_video_bytes, probe_video, read_video, write_video


def saturated_clip(frames: int = 9, size: int = 32) -> np.ndarray:
    """A red square and a blue bar that move over grey, with hard edges."""
    clip = np.full((frames, size, size, 3), 40, np.uint8)
    for index in range(frames):
        clip[index, 5:12, 3 + index : 11 + index] = (255, 0, 0)
        clip[index, 20 + index // 2 : 25 + index // 2, 7:20] = (0, 0, 255)
    return clip


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """dB; exact equality counts as 99."""
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return 99.0 if error == 0 else float(10 * np.log10(255**2 / error))


@pytest.mark.parametrize("suffix, least_db", [("mp4", 60.0), ("webm", 60.0), ("gif", 99.0)])
def test_lossless_chroma_keeps_saturated_shapes(tmp_path: Path, suffix: str, least_db: float) -> None:
    clip = saturated_clip()
    path = write_video(tmp_path / f"clip.{suffix}", clip, 8.0, lossless_chroma=True)
    read, fps = read_video(path)
    assert read.dtype == np.uint8 and read.shape == clip.shape
    assert psnr(read, clip) >= least_db
    assert fps == pytest.approx(8.0, rel=0.05)  # a gif counts in hundredths of a second


def test_default_mp4_is_what_browsers_play(tmp_path: Path) -> None:
    path = write_video(tmp_path / "clip.mp4", saturated_clip(), 16.0)
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
    read, fps = read_video(path)
    assert fps == 16.0
    assert psnr(read, saturated_clip()) > 18  # half-size colour: the documented price


def test_odd_sizes_gain_a_repeated_pixel(tmp_path: Path) -> None:
    clip = np.random.default_rng(0).integers(0, 256, (3, 33, 31, 3), dtype=np.uint8)
    assert read_video(write_video(tmp_path / "clip.mp4", clip, 8.0))[0].shape == (3, 34, 32, 3)
    lossless = write_video(tmp_path / "lossless.mp4", clip, 8.0, lossless_chroma=True)
    assert read_video(lossless)[0].shape == clip.shape


def test_a_still_clip_keeps_its_frame_count(tmp_path: Path) -> None:
    clip = np.full((7, 16, 16, 3), 90, np.uint8)
    for suffix in ("mp4", "webm", "gif"):
        read, _ = read_video(write_video(tmp_path / f"still.{suffix}", clip, 10.0))
        assert read.shape == clip.shape, suffix


def test_scale_is_nearest_neighbour(tmp_path: Path) -> None:
    clip = saturated_clip()
    path = tmp_path / "big.webm"
    path.write_bytes(encode_video_bytes(clip, 8.0, container="webm", scale=3, lossless_chroma=True))
    read, _ = read_video(path)
    assert read.shape == (9, 96, 96, 3)
    assert psnr(read[:, 1::3, 1::3], clip) >= 60


def test_gif_of_many_colours_is_close(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)
    picture = np.stack([*np.meshgrid(ramp, ramp), np.full((64, 64), 128, np.uint8)], axis=-1).astype(np.uint8)
    read, _ = read_video(write_video(tmp_path / "ramp.gif", picture[None], 10.0))
    assert psnr(read, picture[None]) > 25


def test_max_frames_reads_the_head(tmp_path: Path) -> None:
    clip = saturated_clip()
    path = write_video(tmp_path / "clip.mp4", clip, 8.0, lossless_chroma=True)
    head, _ = read_video(path, max_frames=5)
    assert head.shape[0] == 5 and psnr(head, clip[:5]) > 60
    assert probe_video(path).frames == 9


def test_png_is_a_frame_or_a_strip(tmp_path: Path) -> None:
    clip = saturated_clip()
    strip, fps = read_video(write_video(tmp_path / "strip.png", clip, 8.0))
    assert fps == 1.0
    assert np.array_equal(strip[0], np.concatenate(list(clip), axis=1))
    Image.fromarray(clip[0]).save(tmp_path / "one.jpg", quality=95)
    assert read_video(tmp_path / "one.jpg")[0].shape == (1, 32, 32, 3)


@pytest.mark.parametrize("suffix", ["mp4", "webm", "gif"])
def test_a_truncated_file_is_an_error_or_still_whole(tmp_path: Path, suffix: str) -> None:
    clip = np.concatenate([saturated_clip()] * 3)
    payload = encode_video_bytes(clip, 10.0, container=suffix, lossless_chroma=True)
    cut = tmp_path / f"cut.{suffix}"
    found = 0
    for size in range(0, len(payload), max(1, len(payload) // 60)):
        cut.write_bytes(payload[:size])
        for read in (read_video, probe_video):
            try:
                outcome = read(cut)
            except MediaError as error:
                assert str(cut) in str(error)
                found += 1
            else:  # only bytes after the last frame were lost
                assert size > 0.95 * len(payload)
                assert (outcome[0].shape[0] if isinstance(outcome, tuple) else outcome.frames) == len(clip)
    assert found > 100


def test_a_front_indexed_mp4_cut_short_is_found_even_when_enough_frames_decode(tmp_path: Path) -> None:
    whole = tmp_path / "whole.mp4"
    clip = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    with av.open(str(whole), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
        for picture in clip:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    payload = whole.read_bytes()
    assert payload.index(b"moov") < payload.index(b"mdat")
    assert read_video(whole, max_frames=5)[0].shape[0] == 5
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(payload[: int(0.8 * len(payload))])
    with pytest.raises(MediaError, match=r"cut\.mp4"):
        read_video(cut, max_frames=5)


def test_not_a_video(tmp_path: Path) -> None:
    for name in ("noise.mp4", "noise.webm", "noise.gif", "noise.png"):
        (tmp_path / name).write_bytes(np.random.default_rng(1).bytes(2000))
        with pytest.raises(MediaError, match=name):
            read_video(tmp_path / name)
    with pytest.raises(MediaError, match="no such file"):
        read_video(tmp_path / "absent.mp4")


def test_bad_arguments_say_what_is_valid(tmp_path: Path) -> None:
    clip = saturated_clip()
    with pytest.raises(UserError, match=r"\.avi.*\.mp4, \.webm, \.gif, \.png"):
        write_video(tmp_path / "clip.avi", clip, 8.0)
    with pytest.raises(UserError, match="got shape"):
        write_video(tmp_path / "clip.mp4", clip.astype(np.float32), 8.0)
    with pytest.raises(UserError, match="above 0"):
        write_video(tmp_path / "clip.mp4", clip, 0.0)
    with pytest.raises(UserError, match="gif, mp4, webm"):
        encode_video_bytes(clip, 8.0, container="mkv")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken.mp4").mkdir()
    with pytest.raises(OSError):
        write_video(tmp_path / "taken.mp4", saturated_clip(), 8.0)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.mp4"]


def test_a_phone_video_is_turned_upright(tmp_path: Path) -> None:
    """QuickTime file format, "Track Header Atoms": the matrix (0, 1; -1, 0) turns the picture 90 degrees clockwise."""
    clip = saturated_clip()[:, :24]
    payload = bytearray(encode_video_bytes(clip, 8.0, lossless_chroma=True))
    matrix = payload.index(b"tkhd") + 4 + 40  # version 0: the matrix follows 40 bytes of other fields
    one, two = 1 << 16, 1 << 30
    assert struct.unpack_from(">9i", payload, matrix) == (one, 0, 0, 0, one, 0, 0, 0, two)
    struct.pack_into(">9i", payload, matrix, 0, one, 0, -one, 0, 0, 0, 0, two)
    path = tmp_path / "phone.mp4"
    path.write_bytes(payload)
    read, _ = read_video(path)
    assert psnr(read, np.rot90(clip, k=-1, axes=(1, 2))) > 60


def test_colours_follow_the_tag_of_the_file(tmp_path: Path) -> None:
    """BT.709, limited range: pure red is Y'CbCr (63, 102, 240); read by BT.601 it would be off by tens of levels."""
    path = tmp_path / "hd.mp4"
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(8), options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = 16, 16, "yuv444p"
        stream.codec_context.colorspace, stream.codec_context.color_range = 1, 1
        for _ in range(2):
            planes = np.stack([np.full((16, 16), value, np.uint8) for value in (63, 102, 240)])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv444p")))
        container.mux(stream.encode())
    path.write_bytes(buffer.getvalue())
    read, _ = read_video(path)
    assert np.abs(read.astype(int) - (255, 0, 0)).max() <= 3
