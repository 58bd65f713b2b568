"""Progress without a terminal is lines with rate and time left; with one, bars; on other ranks, nothing."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch.utils.data import DataLoader

from cards.errors import UserError
from fastvideo_train.callbacks.progress import Progress, clock


def to_file(**options: Any) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    return Progress(console=Console(file=file, width=120), **options), file


def test_lines_tell_rate_and_time_left() -> None:
    progress, file = to_file(every_seconds=0.0)
    with progress.phase("train", 200, done=100) as phase:  # a resumed run
        time.sleep(1.05)
        phase.advance(2, loss=0.41234567, reward=0.5)
        assert phase.eta() != "-"
    lines = file.getvalue().splitlines()
    assert lines[0] == "train  100/200  started"
    found = re.fullmatch(
        r"train  102/200  \(51 %\)  ([\d.]+) it/s  ETA (\d+):(\d\d)  loss 0\.4123  reward 0\.5", lines[1]
    )
    assert found is not None, lines
    rate = float(found[1])
    assert 0 < rate <= 2 / 1.05 + 0.05  # the hundred steps of the earlier process do not count
    left = 60 * int(found[2]) + int(found[3])
    assert left == pytest.approx(98 / rate, rel=0.1)
    assert re.fullmatch(r"train  102/200  done in \d:\d\d  [\d.]+ it/s  loss 0\.4123  reward 0\.5", lines[2])


def test_slow_steps_are_seconds_a_step() -> None:
    progress, file = to_file(every_seconds=0.0)
    with progress.phase("train", 4) as phase:
        assert (phase.rate(), phase.eta()) == ("-", "-")
        time.sleep(1.3)
        phase.advance(1)
    assert re.search(r"1/4  \(25 %\)  1\.\d s/it  ETA 0:0[3-9]", file.getvalue())


def test_lines_are_few() -> None:
    progress, file = to_file()
    with progress.phase("eval before", 1000, unit="clip") as phase:
        for _ in range(1000):
            phase.advance(1)
    assert len(file.getvalue().splitlines()) <= 3  # faster than a second: the start and the end
    assert "clip/s" in file.getvalue()


def test_phases_nest_and_a_broken_one_says_so() -> None:
    progress, file = to_file()
    with pytest.raises(RuntimeError), progress.phase("train", 10) as phase:
        phase.advance(3)
        progress.phase("eval step-000003", 5).__enter__()
        raise RuntimeError
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["train", "eval step-000003", "train"]
    assert all("stopped after" in line for line in lines[1:])


def test_bars_on_a_terminal_leave_one_line_a_phase() -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, force_terminal=True, width=120))
    with progress.phase("train", 4) as phase:
        phase.advance(2, loss=0.25)
        time.sleep(0.5)
        phase.advance(2, loss=0.125)
    text = file.getvalue()
    assert "━" in text and "ETA" in text and "2/4" in text
    left = text.rsplit("\x1b[2K", 1)[1]  # after the bar's last erasure; the cursor comes back
    assert re.fullmatch(r"\x1b\[\?25h\r?train  4/4  done in 0:0\d  [\d.]+ it/s  loss 0\.125\n", left)


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    progress, file = to_file(silent=True, every_seconds=0.0)
    with progress.phase("train", 2) as phase:
        phase.advance(1)
    progress.say("report: x")
    assert file.getvalue() == "" and capfd.readouterr().out == ""


def test_say_is_for_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    progress, file = to_file()
    progress.say("report: outputs/[x]/report.html")
    assert capfd.readouterr().out == "report: outputs/[x]/report.html\n" and file.getvalue() == ""


def test_an_unknown_style_lists_the_known() -> None:
    with pytest.raises(UserError, match="unknown progress style 'line'; expected one of: auto, bars, lines"):
        Progress(style="line")  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (750, "12:30"), (3723, "1:02:03")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


class Line(LightningModule):
    """y = w x, Lightning's way."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.fails_at = fails_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise RuntimeError("broken")
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(progress: Progress, module: Line, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[progress],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, DataLoader(torch.ones(12, 1), batch_size=2))


def test_as_a_lightning_callback() -> None:
    progress, file = to_file()
    fit(progress, Line(), max_epochs=2)
    lines = file.getvalue().splitlines()
    assert lines[0] == "train  0/12  started"
    assert re.fullmatch(r"train  12/12  done in .* it/s  loss [\d.e-]+", lines[-1])


def test_as_a_lightning_callback_with_a_number_of_steps_and_an_error() -> None:
    progress, file = to_file()
    with pytest.raises(RuntimeError, match="broken"):
        fit(progress, Line(fails_at=3), max_steps=5, max_epochs=-1)
    lines = file.getvalue().splitlines()
    assert lines[0] == "train  0/5  started" and lines[-1].startswith("train  3/5  stopped after")
