"""The command line that repeats a run: what its configuration says differently from the menu in conf/.

Knows Hydra's override syntax and the repository's groups. A value that the menu computes (``${...}``) is left to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fastvideo_train.paths import conf_dir

GROUPS = ("method", "card", "parallel", "data", "prompts", "reward", "logger")
_ALWAYS = ("method", "card")
_NAMES = ("_target_", "name", "kind")  # what tells one choice of a group from another
_SHORT = ("steps", "batch_size", "lr")  # set in the method by the top-level key of the same name
_NOT_THE_RUN = ("run", "outputs", "resume", "overwrite", "seed")


def overrides(config: Mapping[str, Any]) -> list[str]:
    """The words after ``python train.py``; a group that is not in the menu keeps its defaults."""
    main = _read(conf_dir() / "train.yaml")
    chosen_by_default = {
        k: v for entry in main.get("defaults", []) if isinstance(entry, dict) for k, v in entry.items()
    }
    words, details = [], []
    for group in GROUPS:
        node = config.get(group)
        choice = _choice(group, node) if isinstance(node, Mapping) else None
        if choice is None or not isinstance(node, Mapping):
            continue
        if group in _ALWAYS or choice != chosen_by_default.get(group):
            words.append(f"{group}={choice}")
        defaults = _read(conf_dir() / group / f"{choice}.yaml")
        skipped = [key for key in _SHORT if group == "method" and config.get(key) is not None]
        details += _differences({k: v for k, v in node.items() if k not in skipped}, defaults, f"{group}.")
    if config.get("seed") is not None:
        words.append(f"seed={config['seed']}")
    plain = {key: value for key, value in config.items() if key not in (*GROUPS, *_NOT_THE_RUN)}
    return words + _differences(plain, main, "") + details


def _choice(group: str, node: Mapping[str, Any]) -> str | None:
    """The file of a group that a node came from."""
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        offered = _read(path)
        names = [key for key in _NAMES if key in offered]
        if names and all(offered[key] == node.get(key) for key in names[:1]):
            return path.stem
    return None


def _differences(node: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> list[str]:
    """``key=value`` for each value that is not the menu's; keys that the menu does not have are left out."""
    words = []
    for key, value in node.items():
        if key not in defaults or key in _NAMES:
            continue
        usual = defaults[key]
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            words += _differences(value, usual, f"{prefix}{key}.")
        elif not _same(value, usual) and not (isinstance(usual, str) and "${" in usual):
            words.append(f"{prefix}{key}={_written(value)}")
    return words


def _same(value: Any, usual: Any) -> bool:
    """Equal as YAML means it: PyYAML reads ``3e-4`` as text, OmegaConf as a number."""
    if isinstance(value, bool) or isinstance(usual, bool):
        return value is usual
    try:
        return float(value) == float(usual)
    except (TypeError, ValueError):
        return bool(value == usual)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./:@+-]+", value) else "'" + value.replace("'", "\\'") + "'"
    return json.dumps(value, separators=(",", ":")).replace('"', "")


def _read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    return content if isinstance(content, dict) else {}
