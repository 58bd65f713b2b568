"""Stages: runs one after the other, each on the export of the one before.

``python train.py experiment=flywheel`` improves a base by RL, then distils what came out; every derived card records
its parents, so the last one knows the whole way. A stage is a run like any other, in a folder of its own; one that is
complete is not run again, so ``resume=auto`` goes on where a killed flywheel stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from cards.errors import UserError
from fastvideo_train import rundir

STAGES_FILE = "stages.json"
OWN_KEYS = ("experiment", "stages", "run", "resume", "overwrite")
"""Overrides of the whole that a stage does not get as they are."""
STAGE_KEYS = {"name", "overrides"}
Stage = Callable[[DictConfig, Path], None]


def run_stages(cfg: DictConfig, run_dir: Path, *, check: Stage, run: Stage) -> None:
    """Runs the stages of ``cfg.stages``.

    Args:
        check: raises ``UserError`` for a composed config that cannot run in its folder.
        run: runs one to its end there.
    """
    stages = check_stages(cfg)
    rundir.check_free(run_dir, resume=cfg.resume not in (None, False), overwrite=cfg.overwrite)
    configs = [_compose(cfg, stage, run_dir, number) for number, stage in enumerate(stages, 1)]
    folders = [Path(config.outputs) / str(config.run) for config in configs]
    for folder, config in zip(folders, configs, strict=True):
        rundir.check_free(folder, resume=cfg.resume not in (None, False), overwrite=cfg.overwrite)
        # On the first stage's card, whatever its folder holds: a mistake in the last stage is not found after hours.
        check(OmegaConf.merge(config, {"resume": False, "overwrite": True}), folder)  # type: ignore[arg-type]
    for folder in (run_dir, *folders):
        rundir.prepare(folder, overwrite=cfg.overwrite)
    rundir.write_text(run_dir / rundir.CONFIG_FILE, OmegaConf.to_yaml(cfg))
    rows: list[dict[str, Any]] = []
    for number, (stage, config, folder) in enumerate(zip(stages, configs, folders, strict=True), 1):
        if rows:
            config.card.source = rows[-1]["export"]
        print(f"stage {number}/{len(stages)}  {stage['name']}  {folder}", flush=True)
        summary = _summary(folder)
        if summary is None:
            run(config, folder)
            summary = _summary(folder)
            if summary is None:
                raise RuntimeError(f"stage {stage['name']} left no {folder / rundir.SUMMARY_FILE}")
        rows.append({"stage": stage["name"], "run": str(folder), **_row(summary)})
        rundir.write_json(run_dir / STAGES_FILE, {"stages": rows})
    _print(rows)


def check_stages(cfg: DictConfig) -> list[dict[str, Any]]:
    """The stages as plain dicts; raises ``UserError`` that names every problem."""
    stages = OmegaConf.to_container(cfg.stages)
    problems = []
    if not isinstance(stages, list) or not stages:
        raise UserError(f"stages: got {stages!r}, expected a list of {{name, overrides}}")
    for number, stage in enumerate(stages, 1):
        if not isinstance(stage, dict) or set(stage) != STAGE_KEYS or not isinstance(stage["overrides"], list):
            problems.append(f"stage {number}: got {stage!r}, expected {{name: ..., overrides: [key=value, ...]}}")
        elif Path(str(stage["name"])).name != str(stage["name"]):
            problems.append(f"stage {number}: got the name {stage['name']!r}, expected a plain folder name")
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)]
    if len(set(names)) != len(names):
        problems.append(f"got stages of the names {names}, expected a name each")
    if problems:
        raise UserError("stages: " + "; ".join(problems))
    return stages


def _compose(cfg: DictConfig, stage: dict[str, Any], run_dir: Path, number: int) -> DictConfig:
    """A stage's config: what was asked for on the command line, then what the stage wants."""
    asked = [text for text in HydraConfig.get().overrides.task if _key(text) not in OWN_KEYS]
    own = [f"run={run_dir.name}-{number}-{stage['name']}", f"outputs={run_dir.parent}", "resume=auto"]
    return compose("train", overrides=[*asked, *map(str, stage["overrides"]), *own])


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _summary(folder: Path) -> dict[str, Any] | None:
    """What a complete run says of itself; None for one that is not."""
    path = folder / rundir.SUMMARY_FILE
    return json.loads(path.read_text()) if path.is_file() else None


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    keys = ("card", "card_digest", "parents", "method", "steps", "seconds", "export")
    return {
        **{key: summary[key] for key in keys},
        "before": summary["eval"]["before"],
        "after": summary["eval"]["after"],
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        shown = [
            f"{name} {row['before'][name]:.4f} -> {row['after'][name]:.4f}"
            for name in ("all_correct", "reward")
            if name in row["before"] and name in row["after"]
        ]
        print(f"{row['stage']:<12} {row['card_digest'][:12]}  {'  '.join(shown)}")
    print(f"export: {rows[-1]['export']}")
    print(f"lineage: python -m fastvideo_train.card lineage {rows[-1]['export']}")
