"""ParityAligner: where two runs of one component part ways for the first time.

For a component against its library twin, or against itself under other numerics: both run once with the same inputs
while the output of every submodule is kept; the report lists the differences in the order in which the first one ran.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from cards.errors import UserError
from inference.extend.activation_trace import ActivationTrace


@dataclass(frozen=True)
class Row:
    """One submodule's outputs, compared."""

    name: str
    call: int
    difference: float
    """Largest absolute difference; infinity where shapes differ or one side alone is not finite."""
    scale: float
    """Largest absolute value of the first run's."""


@dataclass(frozen=True)
class Alignment:
    """All submodules that both runs have, in the order of the first run."""

    rows: tuple[Row, ...]
    tolerance: float

    @property
    def first_divergence(self) -> Row | None:
        """The first row beyond the tolerance: what lies before it is equal, so its cause is there."""
        return next((row for row in self.rows if not row.difference <= self.tolerance), None)

    def report(self, around: int = 3) -> str:
        """A few lines around the first divergence."""
        first = self.first_divergence
        if first is None:
            worst = max((row.difference for row in self.rows), default=0.0)
            return f"{len(self.rows)} outputs agree within {self.tolerance:.1e}; largest difference {worst:.1e}"
        at = self.rows.index(first)
        lines = [f"first divergence: {first.name or 'the component itself'}, output {at + 1} of {len(self.rows)}"]
        for row in self.rows[max(0, at - around) : at + around + 1]:
            mark = ">" if row is first else " "
            lines.append(f"{mark} {row.name:<48} call {row.call}  difference {row.difference:.2e}  of {row.scale:.2e}")
        return "\n".join(lines)


def align(
    ours: nn.Module,
    run_ours: Callable[[], Any],
    theirs: nn.Module,
    run_theirs: Callable[[], Any],
    *,
    names: str | None = None,
    tolerance: float = 0.0,
) -> Alignment:
    """Runs both sides once and compares the submodules of equal names.

    Args:
        names: regular expression over dotted paths; None takes all.

    Raises:
        UserError: the two have no submodule output in common.
    """
    traces = []
    for module, run in ((ours, run_ours), (theirs, run_theirs)):
        trace = ActivationTrace(module, names, keep=True)
        with trace.recording():
            run()
        traces.append({(a.name, a.call): a for a in trace.activations})
    mine, others = traces
    common = [key for key in mine if key in others]
    if not common:
        raise UserError(
            f"nothing to compare: {len(mine)} and {len(others)} outputs were recorded and none has the same name; "
            "expected two modules of one structure"
        )
    rows = []
    for key in common:
        a, b = mine[key].value, others[key].value
        assert a is not None and b is not None
        if a.shape != b.shape:
            difference = float("inf")
        elif a.numel() == 0:
            difference = 0.0
        else:
            gap = (a.float() - b.float().to(a.device)).abs()
            both_nan = a.isnan() & b.to(a.device).isnan()
            difference = float(gap.masked_fill(both_nan, 0.0).nan_to_num(nan=float("inf")).max())
        rows.append(Row(key[0], key[1], difference, mine[key].largest))
    return Alignment(tuple(rows), tolerance)
