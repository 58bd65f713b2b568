"""Steerable clips on disk: their actions reach the batch, and the mp4 shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from cards.errors import UserError
from fastvideo_train.data.datamodule import VideoDataModule
from fastvideo_train.data.steer_datamodule import SteerDataModule
from fastvideo_train.data.video_folder import DataError, read_clip, read_metadata
from methods.shapeworld.steer import ACTIONS, judge_actions

CONF = Path(__file__).parents[2] / "conf"


def module_of(tmp_path: Path, **options: Any) -> VideoDataModule:
    settings: dict[str, Any] = {"root": str(tmp_path), "cache_dir": str(tmp_path / "latents"), "clips": 12}
    settings |= {"batch_size": 4, "seed": 0, "chunks": 4, **options}
    data: VideoDataModule = instantiate(OmegaConf.merge(OmegaConf.load(CONF / "data" / "steer.yaml"), settings))
    return data


def test_actions_reach_the_batch_and_the_pixels(tmp_path: Path) -> None:
    data = module_of(tmp_path)
    data.check(temporal_factor=4, spatial_factor=4)
    rows = read_metadata(data.folder)
    assert len(rows) == 12
    marks: list[bool] = []
    for row in rows:
        frames = read_clip(row.path, data.geometry)
        assert frames.shape == (13, 32, 32, 3)
        marks += judge_actions(frames, row.actions, row.caption.split()[-1])
    assert 0.5 < np.mean(marks) <= 1  # at the edge an action moves nothing
    data.use_encoder(lambda video: video[:, :1, ::4, ::8, ::8], vae_digest="test")
    data.prepare_data()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert [len(actions) for actions in batch["actions"]] == [4] * 4
    assert {name for actions in batch["actions"] for name in actions} <= set(ACTIONS)
    by_caption = {(row.caption, row.actions) for row in rows}
    assert {(p, a) for p, a in zip(batch["prompt"], batch["actions"], strict=True)} <= by_caption
    assert batch["latents"].shape[0] == 4


def test_a_folder_without_actions_gives_none(tmp_path: Path) -> None:
    data = module_of(tmp_path)
    data.check(temporal_factor=4, spatial_factor=4)
    lines = (data.folder / "metadata.jsonl").read_text().splitlines()
    bare = [json.dumps({k: v for k, v in json.loads(line).items() if k != "actions"}) for line in lines]
    (data.folder / "metadata.jsonl").write_text("\n".join(bare))
    data.check(temporal_factor=4, spatial_factor=4)
    data.use_encoder(lambda video: video[:, :1, ::4, ::8, ::8], vae_digest="test")
    data.prepare_data()
    data.setup()
    assert "actions" not in next(iter(data.train_dataloader()))
    (data.folder / "metadata.jsonl").write_text(json.dumps({**json.loads(lines[0]), "actions": "left"}))
    with pytest.raises(DataError, match="expected a list of names"):
        read_metadata(data.folder)


def test_sizes_that_make_no_clip_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"root": tmp_path, "clips": 2, "world_seed": 0, "cache_dir": tmp_path}
    with pytest.raises(UserError, match="chunks=1"):
        SteerDataModule(**settings, chunks=1, height=32, width=32, batch_size=1, seed=0)
