"""Playing clips: pairs of before and after with what the judge says of each, and four prompts through the run."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from fastvideo_train.logging.samples import Sample
from fastvideo_train.report.clips import data_uri
from fastvideo_train.report.run_data import Clip, RunData
from fastvideo_train.report.words import metric_title, section, three

MOST_PAIRS = 32
VIDEO_BYTES = 2_000_000  # of all clips together, before base64 adds a third
_NO_CATEGORY = ("all_correct", "score", "reward", "valid")


def gallery(run: RunData) -> str:
    """Pairs of playing clips with what the judge says of each, and buttons that pick by what changed."""
    pairs = run.clips()[:MOST_PAIRS]
    sides = sum(side is not None for pair in pairs for side in (pair.before, pair.after))
    most = VIDEO_BYTES // max(1, sides + _journey_size(run))
    changes = [_change(pair) for pair in pairs]
    cards = "".join(_pair(pair, change, run.after_label, most) for pair, change in zip(pairs, changes))
    kinds = [(kind, changes.count(kind)) for kind in ("gained", "kept", "lost", "wrong") if kind in changes]
    words = {"gained": "now right", "kept": "right before and after", "lost": "now wrong", "wrong": "still wrong"}
    buttons = "".join(f'<button data-show="{kind}">{words[kind]} <b>{n}</b></button>' for kind, n in kinds)
    if len(kinds) > 1:
        buttons = f'<button data-show="" class="on">all <b>{len(pairs)}</b></button>{buttons}'
    aside = f'<div class="buttons">{buttons if len(kinds) > 1 else ""}<button class="pause">pause</button></div>'
    return section("Clips", f'<div class="pairs">{cards}</div>' if cards else "", aside=aside)


def _change(pair: Clip) -> str:
    """gained, kept, lost or wrong; "" when one side has no verdict."""
    marks = [None if side is None else side.verdict.get("all_correct") for side in (pair.before, pair.after)]
    if None in marks:
        return ""
    return {(False, True): "gained", (True, True): "kept", (True, False): "lost", (False, False): "wrong"}[
        (bool(marks[0]), bool(marks[1]))
    ]


def _pair(pair: Clip, change: str, after_label: str, most_bytes: int) -> str:
    sides = "".join(
        _side(sample, label, tone, most_bytes)
        for sample, label, tone in ((pair.before, "before", "before"), (pair.after, after_label, "after"))
    )
    return (
        f'<article class="pair" data-change="{change}"><p class="prompt">{escape(pair.prompt)}</p>'
        f'<div class="sides">{sides}</div></article>'
    )


def _side(sample: Sample | None, label: str, tone: str, most_bytes: int) -> str:
    if sample is None:
        return f'<div class="side"><div class="absent">not yet</div><p class="label {tone}">{escape(label)}</p></div>'
    return (
        f'<div class="side">{_video(sample, label, most_bytes)}'
        f'<p class="label {tone}">{escape(label)}{_mark(sample.verdict)}</p>{_wrong(sample.verdict)}</div>'
    )


def _video(sample: Sample, label: str, most_bytes: int) -> str:
    said = escape(f"{label}: {sample.prompt} (seed {sample.seed})")
    return (
        f'<video src="{data_uri(sample.path, most_bytes)}" muted autoplay loop playsinline '
        f'aria-label="{said}" title="{said}"></video>'
    )


def _mark(verdict: Mapping[str, Any]) -> str:
    """Right or wrong; without that, the reward."""
    right = verdict.get("all_correct")
    if right is None:
        reward = verdict.get("reward")
        return "" if reward is None else f'<span class="mark">{three(float(reward))}</span>'
    return '<span class="mark good">✓ correct</span>' if right else '<span class="mark bad">✗ wrong</span>'


def _wrong(verdict: Mapping[str, Any]) -> str:
    """The categories that are wrong; for an unclean clip, that, and why when the judge said so."""
    if verdict.get("all_correct") is None or verdict["all_correct"]:
        return ""
    if verdict.get("valid") is not None and not verdict["valid"]:
        return f'<p class="chips"><span>{escape(str(verdict.get("reason") or "not a clean clip"))}</span></p>'
    names = [name for name, value in verdict.items() if name not in _NO_CATEGORY and not isinstance(value, str)]
    chips = "".join(
        f"<span>{escape(metric_title(n).lower())}</span>" for n in names if verdict[n] is not None and not verdict[n]
    )
    return f'<p class="chips">{chips}</p>' if chips else ""


def _journey_phases(run: RunData) -> list[str]:
    """Up to six phases of the run, evenly spread, when there are more than before and after."""
    known = list(run.samples)
    if len(known) < 3:
        return []
    return [known[round(i * (len(known) - 1) / (min(6, len(known)) - 1))] for i in range(min(6, len(known)))]


def _journey_size(run: RunData) -> int:
    return 4 * len(_journey_phases(run))


def journey(run: RunData) -> str:
    """The first four prompts through the run."""
    chosen = _journey_phases(run)
    if not chosen:
        return ""
    pairs = run.clips()
    most = VIDEO_BYTES // (2 * min(MOST_PAIRS, len(pairs)) + _journey_size(run))
    rows = []
    for pair in pairs[:4]:
        found = [(p, s) for p in chosen for s in run.samples[p] if (s.prompt, s.seed) == (pair.prompt, pair.seed)]
        cells = "".join(
            f'<div class="side">{_video(sample, _phase_title(phase), most)}'
            f'<p class="label">{escape(_phase_title(phase))}{_mark(sample.verdict)}</p></div>'
            for phase, sample in found
        )
        rows.append(f'<p class="prompt">{escape(pair.prompt)}</p><div class="strip">{cells}</div>')
    return section(
        "Along the way", f"<details><summary>Four prompts during training</summary>{''.join(rows)}</details>"
    )


def _phase_title(phase: str) -> str:
    step = phase.removeprefix("step-")
    return f"step {int(step)}" if step.isdigit() else phase
