"""Video and image files in and out, as uint8 frames.

Knows containers, codecs and how a broken file shows itself (PyAV for video, Pillow for single pictures). Knows nothing
about captions, models or value ranges other than 0..255: resizing, cropping and scaling to [-1, 1] are the caller's.

Shape legend: T frames, H height in pixels, W width in pixels, C = 3 (red, green, blue).
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace
from PIL import Image, UnidentifiedImageError

from cards.errors import UserError

VIDEO_SUFFIXES = (".mp4", ".webm", ".gif")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
READABLE_SUFFIXES = VIDEO_SUFFIXES + IMAGE_SUFFIXES
WRITABLE_SUFFIXES = (*VIDEO_SUFFIXES, ".png")

_SINGLE_THREAD_PIXELS = 256 * 256  # below this, encoder threads cost more than they give


class MediaError(UserError):
    """A media file that cannot be read (corrupt, truncated, not a video) or written."""


@dataclass(frozen=True)
class MediaInfo:
    """What a whole, undamaged file holds."""

    frames: int  # number of pictures
    height: int  # pixels, as stored (before a phone's rotation flag)
    width: int  # pixels, as stored
    fps: float  # frames a second; 1.0 for a single picture


# ----------------------------------------------------------------------------------------------------------- reading


def read_video(path: str | Path, *, max_frames: int | None = None) -> tuple[np.ndarray, float]:
    """Decode a file to ``(frames_THWC uint8 RGB, frames a second)``; a picture is one frame at 1 fps.

    Args:
        path: mp4, webm, gif, png or jpg.
        max_frames: keep only the first so many; the rest is still walked (not decoded) to find a truncated file.

    Raises:
        MediaError: unreadable, truncated, corrupt, or without a picture.
    """
    path = Path(path)
    if _suffix(path, READABLE_SUFFIXES) in IMAGE_SUFFIXES:
        return _read_image(path)[None], 1.0
    frames: list[np.ndarray] = []
    with _opened(path) as (container, stream):
        for packet in _whole(path, container, stream):
            if max_frames is None or len(frames) < max_frames:
                frames.extend(_decode(path, packet))
        fps = _fps(path, stream)
    if not frames:
        raise MediaError(f"{path}: no picture could be decoded; expected at least one frame")
    if any(frame.shape != frames[0].shape for frame in frames):
        raise MediaError(f"{path}: the picture size changes inside the file; re-encode it with one size")
    return np.stack(frames[:max_frames]), fps


def probe_video(path: str | Path) -> MediaInfo:
    """Frame count, size and rate from the container alone: no decoding, so fast, yet a truncated file is found.

    Raises:
        MediaError: as ``read_video``, except for damage that only decoding shows.
    """
    path = Path(path)
    if _suffix(path, READABLE_SUFFIXES) in IMAGE_SUFFIXES:
        height, width, _ = _read_image(path).shape
        return MediaInfo(frames=1, height=height, width=width, fps=1.0)
    with _opened(path) as (container, stream):
        count = sum(1 for packet in _whole(path, container, stream) if packet.size)
        if not count:
            raise MediaError(f"{path}: holds no frames; expected at least one")
        return MediaInfo(
            frames=count, height=stream.codec_context.height, width=stream.codec_context.width, fps=_fps(path, stream)
        )


def _suffix(path: Path, valid: tuple[str, ...]) -> str:
    suffix = path.suffix.lower()
    if suffix not in valid:
        raise UserError(f"{path}: unknown media suffix {suffix!r}; expected one of: {', '.join(valid)}")
    return suffix


def _read_image(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except FileNotFoundError as error:
        raise MediaError(f"{path}: no such file") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise MediaError(f"{path}: not a readable picture ({error}); replace or remove it") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """An open container and its first video stream; every PyAV error inside becomes a ``MediaError``."""
    if not path.is_file():
        raise MediaError(f"{path}: no such file")
    if path.suffix.lower() == ".gif" and not _gif_is_closed(path):
        raise MediaError(f"{path}: truncated gif (its end marker is missing); replace or remove it")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise MediaError(f"{path}: holds no video stream; expected one")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.error.FFmpegError, EOFError, ValueError) as error:
        raise MediaError(f"{path}: corrupt, truncated or not a video ({error}); replace or remove it") from error


def _gif_is_closed(path: Path) -> bool:
    """The last block's terminator 0x00, then the trailer byte 0x3B (GIF89a, 27); some writers pad with zeros."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip(b"\0").endswith(b"\x00\x3b")


