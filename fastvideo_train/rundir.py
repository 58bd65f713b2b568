"""The run directory: its name, who may write into it, and the small files that say what the run was.

``outputs/<run>/`` is never overwritten without ``overwrite=true`` and never continued without ``resume``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cards.errors import UserError

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
_MARK = (CONFIG_FILE, "checkpoints", SUMMARY_FILE, "metrics.csv")


def write_text(path: Path, text: str) -> None:
    """Writes a file in one rename."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(text)
    os.replace(aside, path)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(data, indent=2) + "\n")


def check_free(run_dir: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ``UserError`` when the folder has a run and neither ``resume`` nor ``overwrite`` was asked for."""
    if resume and overwrite:
        raise UserError("got resume and overwrite=true: one continues the run, the other deletes it; give one")
    if not run_dir.exists() or resume:
        return
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; choose another run=<name>")
    if not any(run_dir.iterdir()):
        return
    if not overwrite:
        raise UserError(
            f"{run_dir} exists. Use resume=auto to continue it, overwrite=true to delete it, or another run=<name>"
        )
    if not any((run_dir / name).exists() for name in _MARK):
        raise UserError(f"{run_dir} is not a run; overwrite=true deletes runs only. Choose another run=<name>")


def prepare(run_dir: Path, *, overwrite: bool) -> None:
    """Makes the folder, empty when overwriting."""
    if overwrite and run_dir.exists():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
