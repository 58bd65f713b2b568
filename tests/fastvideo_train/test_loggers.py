"""metrics.csv is exact through kills and resumes; W&B never asks, never speaks, and stays in the run's folder."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cards.errors import UserError
from fastvideo_train.logging.metrics_csv import TIME_PREFIX, MetricsCSV, read_metrics
from fastvideo_train.logging.wandb_logger import logged_in, make_tracker, resolve_mode
from fastvideo_train.paths import conf_dir

# ------------------------------------------------------------------------------------------------------- metrics.csv


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.floats())
def test_a_float_comes_back_bit_for_bit(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.csv"
    path.unlink(missing_ok=True)
    MetricsCSV(path).log(1, {"x": value})
    back = read_metrics(path)[0]["x"]
    assert (math.isnan(value) and math.isnan(back)) or np.float64(back).tobytes() == np.float64(value).tobytes()


def test_text_of_a_file(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log(1, {"train/loss": torch.tensor(0.1), "a, b": 1})
    log.log(2, {"train/loss": 1e-7, "late": math.inf})
    log.log(3, {"a, b": 0.1})
    assert log.path.read_text() == ('step,train/loss,"a, b",late\n1,0.10000000149011612,1.0,\n2,1e-07,,inf\n3,,0.1,\n')
    assert log.rows()[2] == {"step": 3, "a, b": 0.1}  # what was not logged is left out


def test_a_second_call_for_a_step_adds_to_its_row(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log(1, {"a": 1.0})
    log.log(1, {"b": 2.0})
    log.log(2, {"a": 3.0, "b": 4.0})
    log.log(2, {"a": 5.0})
    assert log.rows() == [{"step": 1, "a": 1.0, "b": 2.0}, {"step": 2, "a": 5.0, "b": 4.0}]


def test_steps_only_go_forward(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log(5, {"a": 1.0})
    with pytest.raises(ValueError, match=r"step 4 after step 5; truncate_after\(4\) first"):
        log.log(4, {"a": 1.0})
    with pytest.raises(ValueError, match="'step' is the first argument"):
        log.log(6, {"step": 1.0})


def training(path: Path, first: int, last: int) -> None:
    """Steps of a run whose numbers depend on the step alone, columns coming and going."""
    log = MetricsCSV(path)
    log.truncate_after(first - 1)
    for step in range(first, last + 1):
        row = {"train/loss": math.sin(step) / 3}
        if step % 7 == 0:
            row["parity/c2"] = step / 7
        if step >= 15:
            row |= {"late/b": step / 3, "late/a": 1.0}
        log.log(step, row)


@pytest.mark.parametrize("killed_at", [3, 7, 14, 15, 19])
@pytest.mark.parametrize("tail", ["", "20", "20,", "20,0.1", "20,0.123,,4.0,1"])
def test_resumed_text_is_the_uninterrupted_text(tmp_path: Path, killed_at: int, tail: str) -> None:
    whole, killed = tmp_path / "whole.csv", tmp_path / "killed.csv"
    training(whole, 1, 20)
    training(killed, 1, killed_at)
    with killed.open("a") as file:
        file.write(tail)  # cut short
    assert [row["step"] for row in read_metrics(killed)] == list(range(1, killed_at + 1))
    training(killed, max(1, killed_at - 2), 20)  # from the last checkpoint
    assert killed.read_bytes() == whole.read_bytes()


def test_truncation_drops_rows_and_columns_that_only_they_had(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    training(path, 1, 16)
    log = MetricsCSV(path)
    log.truncate_after(10)
    assert path.read_text().splitlines()[0] == "step,train/loss,parity/c2"
    assert log.rows()[-1]["step"] == 10
    log.truncate_after(0)
    assert path.read_text() == "step\n"
    log.log(1, {"b": 1.0})
    assert path.read_text() == "step,b\n1,1.0\n"


def test_rows_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    code = (
        "import sys, itertools; from fastvideo_train.logging.metrics_csv import MetricsCSV\n"
        "log = MetricsCSV(sys.argv[1])\n"
        "for step in itertools.count(1):\n"
        "    log.log(step, {'a': step / 3, 'b': float(step)}); print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = 0
        while said < 50:
            said = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        said = max([said, *(int(line) for line in child.stdout.read().split("\n")[:-1])])
    rows = MetricsCSV(path).rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) in (said, said + 1)
    assert rows[said - 1]["a"] == said / 3


def test_a_file_that_is_not_ours_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for text, message in (
        ("epoch,loss\n1,2\n", "first column is 'epoch', expected 'step'"),
        ("step,a\n1,2,3\n", "line 2: 3 cells, expected 2"),
        ("step,a\n1,x\n", "line 2: could not convert"),
        ("step,a\n2,1.0\n2,1.0\n", "line 3: step 2 after step 2"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            MetricsCSV(path).log(5, {"a": 1.0})
        assert path.read_text() == text


def test_wall_clock_has_its_own_columns(tmp_path: Path) -> None:
    log = MetricsCSV(tmp_path / "metrics.csv")
    log.log(1, {"train/loss": 1.0, "time/step_seconds": 2.0})
    assert [name for name in log.rows()[0] if name.startswith(TIME_PREFIX)] == ["time/step_seconds"]


# --------------------------------------------------------------------------------------------------------------- W&B


@pytest.mark.parametrize(
    ("environ", "asked", "expected"),
    [
        ({}, "auto", "offline"),
        ({"WANDB_API_KEY": "k"}, "auto", "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "auto", "offline"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "auto", "disabled"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "dryrun"}, "auto", "offline"),
        ({"WANDB_MODE": "online"}, "auto", "offline"),  # nobody is logged in, and a prompt is never right
        ({"WANDB_API_KEY": "k"}, "offline", "offline"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "disabled"}, "online", "online"),
        ({}, "disabled", "disabled"),
    ],
)
def test_mode(tmp_path: Path, environ: dict[str, str], asked: str, expected: str) -> None:
    assert resolve_mode(asked, {"HOME": str(tmp_path), **environ}) == expected


def test_mode_that_cannot_be(tmp_path: Path) -> None:
    nobody = {"HOME": str(tmp_path)}
    with pytest.raises(UserError, match="got online, but W&B has no key here; run `wandb login`"):
        resolve_mode("online", nobody)
    with pytest.raises(UserError, match="unknown logger mode 'of'; expected one of: auto, disabled, offline, online"):
        resolve_mode("of", nobody)
    with pytest.raises(UserError, match="unknown WANDB_MODE 'sometimes'"):
        resolve_mode("auto", nobody | {"WANDB_MODE": "sometimes"})


def test_netrc_counts_as_logged_in(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert not logged_in(home)
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    netrc.chmod(0o600)
    assert logged_in(home)
    assert not logged_in(home | {"WANDB_BASE_URL": "https://wandb.example.org"})
    netrc.write_text("machine api.wandb.ai\n  login\n")  # broken
    assert not logged_in(home)


def test_every_logger_file_is_understood(tmp_path: Path) -> None:
    nodes = {path.stem: yaml.safe_load(path.read_text()) for path in (conf_dir() / "logger").glob("*.yaml")}
    assert set(nodes) == {"wandb", "csv", "none"}
    for name in ("csv", "none"):
        assert make_tracker(nodes[name], run_dir=tmp_path, config={}) is None
    assert make_tracker({**nodes["wandb"], "mode": "disabled"}, run_dir=tmp_path, config={}) is None
    with pytest.raises(UserError, match=r"unknown logger key 'projct'.*Did you mean 'project'"):
        make_tracker({**nodes["wandb"], "projct": "x"}, run_dir=tmp_path, config={})
    with pytest.raises(UserError, match="unknown logger kind 'tensorboard'"):
        make_tracker({"kind": "tensorboard"}, run_dir=tmp_path, config={})
    assert not any(tmp_path.iterdir())


_OFFLINE_RUN = """
import sys, time
from pathlib import Path
import numpy as np
from fastvideo_train.logging.samples import save_samples
from fastvideo_train.logging.wandb_logger import make_tracker
run = Path(sys.argv[1])
save_samples(run, "before", [np.zeros((5, 32, 32, 3), np.uint8)], ["a red circle"], [1], [{}], fps=8)
for first in (1, 3):  # the second as after a resume
    tracker = make_tracker({"kind": "wandb", "mode": "auto", "project": "p"}, run_dir=run, config={"seed": 1})
    assert tracker.mode == "offline"
    tracker.log_videos(0, "samples/before", [run / "samples/before/000.mp4"], ["a red circle"])
    for step in range(first, first + 3):
        tracker.log(step, {"train/loss": 1 / step})
    tracker.finish()
    time.sleep(1)  # W&B names a stretch by the second
