"""The progress bar of the data jobs: done of total, rate and time left, on stderr."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """Finished items a second, averaged over the whole job."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.elapsed
        return Text(f"{task.completed / seconds:.1f} {self.unit}/s" if seconds else "-", style="cyan")


def data_progress(unit: str = "clips") -> Progress:
    """A bar that redraws on a terminal and prints its last state only when stderr is a file."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        RateColumn(unit),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
