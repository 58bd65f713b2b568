"""Batches: the order is shuffled, complete, the same on any number of ranks, and continues exactly where it stopped."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch

from fastvideo_train.data.datamodule import VideoDataModule, split_by_content
from fastvideo_train.data.latent_cache import DataWarning, LatentRow
from fastvideo_train.data.sampler import GlobalBatchSampler
from fastvideo_train.data.video_folder import DataError
from inference.media import write_video


def pooled(video_BCTHW: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.avg_pool3d(video_BCTHW[:, :, ::4], (1, 4, 4))


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen clips; the caption of clip n is "clip n"."""
    folder = tmp_path_factory.mktemp("clips")
    lines = []
    for number in range(13):
        clip = np.random.default_rng(number).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
        write_video(folder / f"{number}.mp4", clip, 8.0, lossless_chroma=True)
        lines.append(json.dumps({"file_name": f"{number}.mp4", "caption": f"clip {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def make(clips: Path, **changes: Any) -> VideoDataModule:
    settings: dict[str, Any] = {
        "folder": clips,
        "cache_dir": clips / "cache",
        "num_frames": 5,
        "height": 16,
        "width": 16,
        "batch_size": 3,
        "seed": 7,
        "val_fraction": 0.3,
    }
    data = VideoDataModule(**{**settings, **changes})
    data.use_encoder(pooled, vae_digest="pooled")
    return data


def ready(clips: Path, **changes: Any) -> VideoDataModule:
    data = make(clips, **changes)
    data.check(temporal_factor=4, spatial_factor=4)
    data.prepare_data()
    data.setup()
    return data


def take(loader: Any, n: int) -> list[list[int]]:
    return [batch["index"].tolist() for batch in itertools.islice(loader, n)]


# ------------------------------------------------------------------------------------------------------------- order


def test_each_pass_shows_every_row_once_in_a_new_order() -> None:
    stream = list(itertools.chain(*itertools.islice(GlobalBatchSampler(rows=10, batch_size=4, seed=0), 10)))
    passes = [stream[10 * k : 10 * k + 10] for k in range(4)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 4
    other = list(itertools.chain(*itertools.islice(GlobalBatchSampler(rows=10, batch_size=4, seed=1), 10)))
    assert other != stream


@pytest.mark.parametrize("world_size, batch_size", [(2, 3), (3, 2), (6, 1)])
def test_ranks_together_are_the_single_process(world_size: int, batch_size: int) -> None:
    single = list(itertools.islice(GlobalBatchSampler(rows=11, batch_size=6, seed=5), 9))
    ranks = [
        itertools.islice(
            GlobalBatchSampler(rows=11, batch_size=batch_size, seed=5, rank=rank, world_size=world_size), 9
        )
        for rank in range(world_size)
    ]
    assert [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)] == single


def test_a_batch_may_be_larger_than_the_set() -> None:
    batch = next(iter(GlobalBatchSampler(rows=3, batch_size=7, seed=0)))
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]


# ----------------------------------------------------------------------------------------------------------- batches


def test_batches_hold_the_rows_they_name(clips: Path) -> None:
    data = ready(clips)
    by_index = {row.index: row for row in data.train_rows}
    for batch in itertools.islice(data.train_dataloader(), 4):
        assert batch["latents"].shape == (3, 3, 2, 4, 4) and batch["latents"].dtype == torch.float32
        assert batch["index"].dtype == torch.int64
        for latents, prompt, index in zip(batch["latents"], batch["prompt"], batch["index"].tolist(), strict=True):
            assert prompt == f"clip {index}" == by_index[index].caption
            video = np.random.default_rng(index).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
            expected = pooled(torch.from_numpy(video).permute(3, 0, 1, 2)[None].float() / 127.5 - 1)[0]
            torch.testing.assert_close(latents, expected, rtol=0, atol=0.05)  # the codec's rounding, averaged


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads, in loader workers
@pytest.mark.filterwarnings("ignore:.*worker:UserWarning")  # fewer cores than workers
def test_the_loader_continues_with_the_very_next_batch(clips: Path, num_workers: int) -> None:
    uninterrupted = take(ready(clips, num_workers=num_workers).train_dataloader(), 12)
    for stop in (1, 5):
        first = ready(clips, num_workers=num_workers)
        assert take(first.train_dataloader(), stop) == uninterrupted[:stop]
        saved = json.loads(json.dumps(first.state_dict(), default=str)) if num_workers == 0 else first.state_dict()
        second = make(clips, num_workers=num_workers)
        second.load_state_dict(saved)
        second.setup()
        assert take(second.train_dataloader(), 12 - stop) == uninterrupted[stop:]


def test_resuming_over_another_set_or_seed_is_an_error(clips: Path) -> None:
    first = ready(clips)
    take(first.train_dataloader(), 2)
    for changes, name in (({"seed": 8}, "data.seed was 7"), ({"val_fraction": 0.0}, "data.rows")):
        second = ready(clips, **changes)
        second.load_state_dict(first.state_dict())
        with pytest.raises(DataError, match=name):
            second.train_dataloader()


# ------------------------------------------------------------------------------------------------------------- split


def test_the_split_is_disjoint_complete_and_stable(clips: Path) -> None:
    data = ready(clips)
    train, val = ({row.key for row in rows} for rows in (data.train_rows, data.val_rows))
    assert train and val and not train & val and len(train | val) == 13
    fewer = [row for row in data.train_rows + data.val_rows if row.index not in (2, 5)]
    assert {row.key for row in split_by_content(fewer[::-1], 0.3)[1]} <= val
    seen = [index for batch in data.val_dataloader() for index in batch["index"].tolist()]
    assert seen == [row.index for row in data.val_rows]


def test_the_split_takes_about_the_asked_share_and_never_all() -> None:
    import hashlib

    rows = [
        LatentRow(index=n, file_name=str(n), caption="c", key=hashlib.sha256(str(n).encode()).hexdigest(), shard="s")
        for n in range(4000)
    ]
    assert len(split_by_content(rows, 0.25)[1]) == pytest.approx(1000, abs=90)  # 3.3 standard deviations
    assert [len(side) for side in split_by_content(rows[:2], 0.001)] == [1, 1]
    assert [len(side) for side in split_by_content(rows[:2], 0.999)] == [1, 1]
    assert [len(side) for side in split_by_content(rows, 0)] == [4000, 0]
    with pytest.raises(DataError, match="at least 2 different clips"):
        split_by_content(rows[:1], 0.1)
    with pytest.raises(DataError, match="expected a number in"):
        split_by_content(rows, 1.0)


def test_a_validation_folder_of_its_own(clips: Path, tmp_path: Path) -> None:
    write_video(tmp_path / "v.mp4", np.full((5, 16, 16, 3), 255, np.uint8), 8.0, lossless_chroma=True)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "v.mp4", "caption": "white"}')
    data = ready(clips, val_folder=tmp_path)
    assert len(data.train_rows) == 13
    (batch,) = list(data.val_dataloader())
    assert batch["prompt"] == ["white"]
    torch.testing.assert_close(batch["latents"], torch.ones_like(batch["latents"]), atol=0.02, rtol=0)
    assert ready(clips, val_fraction=0.0).val_dataloader() == []


# ------------------------------------------------------------------------------------------------------------- input


def test_mistakes_are_found_before_any_encoder_exists(clips: Path) -> None:
    with pytest.raises(DataError, match="use 5 or 9"):
        make(clips, num_frames=6).check(temporal_factor=4, spatial_factor=4)
    with pytest.raises(DataError, match="does not exist"):
        make(clips, folder=clips / "absent").check(temporal_factor=4, spatial_factor=4)
    with pytest.raises(DataError, match="batch_size: got 0"):
        make(clips, batch_size=0).check(temporal_factor=4, spatial_factor=4)
    with pytest.raises(DataError, match="no usable video"):
        make(clips, num_frames=9).check(temporal_factor=4, spatial_factor=4)


def test_skipped_files_are_listed_in_a_warning(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "ok.mp4").write_bytes((clips / "1.mp4").read_bytes())
    (tmp_path / "cut.mp4").write_bytes((clips / "2.mp4").read_bytes()[:700])
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "cut.mp4", "caption": "c"}\n{"file_name": "ok.mp4", "caption": "o"}'
    )
    data = make(tmp_path, val_fraction=0.0)
    with pytest.warns(DataWarning, match=r"1 video\(s\) skipped, 1 used") as caught:
        data.check(temporal_factor=4, spatial_factor=4)
    assert "cut.mp4" in str(caught[0].message) and "metadata.jsonl:1" in str(caught[0].message)


