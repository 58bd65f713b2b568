"""Each mistake in the input ends within seconds in one message and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest


def _write_clip(path: Path) -> None:
    import numpy as np

    from inference.media import write_video

    write_video(path, np.full((9, 32, 32, 3), 128, dtype=np.uint8), 8)


def _broken_source(wan_folder: Path, tmp_path: Path, what: str) -> Path:
    folder = tmp_path / "source"
    shutil.copytree(wan_folder, folder)
    if what == "missing file":
        (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    else:
        config = json.loads((folder / "transformer" / "config.json").read_text())
        config["ffn_dim"] += 8
        (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


def _data_folder(tmp_path: Path, rows: list[str]) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    _write_clip(folder / "a.mp4")
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")
    return folder


GOOD = '{"file_name": "a.mp4", "caption": "a red circle"}'
CASES = {
    "method": (["method=nothing"], ["nothing", "diffusion_nft", "finetune"]),
    "card": (["card=nothing"], ["nothing", "wan21"]),
    "size": (["card.size=7b"], ["7b", "1.3b", "tiny"]),
    "key": (["method.mixx=1"], ["mixx", "mix"]),
    "top-level key": (["stepz=1"], ["stepz", "steps"]),
    "reward": (["reward=nothing"], ["nothing", "shape_eval"]),
    "reward key": (["+reward.nothing=1"], ["nothing"]),
    "plan": (["parallel=nothing"], ["nothing", "fsdp2"]),
    "devices": (["devices=2"], ["parallel=single", "ddp"]),
    "frames": (["method=finetune", "data.num_frames=10"], ["10", "4k+1", "9"]),
    "lr": (["lr=-1"], ["lr", "-1"]),
    "value": (["method.timesteps=11"], ["timesteps", "11", "rollout_steps"]),
    "rungs": (["method=dmd2", "method.rungs=[250,1000]"], ["ladder", "descending"]),
    "teacher": (["method=dmd2", "method.teacher={name: nothing, size: tiny}"], ["nothing", "wan21"]),
    "reward card": (["reward=tiny_clip", "reward.card.size=nothing"], ["nothing", "tiny"]),
    "judge": (["reward=vlm_judge", "reward.base_url=localhost", "reward.model=m"], ["base_url", "http(s)://"]),
    "rft": (["method=rft", "method.best=8", "method.keep=best"], ["best", "8", "samples - 1"]),
    "second": (["method=workflow_rl", "method.second={name: wan21, source: null}"], ["no first frame", "wan21_i2v"]),
    "several": (["method.mix=0", "method.decay=7", "eval.prompts=x"], ["mix", "decay", "eval.prompts"]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_wrong_names_and_values(case: str, runs: Any, wan_folder: Path) -> None:
    overrides, expected = CASES[case]
    _fails(runs, [f"card.source={wan_folder}", *overrides], expected)


@pytest.mark.parametrize(("what", "expected"), [("missing file", ["vae"]), ("shape", ["ffn.net", "expected"])])
def test_a_source_that_does_not_fit(
    what: str, expected: list[str], runs: Any, wan_folder: Path, tmp_path: Path
) -> None:
    _fails(runs, [f"card.source={_broken_source(wan_folder, tmp_path, what)}"], expected)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([GOOD, '{"file_name": "a.mp4"}'], ["caption", "2"]),
        ([GOOD, '{"file_name": "gone.mp4", "caption": "x"}'], ["gone.mp4", "2"]),
        (["not json"], ["metadata.jsonl", "1"]),
    ],
)
def test_bad_metadata(rows: list[str], expected: list[str], runs: Any, wan_folder: Path, tmp_path: Path) -> None:
    folder = _data_folder(tmp_path, rows)
    _fails(
        runs,
        ["method=finetune", "data=video_folder", f"data.folder={folder}", f"card.source={wan_folder}"],
        expected,
    )


def test_an_empty_prompt_file(runs: Any, wan_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n\n")
    _fails(runs, ["prompts=file", f"prompts.path={tmp_path / 'prompts.txt'}", f"card.source={wan_folder}"], ["empty"])


def _fails(runs: Any, overrides: list[str], expected: list[str]) -> None:
    began = time.monotonic()
    process = runs.start("run=bad", *overrides)
    output, _ = process.communicate(timeout=120)
    print(f"{time.monotonic() - began:.1f} s\n{output}")
    assert process.returncode == 2, output
    assert "Traceback" not in output
    assert all(word in output for word in expected), output
    assert not (runs.outputs / "bad").exists()
