"""Curves as inline SVG, coloured by the page's CSS variables and read by its script on hover.

Knows numbers and geometry. Leaves which curves there are to the page. A noisy curve is drawn twice: faint as it is, and
strong as its exponential average. Long curves are drawn as means of equal stretches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.ticker import LogLocator, MaxNLocator

LARGE = (540, 220)  # width and height of the view box
SMALL = (300, 150)
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24  # margins
_MOST_POINTS = 300
_SMOOTH_FROM = 24  # points; shorter curves are drawn as they are
_LOG_FROM = 100.0  # largest over smallest value, all positive
COLOURS = 6  # --line-0 ... in page.css


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    name: str
    points: list[tuple[float, float]]  # (step, value), finite, by step
    measured: bool = False  # few exact values, each marked; else a noisy curve


def chart(title: str, curves: Sequence[Curve], first_colour: int = 0, size: tuple[int, int] = LARGE) -> str:
    """A figure with one chart; "" when no curve has a point."""
    drawn = [Curve(curve.name, _thinned(curve.points), curve.measured) for curve in curves if curve.points]
    if not drawn:
        return ""
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points]
    width, height = size
    x_axis = _Axis(min(xs), max(xs), _LEFT, width - _RIGHT)
    y_axis = _Axis(min(ys), max(ys), height - _BOTTOM, _TOP, logarithmic=min(ys) > 0 and max(ys) / min(ys) > _LOG_FROM)
    body = [_grid(x_axis, y_axis)]
    hover = []
    for i, curve in enumerate(drawn):
        colour = f"var(--line-{(first_colour + i) % COLOURS})"
        noisy = not curve.measured and len(curve.points) >= _SMOOTH_FROM
        strong = _smooth(curve.points) if noisy else curve.points
        if noisy and len(drawn) == 1:
            body.append(f'<path class="raw" d="{_path(curve.points, x_axis, y_axis)}" stroke="{colour}"/>')
        body.append(f'<path class="line" d="{_path(strong, x_axis, y_axis)}" stroke="{colour}"/>')
        if curve.measured or len(curve.points) == 1:
            body += [
                f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3.2" fill="{colour}"/>'
                for x, y in curve.points
            ]
        hover.append(
            {
                "name": curve.name,
                "colour": colour,
                "points": [
                    [x, number(y), round(x_axis.at(x), 1), round(y_axis.at(s), 1)]
                    for (x, y), (_, s) in zip(curve.points, strong)
                ],
            }
        )
    keys = "".join(
        f'<span class="key"><i style="background:{series["colour"]}"></i>{escape(str(series["name"]))}</span>'
        for series in hover
    )
    last = f'<span class="last">{hover[0]["points"][-1][1]}</span>' if len(drawn) == 1 else ""
    legend = f'<div class="keys">{keys}</div>' if len(drawn) > 1 else ""
    data = escape(json.dumps(hover, separators=(",", ":")))
    return (
        f'<figure class="chart" data-series="{data}"><figcaption>{escape(title)}{last}</figcaption>'
        f'<div class="plot"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)} over steps">'
        f"{''.join(body)}"
        f'<line class="cursor" y1="{_TOP}" y2="{height - _BOTTOM}"/></svg><div class="tip"></div></div>'
        f"{legend}</figure>"
    )


def number(value: float) -> str:
    """A value as people read it: ``0.412``, ``12500``, ``3.2e-05``."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:.5g}"
    return f"{value:.3g}"


class _Axis:
    """Maps values to view-box units, with ticks at round numbers."""

    def __init__(self, low: float, high: float, start: float, end: float, logarithmic: bool = False) -> None:
        self.log = logarithmic
        self.start, self.end = start, end
        constant = high <= low
        if constant:
            pad = abs(low) * 0.1 if low else 0.5
            low, high = (low, high) if logarithmic else (low - pad, high + pad)
        elif start > end and not logarithmic:  # a y axis: air above and below
            low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
        self.low, self.high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
        ticks = LogLocator(numticks=5).tick_values(low, high) if logarithmic else MaxNLocator(5).tick_values(low, high)
        self.ticks = [(low + high) / 2] if constant else [float(tick) for tick in ticks if low <= tick <= high]

    def at(self, value: float) -> float:
        share = ((math.log10(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    lines = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{x_axis.end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick:.4g}</text>')
    under = round(y_axis.start) + _BOTTOM - 7
    for tick in x_axis.ticks:
        if tick == int(tick):
            x = x_axis.at(tick)
            lines.append(f'<text class="tick" x="{x:.1f}" y="{under}" text-anchor="middle">{int(tick)}</text>')
    return "".join(lines)


def _path(points: Sequence[tuple[float, float]], x_axis: _Axis, y_axis: _Axis) -> str:
    return "M" + "L".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``_MOST_POINTS``: each the mean value of a stretch, at its last step."""
    each = -(-len(points) // _MOST_POINTS)
    if each <= 1:
        return points
    stretches = [points[i : i + each] for i in range(0, len(points), each)]
    return [(stretch[-1][0], sum(y for _, y in stretch) / len(stretch)) for stretch in stretches]


def _smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential average over about a tenth of the curve, unbiased at its start (Kingma & Ba 2015, section 3)."""
    keep = 1.0 - 1.0 / max(4.0, len(points) / 12)
    total = weight = 0.0
    result = []
    for x, y in points:
        total, weight = keep * total + (1 - keep) * y, keep * weight + (1 - keep)
        result.append((x, total / weight))
    return result
