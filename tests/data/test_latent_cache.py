"""The latent cache: encoded once, survives a kill, notices damage. The encoder is average pooling, exact to check."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from fastvideo_train.data.latent_cache import (
    DataWarning,
    Encode,
    LatentIndex,
    LatentReader,
    build_latent_cache,
    cache_root,
    read_index,
)
from fastvideo_train.data.video_folder import DataError, Geometry, scan_folder
from inference.media import read_video, write_video

GEOMETRY = Geometry(num_frames=5, height=16, width=16)


def pooled(video_BCTHW: torch.Tensor) -> torch.Tensor:
    """Every fourth frame, 4x4 pixels averaged."""
    return torch.nn.functional.avg_pool3d(video_BCTHW[:, :, ::4], (1, 4, 4))


class Counted:
    """An encode function that remembers its batch sizes."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, video_BCTHW: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(video_BCTHW))
        return pooled(video_BCTHW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten different lossless clips, 5 frames of 16x16."""
    target = tmp_path / "videos"
    lines = []
    for number in range(10):
        clip = np.random.default_rng(number).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
        write_video(target / f"{number}.mp4", clip, 8.0, lossless_chroma=True)
        lines.append(json.dumps({"file_name": f"{number}.mp4", "caption": f"clip {number}"}))
    (target / "metadata.jsonl").write_text("\n".join(lines))
    return target


def build(folder: Path, encode: Encode, vae_digest: str = "vae") -> LatentIndex:
    return build_latent_cache(
        scan_folder(folder, GEOMETRY),
        cache_dir=folder.parent / "cache",
        vae_digest=vae_digest,
        geometry=GEOMETRY,
        encode=encode,
        batch_size=2,
        shard_clips=3,  # rounded up to 4: two whole batches
    )


def test_latents_are_the_encoders_own(folder: Path) -> None:
    index = build(folder, pooled)
    reader = LatentReader(index.root)
    assert [row.caption for row in index.rows] == [f"clip {n}" for n in range(10)]
    for row in index.rows:
        frames, _ = read_video(folder / row.file_name)
        video = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        torch.testing.assert_close(reader.read(row), pooled(video)[0], rtol=0, atol=1e-6)
    again = read_index(folder, cache_dir=folder.parent / "cache", vae_digest="vae", geometry=GEOMETRY)
    assert again == index


def test_the_second_build_encodes_nothing_and_edits_cost_only_what_changed(folder: Path) -> None:
    first = Counted()
    build(folder, first)
    assert first.batches == [2] * 5
    second = Counted()
    build(folder, second)
    assert second.batches == []
    metadata = folder / "metadata.jsonl"
    metadata.write_text(metadata.read_text().replace("clip 3", "a new caption"))
    clip = np.zeros((5, 16, 16, 3), np.uint8)
    write_video(folder / "7.mp4", clip, 8.0, lossless_chroma=True)
    third = Counted()
    index = build(folder, third)
    assert third.batches == [1]
    assert index.rows[3].caption == "a new caption"
    assert torch.all(LatentReader(index.root).read(index.rows[7]) == -1.0)


def test_a_log_file_hears_of_the_encoding_while_it_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastvideo_train.callbacks.progress._LEAST_SECONDS", 0.0)
    build(folder, pooled)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "encoding the data set  0/10  started"
    assert lines[5].startswith("encoding the data set  5/10  (50 %)") and "clip" in lines[5] and "ETA" in lines[5]
    assert lines[-1].startswith("encoding the data set  10/10  done in")


def test_another_vae_has_its_own_latents(folder: Path) -> None:
    build(folder, pooled)
    other = build(folder, lambda video: pooled(video) + 1, vae_digest="another")
    mine = read_index(folder, cache_dir=folder.parent / "cache", vae_digest="vae", geometry=GEOMETRY)
    difference = LatentReader(other.root).read(other.rows[0]) - LatentReader(mine.root).read(mine.rows[0])
    torch.testing.assert_close(difference, torch.ones_like(difference))


def test_copies_are_encoded_once(folder: Path) -> None:
    (folder / "copy.mp4").write_bytes((folder / "0.mp4").read_bytes())
    with (folder / "metadata.jsonl").open("a") as file:
        file.write('\n{"file_name": "copy.mp4", "caption": "the same"}\n')
    counted = Counted()
    index = build(folder, counted)
    assert sum(counted.batches) == 10
    assert len(index.rows) == 11 and index.rows[10].key == index.rows[0].key


def test_a_corrupt_shard_is_noticed_and_encoded_again(folder: Path) -> None:
    index = build(folder, pooled)
    reader = LatentReader(index.root)
    before = [reader.read(row).clone() for row in index.rows]
    del reader
    shard = index.root / index.rows[0].shard
    payload = bytearray(shard.read_bytes())
    payload[-3] ^= 0x40
    shard.unlink()
    shard.write_bytes(payload)
    counted = Counted()
    with pytest.warns(DataWarning, match=f"corrupt shard.*{shard.name}"):
        mended = build(folder, counted)
    assert counted.batches == [2, 2]  # one shard, no more
    reader = LatentReader(mended.root)
    assert all(torch.equal(reader.read(row), latents) for row, latents in zip(mended.rows, before, strict=True))


@pytest.mark.parametrize("damage", ["shard without sidecar", "sidecar without shard", "unreadable sidecar"])
def test_half_written_shards_do_not_count(folder: Path, damage: str) -> None:
    index = build(folder, pooled)
    shard = index.root / index.rows[9].shard
    sidecar = shard.with_suffix(".json")
    (index.root / ".shard-000009.safetensors.x.tmp").write_bytes(b"cut short")
    counted = Counted()
    if damage == "unreadable sidecar":
        sidecar.write_text('{"sha256": ')
        with pytest.warns(DataWarning):
            index = build(folder, counted)
    else:
        (sidecar if damage == "shard without sidecar" else shard).unlink()
        index = build(folder, counted)
    assert counted.batches == [2]
    assert len(LatentReader(index.root).read(index.rows[9])) == 3
    assert not list(index.root.glob(".*.tmp"))


_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_latent_cache import build, pooled
calls = 0
def encode(video):
    global calls
    calls += 1
    if calls == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return pooled(video)
build(Path({folder!r}), encode)
"""


def test_a_killed_build_resumes_with_the_same_batches(folder: Path) -> None:
    script = _KILLED.format(tests=str(Path(__file__).parent), folder=str(folder))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    root = cache_root(folder.parent / "cache", vae_digest="vae", geometry=GEOMETRY)
    assert len(list(root.glob("shard-*.safetensors"))) == 1  # two batches of the three that were encoded
    with pytest.raises(DataError, match="build the cache first"):
        read_index(folder, cache_dir=folder.parent / "cache", vae_digest="vae", geometry=GEOMETRY)
    counted = Counted()
    index = build(folder, counted)
    assert counted.batches == [2, 2, 2]
    assert len(index.rows) == 10


def test_two_processes_at_once_encode_once(folder: Path) -> None:
    """flock works between open files, so two threads stand for two ranks."""
    entered, release = threading.Event(), threading.Event()
    counted = Counted()

    def slow(video: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert release.wait(30)
        return counted(video)

    results: list[LatentIndex] = []
    first = threading.Thread(target=lambda: results.append(build(folder, slow)))
    first.start()
    assert entered.wait(30)
    second = threading.Thread(target=lambda: results.append(build(folder, counted)))
    second.start()
    second.join(0.3)
    assert second.is_alive()  # waits for the lock
    release.set()
    first.join(30)
    second.join(30)
    assert counted.batches == [2] * 5
    assert results[0] == results[1]


def test_damage_that_only_decoding_shows_is_listed(folder: Path) -> None:
    payload = bytearray((folder / "4.mp4").read_bytes())
    start = payload.index(b"mdat") + 900
    payload[start : start + 400] = bytes(400)
    (folder / "4.mp4").write_bytes(payload)
    scan = scan_folder(folder, GEOMETRY)
    assert len(scan.clips) == 10  # the container is whole
    index = build(folder, pooled)
    assert [item.file_name for item in index.skipped] == ["4.mp4"]
    assert [row.index for row in index.rows] == list(range(9))
    assert json.loads(index.report.read_text())["line"] == 5


def test_latents_that_are_not_finite_or_misshapen_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match="NaN or Inf for 2 of 2 clips"):
        build(folder, lambda video: pooled(video) * float("nan"))
    with pytest.raises(DataError, match="for 2 clips; expected"):
        build(folder, lambda video: pooled(video)[:1])


def test_the_wan_vae_encodes_through_the_same_door(folder: Path) -> None:
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ).eval()
    index = build(folder, lambda video: vae.encode(video).latent_dist.mode())
    latents = LatentReader(index.root).read(index.rows[0])
    assert latents.shape == (4, 2, 4, 4)
    frames, _ = read_video(folder / "0.mp4")
    video = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        torch.testing.assert_close(latents, vae.encode(video).latent_dist.mode()[0], rtol=1e-4, atol=1e-5)
