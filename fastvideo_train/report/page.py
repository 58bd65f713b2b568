"""The page itself: its parts in order, and around them what makes it self-contained.

Leaves the top to ``overview``, the curves to ``curves``, the clips to ``gallery``, looks to page.css and what moves to
page.js. Everything that comes from the run is escaped; nothing on the page asks the network for anything.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastvideo_train.report.command import overrides
from fastvideo_train.report.curves import curves
from fastvideo_train.report.gallery import gallery, journey
from fastvideo_train.report.overview import comparison, header
from fastvideo_train.report.run_data import RunData, read_run
from fastvideo_train.report.words import section
from inference.media import write_bytes_atomic

REPORT_FILE = "report.html"
_NOT_LISTED = ("eval", "weight_change", "parents")  # of summary.json: shown elsewhere on the page


def write_page(run_dir: Path) -> Path:
    """Write ``<run_dir>/report.html`` and return its path."""
    path = run_dir / REPORT_FILE
    write_bytes_atomic(path, render(read_run(run_dir)).encode())
    return path


def render(run: RunData) -> str:
    """The whole page."""
    parts = (header(run), comparison(run), curves(run), gallery(run), journey(run), _commands(run), _details(run))
    asset = files("fastvideo_train.report")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; media-src data:; img-src data:\">"
        f"<title>{escape(run.name)} · {escape(run.method_title)} on {escape(run.card)}</title>"
        f'<link rel="icon" href="data:,"><style>{asset.joinpath("page.css").read_text()}</style></head>\n'
        f"<body><main>{''.join(parts)}</main>"
        f"<script>{asset.joinpath('page.js').read_text()}</script></body></html>\n"
    )


def _commands(run: RunData) -> str:
    folder = _folder(run.run_dir)
    command = f"python train.py {shlex.join(overrides(run.config))}"
    commands = [("Run it again", command)] if run.config else []
    if run.finished:
        export = shlex.quote(_folder(Path(str(run.summary.get("export", run.run_dir / "export")))))
        pairs = run.clips()
        prompt = shlex.quote(f"prompt={pairs[0].prompt if pairs else 'a red circle moves left'}")
        commands += [
            ("Serve the trained model", f"python -m fastvideo_train.serve ckpt={export} port=8000"),
            ("Generate one video", f"python -m fastvideo_train.generate ckpt={export} {prompt} seed=1 out=video.mp4"),
        ]
    elif run.config:
        commands.append(("Continue it", f"{command} run={shlex.quote(run.name)} resume=auto"))
    commands.append(("Write this page again", f"python -m fastvideo_train.report {shlex.quote(folder)}"))
    body = "".join(
        f'<div class="command"><span>{escape(label)}</span><code>{escape(text)}</code>'
        '<button class="copy">copy</button></div>'
        for label, text in commands
    )
    return section("Commands", body)


def _folder(path: Path) -> str:
    """Relative to the working directory where that is shorter to say."""
    here = Path.cwd()
    resolved = path.resolve()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)


def _details(run: RunData) -> str:
    flat = _flat({key: value for key, value in run.summary.items() if key not in _NOT_LISTED})
    parents = run.summary.get("parents", [])
    flat += [("parents", ", ".join(str(parent) for parent in parents))] if parents else []
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in flat)
    body = f"<details><summary>Summary</summary><table>{rows}</table></details>" if rows else ""
    if run.config_text:
        body += f"<details><summary>Configuration</summary><pre>{escape(run.config_text)}</pre></details>"
    return section("Details", body)


def _flat(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in node.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            rows.append((f"{prefix}{key}", json.dumps(value)))
        else:
            rows.append((f"{prefix}{key}", "none" if value is None else str(value)))
    return rows
