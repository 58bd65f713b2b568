"""Profiler: where the seconds go, by component, operation, shape and rows."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from inference.extend.observer import Forward, Observer


@dataclass
class Tally:
    """Forwards of one kind."""

    forwards: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    """Seconds of the slowest one, usually the first."""


class Profiler(Observer):
    """Sums of all forwards since it was made, or since :meth:`clear`."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[Hashable, ...], Tally] = {}

    def on_forward(self, forward: Forward) -> None:
        key = (forward.component, forward.method, forward.shapes, forward.rows)
        tally = self.tallies.setdefault(key, Tally())
        tally.forwards += 1
        tally.seconds += forward.seconds
        tally.slowest = max(tally.slowest, forward.seconds)

    def clear(self) -> None:
        self.tallies.clear()

    def seconds(self, component: str | None = None) -> float:
        """Of one component, or of all."""
        return sum(t.seconds for key, t in self.tallies.items() if component is None or key[0] == component)

    def table(self) -> str:
        """Lines of text, the most expensive first."""
        lines = [f"{'component':<20} {'rows':>5} {'forwards':>9} {'seconds':>9} {'ms each':>9} {'share':>6}"]
        total = self.seconds()
        for key, t in sorted(self.tallies.items(), key=lambda item: -item[1].seconds):
            component, method, _, rows = key
            name = f"{component}.{method}"
            each, share = 1e3 * t.seconds / t.forwards, t.seconds / total if total else 0.0
            lines.append(f"{name:<20} {rows!s:>5} {t.forwards:>9} {t.seconds:>9.3f} {each:>9.2f} {share:>6.1%}")
        return "\n".join(lines)
