"""What a run is doing, how fast, and when it will be done: bars on a terminal, now and then a line in a log file.

Knows phases (a name, a total, what is done, the newest numbers) and clocks. Knows nothing of training: a run opens a
phase and advances it, or hands ``Progress`` to a Lightning trainer as a callback. Ranks above 0 say nothing.
"""

from __future__ import annotations

import atexit
import math
import time
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from cards.errors import unknown_name

Style = Literal["auto", "bars", "lines"]
STYLES = ("auto", "bars", "lines")
SHOWN_METRICS = ("train/loss", "train/reward")  # of those that a module logs, when Lightning drives
_LEAST_SECONDS = 1.0  # between two lines of a phase, however fast it is


class Phase:
    """One stretch of work; use as a context manager. Made by ``Progress.phase``."""

    def __init__(self, owner: Progress, name: str, total: int | None, done: int, unit: str) -> None:
        self.name = name
        self.total = total  # None = not known
        self.done = done
        self.unit = unit
        self.stats: dict[str, float] = {}  # newest of each
        self.task: TaskID | None = None  # its bar, while there is one
        self._owner = owner
        self._start = done  # what a resumed run had behind it; not counted in the rate
        self._began = self._said_at = time.monotonic()
        self._said_done = done

    def __enter__(self) -> Phase:
        self._began = self._said_at = time.monotonic()
        self._owner._enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._owner._leave(self, finished=kind is None)

    def advance(self, n: int = 1, **stats: float) -> None:
        """``n`` more are done; ``stats`` replace those of the same name."""
        self.done += n
        self.stats |= {name: float(value) for name, value in stats.items()}
        self._owner._advanced(self)

    # What both displays show.

    @property
    def seconds(self) -> float:
        """Since the phase began, in this process."""
        return time.monotonic() - self._began

    def count(self) -> str:
        """``40/120``."""
        return str(self.done) if self.total is None else f"{self.done}/{self.total}"

    def rate(self) -> str:
        """Mean over the phase so far, ``2.1 it/s`` or ``3.4 s/it``; ``-`` before the first."""
        done, seconds = self.done - self._start, self.seconds
        if done <= 0 or seconds <= 0:
            return "-"
        speed = done / seconds
        return f"{speed:.1f} {self.unit}/s" if speed >= 1 else f"{1 / speed:.1f} s/{self.unit}"

    def eta(self) -> str:
        """Time left at that rate, ``1:05``; ``-`` when it cannot be told."""
        done = self.done - self._start
        if self.total is None or done <= 0:
            return "-"
        return clock(self.seconds / done * max(0, self.total - self.done))

    def numbers(self) -> str:
        """``loss 0.412  reward 0.56``."""
        return "  ".join(f"{name} {value:.4g}" for name, value in self.stats.items())

    def line(self) -> str:
        """All of it as one line."""
        share = f"({100 * self.done // self.total} %)" if self.total else ""
        parts = (self.name, self.count(), share, self.rate(), f"ETA {self.eta()}", self.numbers())
        return "  ".join(part for part in parts if part)

    def last_line(self, finished: bool) -> str:
        """What remains when the phase is over."""
        ending = f"done in {clock(self.seconds)}" if finished else f"stopped after {clock(self.seconds)}"
        parts = (self.name, self.count(), ending, self.rate(), self.numbers())
        return "  ".join(part for part in parts if part)

    def due(self, every_seconds: float, every_share: float) -> bool:
        """Whether a line is due, and if so, counts it as said."""
        now = time.monotonic()
        waited, moved = now - self._said_at, self.done - self._said_done
        enough = self.total is not None and moved >= every_share * self.total
        if waited < _LEAST_SECONDS or not (waited >= every_seconds or enough):
            return False
        self._said_at, self._said_done = now, self.done
        return True


