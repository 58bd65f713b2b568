"""Words and numbers as the page writes them, shared by its parts."""

from __future__ import annotations

import math
from html import escape

TITLES = {
    "all_correct": "All correct",
    "reward": "Reward",
    "learned_reward": "Learned reward",
    "val_loss": "Validation loss",
    "val_loss_q1": "Validation loss, least noise",
    "val_loss_q2": "Validation loss, second quarter",
    "val_loss_q3": "Validation loss, third quarter",
    "val_loss_q4": "Validation loss, most noise",
    "score": "Score",
    "valid": "Valid clip",
    "colour": "Colour",
    "shape": "Shape",
    "motion": "Motion",
    "two_objects": "Two objects",
    "position": "Position",
    "count": "Count",
    "refine/meaning": "Rewrites that keep the meaning",
    "refine/format": "Rewrites that are well formed",
}


def metric_title(name: str) -> str:
    """An evaluated metric's name in words."""
    return TITLES.get(name, name.replace("_", " "))


def section(heading: str, body: str, aside: str = "") -> str:
    """A part of the page; "" without a body."""
    if not body:
        return ""
    return f'<section><div class="head"><h2>{escape(heading)}</h2>{aside}</div>{body}</section>'


def three(value: float | None) -> str:
    """Three decimals; a dash for what is not known."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def delta(name: str, before: float | None, after: float | None) -> str:
    """The change, marked as good or bad; a loss is better when lower."""
    if before is None or after is None:
        return ""
    gain = after - before
    better = -gain if "loss" in name else gain
    tone = "good" if better > 0 else "bad" if better < 0 else "same"
    return f'<span class="delta {tone}">{gain:+.3f}</span>'


def duration(seconds: float) -> str:
    """``48 s``, ``12 min`` or ``1 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
