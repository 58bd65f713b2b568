"""ShapeWorld on disk: whole or absent, the same for the same seed, and still judged right after the mp4."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from cards.errors import UserError
from fastvideo_train.data.prompts import FilePrompts
from fastvideo_train.data.shapeworld_datamodule import ShapeWorldDataModule
from fastvideo_train.data.shapeworld_folder import ensure_shapeworld, main, write_shapeworld
from fastvideo_train.data.video_folder import Geometry, read_clip, scan_folder
from methods.shapeworld.heldout import training_allows
from methods.shapeworld.judge import judge

CONF = Path(__file__).parents[2] / "conf"
GEOMETRY = Geometry(num_frames=9, height=32, width=32)


def frames_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for clip in scan_folder(folder, GEOMETRY).clips:
        digest.update(read_clip(clip.row.path, GEOMETRY).tobytes())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_folder(tmp_path: Path) -> None:
    one, same, other = (
        write_shapeworld(tmp_path / name, n=6, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    metadata = [(folder / "metadata.jsonl").read_bytes() for folder in (one, same, other)]
    assert metadata[0] == metadata[1] != metadata[2]
    assert frames_digest(one) == frames_digest(same) != frames_digest(other)
    longer = write_shapeworld(tmp_path / "d", n=8, seed=1)
    assert (longer / "metadata.jsonl").read_bytes().startswith(metadata[0])


def test_clips_are_judged_right_after_the_mp4(tmp_path: Path) -> None:
    folder = write_shapeworld(tmp_path / "world", n=200, seed=0)
    scan = scan_folder(folder, GEOMETRY)
    assert len(scan.clips) == 200 and not scan.skipped
    verdicts = [judge(read_clip(clip.row.path, GEOMETRY), clip.row.caption) for clip in scan.clips]
    assert np.mean([verdict.all_correct for verdict in verdicts]) >= 0.99
    assert all(training_allows(clip.row.caption) for clip in scan.clips)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="exists already"):
        write_shapeworld(tmp_path / "mine", n=2, seed=0)
    with pytest.raises(UserError, match="got 0 clips"):
        write_shapeworld(tmp_path / "none", n=0, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_ensure_writes_once(tmp_path: Path) -> None:
    folder = ensure_shapeworld(tmp_path / "world", n=2, seed=0)
    before = (folder / "metadata.jsonl").stat().st_mtime_ns
    assert ensure_shapeworld(tmp_path / "world", n=2, seed=0) == folder
    assert (folder / "metadata.jsonl").stat().st_mtime_ns == before


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"out={tmp_path / 'world'}", "n=3", "seed=4"]) == 0
    assert len((tmp_path / "world" / "metadata.jsonl").read_text().splitlines()) == 3
    for arguments, words in (
        (["n=3"], "out=<folder> is missing"),
        ([f"out={tmp_path / 'x'}", "n=many"], "expected a whole number"),
        ([f"out={tmp_path / 'x'}", "sed=1"], "Did you mean 'seed'"),
        ([f"out={tmp_path / 'world'}"], "exists already"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_default_configuration_builds(tmp_path: Path) -> None:
    root = OmegaConf.create({"seed": 3, "batch_size": 2})
    root.data = OmegaConf.load(CONF / "data" / "shapeworld.yaml")
    root.data.update({"root": str(tmp_path), "cache_dir": str(tmp_path / "latents"), "clips": 4})
    data = instantiate(root.data)
    assert isinstance(data, ShapeWorldDataModule) and data.seed == 3
    data.check(temporal_factor=4, spatial_factor=4)
    assert len(scan_folder(tmp_path / "shapeworld-4-0", GEOMETRY).clips) == 4
    data.use_encoder(lambda video: video[:, :, ::4, ::4, ::4], vae_digest="every fourth")
    data.prepare_data()
    data.setup()
    assert next(iter(data.train_dataloader()))["latents"].shape == (2, 3, 3, 8, 8)


def test_the_other_configurations_build(tmp_path: Path) -> None:
    root = OmegaConf.create({"seed": 3, "batch_size": 2})
    root.data = OmegaConf.load(CONF / "data" / "video_folder.yaml")
    root.data.folder = str(tmp_path / "videos")
    assert instantiate(root.data).folder == tmp_path / "videos"
    (tmp_path / "prompts.txt").write_text("a\n")
    root.prompts = OmegaConf.load(CONF / "prompts" / "file.yaml")
    root.prompts.path = str(tmp_path / "prompts.txt")
    source = instantiate(root.prompts)
    assert isinstance(source, FilePrompts) and source.take(1)[0].text == "a"
    root.prompts = OmegaConf.load(CONF / "prompts" / "shapeworld.yaml")
    assert len(instantiate(root.prompts).take(3)) == 3