class Progress(Callback):
    """Shows phases; phases may nest. On stderr, so that stdout stays for results.

    Args:
        silent: show nothing (ranks above 0 never show anything).
        style: ``bars`` (redrawn in place), ``lines`` (for files), ``auto`` = bars on a terminal, else lines.
        every_seconds: a line at least this often, while something advances.
        every_share: or whenever this share of the total is done, but not within a second of the last line.
        console: where to; None = stderr.
    """

    def __init__(
        self,
        *,
        silent: bool = False,
        style: Style = "auto",
        every_seconds: float = 10.0,
        every_share: float = 0.05,
        console: Console | None = None,
    ) -> None:
        if style not in STYLES:
            raise unknown_name("progress style", style, STYLES)
        self.silent = silent
        self.every_seconds = every_seconds
        self.every_share = every_share
        self.console = Console(stderr=True) if console is None else console
        self.bars = self.console.is_terminal if style == "auto" else style == "bars"
        self._open: list[Phase] = []
        self._fit: Phase | None = None  # the phase that Lightning drives
        self._live: Bars | None = None

    def phase(self, name: str, total: int | None, *, done: int = 0, unit: str = "it") -> Phase:
        """A phase of ``total`` units, ``done`` of them in an earlier process; ``with`` it."""
        return Phase(self, name, total, done, unit)

    def say(self, text: str) -> None:
        """One line on stdout, above the bars."""
        if not self._quiet:
            print(text, flush=True)

    def close(self) -> None:
        """Leave every open phase as stopped, and give the terminal back."""
        while self._open:
            self._leave(self._open[-1], finished=False)

    # -- phases

    @property
    def _quiet(self) -> bool:
        return self.silent or getattr(rank_zero_only, "rank", 0) > 0

    def _enter(self, phase: Phase) -> None:
        self._open.append(phase)
        if self._quiet:
            return
        if not self.bars:
            if len(self._open) == 1:
                self._print(f"{phase.name}  {phase.count()}  started")
            return
        if self._live is None:
            self._live = _bars(self.console)
            self._live.start()
            atexit.register(self._stop_live)
        phase.task = self._live.add_task(
            "  " * (len(self._open) - 1) + phase.name, total=phase.total, completed=phase.done, phase=phase
        )

    def _advanced(self, phase: Phase) -> None:
        if self._quiet:
            return
        if self._live is not None and phase.task is not None:
            self._live.update(phase.task, completed=phase.done)
        elif not self.bars and phase.due(self.every_seconds, self.every_share):
            self._print(phase.line())

    def _leave(self, phase: Phase, finished: bool) -> None:
        if phase not in self._open:
            return
        while self._open[-1] is not phase:  # one left open inside
            self._leave(self._open[-1], finished)
        self._open.pop()
        if self._quiet:
            return
        if self._live is not None and phase.task is not None:
            self._live.remove_task(phase.task)
            phase.task = None
        if not self._open:
            self._stop_live()
        self._print(phase.last_line(finished))

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._stop_live)

    # -- as a Lightning callback: training batches are the units. A run that opens its own phase is left to it.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.silent = self.silent or trainer.global_rank > 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._open:
            return
        batches = trainer.num_training_batches * (math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs)
        if trainer.max_steps > 0:
            batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1  # 0 in a fresh run
        self._fit = self.phase("train", None if math.isinf(batches) else int(batches), done=done)
        self._fit.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            known = trainer.callback_metrics
            self._fit.advance(1, **{name.split("/")[-1]: float(known[name]) for name in SHOWN_METRICS if name in known})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._fit is not None:
            self._fit.__exit__(None)
            self._fit = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.close()


class _PhaseColumn(ProgressColumn):
    """One of a phase's texts."""

    def __init__(self, text: Literal["count", "rate", "eta", "numbers"], style: str, prefix: str = "") -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self.text, self.style, self.prefix = text, style, prefix

    def render(self, task: Task) -> Text:
        return Text(self.prefix + getattr(task.fields["phase"], self.text)(), style=self.style)


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        _PhaseColumn("count", "bold"),
        _PhaseColumn("rate", "cyan"),
        _PhaseColumn("eta", "green", "ETA "),
        _PhaseColumn("numbers", "magenta"),
        console=console,
        refresh_per_second=5,
        transient=True,  # the phase's last line remains instead
    )


def clock(seconds: float) -> str:
    """``0:07``, ``12:30`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
