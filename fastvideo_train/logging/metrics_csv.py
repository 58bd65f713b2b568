"""metrics.csv: one row a training step, exact to the last bit and never with a step twice.

Knows text and steps; what a column means is its writer's business, except that a name under ``time/`` is wall clock
and so differs between two equal runs. Columns stand in the order in which they first appeared, a cell is Python's
``repr`` of the float (the shortest text that reads back as the same bits), and an empty cell was not logged. So the
file is a function of what was logged: a run that was killed and resumed leaves the same text as one that was not, the
``time/`` columns aside.

A row is handed to the operating system at once and thus survives ``kill -9``; a line cut short by one is dropped when
the file is next opened.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cards.errors import UserError
from inference.media import write_bytes_atomic

STEP = "step"
TIME_PREFIX = "time/"  # columns of seconds on the wall clock: not comparable between runs

Row = dict[str, float]  # column -> value; "step" is an int; what was not logged is left out


class MetricsCSV:
    """Appends rows to a csv file. Creating one touches nothing; the file is made by the first ``log``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] | None = None  # of the file, ``step`` excluded; None = not read yet
        self._last = -1  # step of the last row; -1 = none

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row; a second call for the newest step adds to its row.

        Args:
            step: at least that of the last row.
            metrics: anything that ``float`` takes. A new name becomes a new column, which rewrites the file once.

        Raises:
            ValueError: a step before the last row's (call ``truncate_after`` when a run resumes), or a bad name.
        """
        columns = self._open()
        values = {name: float(value) for name, value in metrics.items()}
        if STEP in values or "" in values:
            raise ValueError(f"got a metric named {STEP!r} or '', expected other names: {STEP!r} is the first argument")
        if step < max(self._last, 0):
            raise ValueError(f"{self.path}: got step {step} after step {self._last}; truncate_after({step}) first")
        if step == self._last or not self.path.exists() or any(name not in columns for name in values):
            kept = self.rows()
            if kept and kept[-1][STEP] == step:
                values = {**_metrics(kept.pop()), **values}
            self._rewrite([*kept, {STEP: step, **values}])
        else:
            with self.path.open("a", newline="") as file:
                file.write(_line([step, *(_cell(values, name) for name in columns)]))
        self._last = step

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, and columns that only they had. For a run that resumes from ``step``."""
        self._open()
        rows = self.rows()
        kept = [row for row in rows if row[STEP] <= step]
        if len(kept) < len(rows):
            self._rewrite(kept)
            self._last = int(kept[-1][STEP]) if kept else -1

    def rows(self) -> list[Row]:
        """All whole rows, oldest first. Reads only: a line that was cut short is passed over, not removed."""
        return read_metrics(self.path)

    def _open(self) -> list[str]:
        """Columns of the file; on the first call it is read, and a half-written last line removed."""
        if self._columns is None:
            self._columns = []
            if self.path.exists():
                rows = self.rows()
                self._columns = _columns(rows)
                self._last = int(rows[-1][STEP]) if rows else -1
                if self.path.read_bytes() != (text := _text(self._columns, rows)):
                    write_bytes_atomic(self.path, text)
        return self._columns

    def _rewrite(self, rows: Sequence[Row]) -> None:
        self._columns = _columns(rows)
        write_bytes_atomic(self.path, _text(self._columns, rows))


def read_metrics(path: str | Path) -> list[Row]:
    """Rows of a metrics file, oldest first; a missing file has none.

    Raises:
        UserError: the file is not one of ours: a column missing, a cell that is no number, steps out of order.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1]  # what follows the last line end was cut short
    lines = list(csv.reader(io.StringIO(whole)))
    if not lines:
        return []
    header = lines[0]
    rows: list[Row] = []
    if header[0] != STEP:
        raise UserError(f"{path}: first column is {header[0]!r}, expected {STEP!r}; move the file away or restore it")
    for number, cells in enumerate(lines[1:], start=2):
        try:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells, expected {len(header)}")
            row: Row = {STEP: int(cells[0])}
            row.update((name, float(cell)) for name, cell in zip(header[1:], cells[1:]) if cell)
            if rows and row[STEP] <= rows[-1][STEP]:
                raise ValueError(f"step {row[STEP]} after step {rows[-1][STEP]}")
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; remove the line, or restore the file") from error
        rows.append(row)
    return rows


def _metrics(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != STEP}


def _columns(rows: Iterable[Row]) -> list[str]:
    """Every name that a row has, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in _metrics(row)))


def _text(columns: Sequence[str], rows: Iterable[Row]) -> bytes:
    lines = [_line([STEP, *columns])]
    lines.extend(_line([int(row[STEP]), *(_cell(row, name) for name in columns)]) for row in rows)
    return "".join(lines).encode()


def _cell(values: Mapping[str, float], name: str) -> str:
    return repr(float(values[name])) if name in values else ""


def _line(cells: Sequence[object]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