def _whole(path: Path, container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[av.Packet]:
    """All packets of the stream, the final flush included; raises when the file ends before its header says."""
    count, last_seconds = 0, 0.0
    for packet in container.demux(stream):
        if packet.size:
            count += 1
            if packet.is_corrupt:
                raise MediaError(f"{path}: corrupt data in frame {count}; replace or remove it")
            if packet.pts is not None and packet.time_base is not None:
                last_seconds = max(last_seconds, float(packet.pts * packet.time_base))
        yield packet
    if stream.frames and count < stream.frames:
        raise MediaError(f"{path}: truncated: got {count} frames, expected {stream.frames} from its header")
    duration = _stream_seconds(container, stream)
    if duration is not None and count and duration - last_seconds > 1.75 / _fps(path, stream):
        raise MediaError(
            f"{path}: truncated: the last frame is at {last_seconds:.2f} s, expected {duration:.2f} s from its header"
        )


def _stream_seconds(container: av.container.InputContainer, stream: av.VideoStream) -> float | None:
    """Seconds that a Matroska/WebM header promises; None where the frame count is known or nothing is said."""
    if stream.frames or "matroska" not in container.format.name:
        return None
    tag = stream.metadata.get("DURATION")
    if tag is not None:
        hours, minutes, seconds = tag.split(":")
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    if container.duration is None or len(container.streams) > 1:
        return None
    return container.duration / av.time_base


def _decode(path: Path, packet: av.Packet) -> Iterator[np.ndarray]:
    for frame in packet.decode():
        if frame.is_corrupt:
            raise MediaError(f"{path}: a frame at {frame.time} s is damaged; replace or remove the file")
        picture = frame.to_ndarray(format="rgb24")
        yield np.rot90(picture, k=round(frame.rotation / 90)) if frame.rotation else picture


def _fps(path: Path, stream: av.VideoStream) -> float:
    rate = stream.average_rate if stream.average_rate else stream.guessed_rate
    if not rate:
        raise MediaError(f"{path}: the frame rate is not known; re-encode the file with one")
    return float(rate)


# ----------------------------------------------------------------------------------------------------------- writing


def write_video(path: str | Path, frames_THWC: np.ndarray, fps: float, *, lossless_chroma: bool = False) -> Path:
    """Write frames by suffix: mp4, webm, gif, or png (one frame, or the frames side by side). Atomic: all or nothing.

    Args:
        path: target; missing parent folders are made, an existing file is replaced.
        frames_THWC: uint8 RGB.
        fps: frames a second (a png ignores it).
        lossless_chroma: see ``encode_video_bytes``.

    Raises:
        UserError: a suffix that is not known, or frames of another shape or type.
    """
    path = Path(path)
    suffix = _suffix(path, WRITABLE_SUFFIXES)
    if suffix == ".png":
        _check_frames(frames_THWC)
        buffer = io.BytesIO()
        Image.fromarray(np.concatenate(list(frames_THWC), axis=1)).save(buffer, format="PNG")
        payload = buffer.getvalue()
    else:
        payload = encode_video_bytes(frames_THWC, fps, container=suffix[1:], lossless_chroma=lossless_chroma)
    write_bytes_atomic(path, payload)
    return path


def write_bytes_atomic(path: Path, payload: bytes) -> None:
    """Write through a temporary file in the same folder and one rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(payload)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def encode_video_bytes(
    frames_THWC: np.ndarray, fps: float, *, container: str = "mp4", scale: int = 1, lossless_chroma: bool = False
) -> bytes:
    """Encode frames to the bytes of an mp4, webm or gif file.

    The default mp4 is H.264 in yuv420p, which every browser plays; an odd height or width gains one repeated pixel,
    because yuv420p stores colour at half size. That costs small saturated shapes their edges: 32x32 clips come back at
    25 dB PSNR (measured), and no bit rate mends it. Two remedies:

    Args:
        frames_THWC: uint8 RGB.
        fps: frames a second, > 0.
        container: "mp4", "webm" or "gif".
        scale: enlarge by this whole factor, nearest neighbour; for small clips shown in a page (even factors keep the
            colour edges exact).
        lossless_chroma: for data sets: full-size colour and lossless coding (68 dB on the same clips, and smaller
            files); mp4 then needs a player that knows H.264 4:4:4, such as Chrome, VLC or ffmpeg. A gif ignores it.
    """
    _check_frames(frames_THWC)
    if not (math.isfinite(fps) and fps > 0):
        raise UserError(f"frames a second: got {fps}, expected a number above 0")
    if scale < 1:
        raise UserError(f"scale: got {scale}, expected a whole number of at least 1")
    if scale > 1:
        frames_THWC = frames_THWC.repeat(scale, axis=1).repeat(scale, axis=2)
    if container == "gif":
        size = frames_THWC.shape[1:3]
        pictures = _paletted(frames_THWC)
        return _mux(pictures, fps, size=size, container="gif", codec="gif", pixel_format="pal8", options={})
    if container not in ("mp4", "webm"):
        raise UserError(f"unknown video container {container!r}; expected one of: gif, mp4, webm")
    codec, options = _codec(container, lossless_chroma)
    if not lossless_chroma:
        _, height, width, _ = frames_THWC.shape
        frames_THWC = np.pad(frames_THWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    size = frames_THWC.shape[1:3]
    pictures = (av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24") for frame in frames_THWC)
    pixel_format = "yuv444p" if lossless_chroma and codec != "mpeg4" else "yuv420p"
    return _mux(pictures, fps, size=size, container=container, codec=codec, pixel_format=pixel_format, options=options)


def _check_frames(frames_THWC: np.ndarray) -> None:
    shape, dtype = frames_THWC.shape, frames_THWC.dtype
    if dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or 0 in shape:
        raise UserError(f"frames: got shape {tuple(shape)} of {dtype}, expected (frames, height, width, 3) of uint8")


def _codec(container: str, lossless: bool) -> tuple[str, dict[str, str]]:
    if container == "webm":
        return "libvpx-vp9", {"lossless": "1"} if lossless else {"crf": "10", "b": "0"}
    if "libx264" in av.codecs_available:
        # Without mbtree: on frames of a few macroblocks it makes equal frames encode to unequal files (measured).
        return "libx264", {"qp": "0"} if lossless else {"crf": "10", "x264-params": "mbtree=0"}
    return "mpeg4", {"qscale": "1"}  # a PyAV built without x264: plays nearly everywhere, at less quality


def _paletted(frames_THWC: np.ndarray) -> Iterator[av.VideoFrame]:
    """Frames on one palette of 255 colours, exact when the clip has no more; index 255 stays free for transparency."""
    count, height, width, _ = frames_THWC.shape
    strip = Image.fromarray(frames_THWC.reshape(count * height, width, 3))
    colours = strip.getcolors(maxcolors=255)
    if colours is None:
        indexed = strip.quantize(colors=255, dither=Image.Dither.NONE)
        flat = indexed.getpalette()
        assert flat is not None  # a quantized image always has one
        table = np.asarray(flat, np.uint8).reshape(-1, 3)[:255]
        indices = np.asarray(indexed)
    else:
        table = np.asarray([colour for _, colour in colours], np.uint8)
        table = table[np.argsort(_colour_codes(table))]
        indices = np.searchsorted(_colour_codes(table), _colour_codes(frames_THWC)).astype(np.uint8)
    palette_ARGB = np.zeros((256, 4), np.uint8)
    palette_ARGB[:, 0] = 255
    palette_ARGB[: len(table), 1:] = table
    for picture in indices.reshape(count, height, width):
        pair: Any = (np.ascontiguousarray(picture), palette_ARGB)  # what pal8 takes; PyAV's stub knows arrays only
        yield av.VideoFrame.from_ndarray(pair, format="pal8")


def _colour_codes(pixels: np.ndarray) -> np.ndarray:
    """One integer a pixel, for looking colours up."""
    return pixels.astype(np.int64) @ (65536, 256, 1)


def _mux(
    pictures: Iterable[av.VideoFrame],
    fps: float,
    *,
    size: tuple[int, int],
    container: str,
    codec: str,
    pixel_format: str,
    options: dict[str, str],
) -> bytes:
    """Encode pictures of ``size`` (height, width) into one container, in memory."""
    buffer = io.BytesIO()
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)  # all codecs here are video codecs
        stream.height, stream.width = size
        stream.pix_fmt, stream.options = pixel_format, {**options}
        if size[0] * size[1] <= _SINGLE_THREAD_PIXELS:
            stream.codec_context.thread_count = 1
        if pixel_format != "pal8":  # say how RGB became YUV, so that no player has to guess
            stream.codec_context.colorspace = Colorspace.SMPTE170M
            stream.codec_context.color_range = ColorRange.MPEG
        for index, picture in enumerate(pictures):
            picture.pts, picture.time_base = index, 1 / rate
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return buffer.getvalue()