# --------------------------------------------------------------------------------------------------- under Lightning


class Recorder(lightning.LightningModule):
    """Trains one number and notes the rows of each step."""

    def __init__(self, save_at: int | None = None, path: Path | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.save_at, self.path = save_at, path
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch["index"].tolist())
        return self.weight * batch["latents"].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert batch["latents"].isfinite().all()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.save_at == len(self.seen):
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(model: Recorder, data: VideoDataModule, steps: int, **settings: Any) -> list[list[int]]:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"devices": 1, **settings},
    )
    trainer.fit(model, datamodule=data, ckpt_path=model.path if model.save_at is None else None)
    return model.seen


def test_a_lightning_run_resumes_mid_epoch_exactly(clips: Path, tmp_path: Path) -> None:
    path = tmp_path / "at4.ckpt"
    data = make(clips)
    whole = fit(Recorder(save_at=4, path=path), data, steps=9)
    assert len(whole) == 9
    resumed = fit(Recorder(path=path), make(clips), steps=9)
    assert resumed == whole[4:]


_TWO_RANKS = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_datamodule import Recorder, fit, make
model = Recorder(save_at=0)
data = make(Path({clips!r}), batch_size=3, cache_dir=Path({out!r}) / "cache")
seen = fit(model, data, steps=6, devices=2, strategy="ddp")
Path({out!r}, f"{{model.global_rank}}.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_ddp_processes_see_the_single_process_batches(clips: Path, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(_TWO_RANKS.format(tests=str(Path(__file__).parent), clips=str(clips), out=str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    single = take(ready(clips, batch_size=6).train_dataloader(), 6)
    assert [a + b for a, b in zip(*ranks, strict=True)] == single