"""


def test_an_offline_run_is_silent_and_whole(tmp_path: Path) -> None:
    """In a process of its own; read back from the record file that ``wandb sync`` would upload."""
    run = tmp_path / "run"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"NETRC": str(tmp_path / "none")}
    environ |= {f"WANDB_{kind}_DIR": str(tmp_path / f".{kind}") for kind in ("CONFIG", "CACHE", "DATA")}
    done = subprocess.run(
        [sys.executable, "-c", _OFFLINE_RUN, str(run)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # two stretches of one run
    assert list((run / "wandb").glob("offline-run-*/files/media/videos/samples/*.mp4"))
    for file, steps in zip(files, ((1, 2, 3), (3, 4, 5))):
        logged = [row for row in history(file) if "train/loss" in row]
        assert [(row["trainer/global_step"], row["train/loss"]) for row in logged] == [(s, 1 / s) for s in steps]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["run"]


def history(file: Path) -> list[dict[str, Any]]:
    """Logged rows of a W&B record file: a 7-byte head, then LevelDB's log format (32 KiB blocks of records, each with
    4 bytes of checksum, 2 of length and 1 of kind before it; kinds 1 to 4 are full, first, middle, last)."""
    from wandb.proto import wandb_internal_pb2

    content, at, rows, pending = file.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if room < 7 or kind == 0:
            at += room
            continue
        pending += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            pending = b""
            items = record.history.item
            rows.append({"/".join(i.nested_key) if i.nested_key else i.key: json.loads(i.value_json) for i in items})
    return rows
