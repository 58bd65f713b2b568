"""The top of the page: what ran, its one number before and after, and every evaluated number side by side."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from fastvideo_train.report.charts import number
from fastvideo_train.report.run_data import RunData
from fastvideo_train.report.words import TITLES, delta, duration, metric_title, section, three

HACKING = "watch/hacking_since"
"""Column: the step at which a learned reward began to rise while ShapeEval fell, 0 where it does not."""


def header(run: RunData) -> str:
    """What ran, the number it is about, and the facts of the run."""
    state = "finished" if run.finished else "not finished"
    steps = f"{run.steps_done} of {run.steps_total}" if run.steps_total is not None else str(run.steps_done)
    facts: list[tuple[str, str]] = [("Steps", str(run.steps_done) if run.finished else steps)]
    summary = run.summary
    if "seconds" in summary:
        facts.append(("Time", duration(float(summary["seconds"]))))
    facts += [
        (label, str(value))
        for label, value in (
            ("Seed", summary.get("seed", run.config.get("seed"))),
            ("Plan", summary.get("plan")),
            ("Machine", summary.get("machine")),
        )
        if value is not None
    ]
    facts += [("Largest change", f"{part} {number(float(v))}") for part, v in summary.get("weight_change", {}).items()]
    since = next((row[HACKING] for row in run.metrics if row.get(HACKING, 0.0) > 0), None)
    if since is not None:
        facts.append(("Reward hacking", f"since step {since:.0f}"))
    if "card_digest" in summary:
        facts.append(("Card digest", str(summary["card_digest"])[:12]))
    listed = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in facts)
    return (
        f'<header><p class="crumb">{escape(run.name)}<span class="state {state.split()[0]}">{state}</span></p>'
        f"<h1>{escape(run.method_title)} <span>on</span> {escape(run.card)}</h1>{_hero(run)}"
        f'<dl class="facts">{listed}</dl></header>'
    )


def _hero(run: RunData) -> str:
    """The one number, before and after."""
    name = run.headline
    if name is None:
        return '<p class="hero-label">No evaluation yet.</p>'
    before, after = run.before.get(name), run.after.get(name)
    on = "the same validation clips" if name == "val_loss" else _prompts(run.config.get("eval"))
    about = f"{metric_title(name)}, on {on}, before and {run.after_label}"
    numbers = f'<b class="before">{three(before)}</b><i>→</i><b class="after">{three(after)}</b>'
    return f'<div class="hero">{numbers}{delta(name, before, after)}</div><p class="hero-label">{escape(about)}</p>'


def _prompts(settings: Any) -> str:
    count = settings.get("count") if isinstance(settings, Mapping) else None
    return f"the same {count} prompts and seeds" if isinstance(count, int) else "the same prompts and seeds"


def comparison(run: RunData) -> str:
    """Every evaluated number: bars for shares, plain numbers for the rest."""
    names = [name for name in TITLES if name in run.before or name in run.after]
    names += [name for name in {**run.before, **run.after} if name not in TITLES]
    if len(names) < 2:
        return ""
    rows = "".join(_compared(run, name) for name in names)
    key = (
        '<div class="keys"><span class="key"><i class="before"></i>before</span>'
        f'<span class="key"><i class="after"></i>{escape(run.after_label)}</span></div>'
    )
    return section("Before and after", f'<div class="rows">{rows}</div>', aside=key)


def _compared(run: RunData, name: str) -> str:
    before, after = run.before.get(name), run.after.get(name)
    shares = all(value is None or 0 <= value <= 1 for value in (before, after)) and "loss" not in name
    track = ""
    if shares:
        bars = "".join(
            f'<i class="{side}" style="width:{100 * value:.1f}%"></i>'
            for side, value in (("before", before), ("after", after))
            if value is not None
        )
        track = f'<span class="track">{bars}</span>'
    return (
        f'<div class="row"><span class="name">{escape(metric_title(name))}</span>{track or "<span></span>"}'
        f'<span class="values">{three(before)} → <b>{three(after)}</b></span>{delta(name, before, after)}</div>'
    )
