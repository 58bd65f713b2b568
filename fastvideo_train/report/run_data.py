"""What a run's folder says about the run: read from its files, with every part optional.

Knows file names and what their keys mean. Knows nothing of HTML. A run that was killed has no summary.json and perhaps
no evaluation after training: what is missing is None or empty here, and the newest evaluation stands in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cards.errors import UserError
from fastvideo_train.logging.metrics_csv import Row, read_metrics
from fastvideo_train.logging.samples import Sample, phases, read_samples

HEADLINES = ("val_loss", "all_correct", "reward")  # the number that a run is about: the first that was evaluated
_FILES = ("config.yaml", "summary.json", "metrics.csv", "eval.jsonl")


@dataclass(frozen=True)
class Evaluation:
    """One line of eval.jsonl."""

    phase: str  # before, after, or step-000040
    step: int  # training steps behind it
    metrics: dict[str, float]


@dataclass(frozen=True)
class Clip:
    """One prompt and seed of the evaluation, as the model drew it before and later."""

    prompt: str
    seed: int
    before: Sample | None
    after: Sample | None


@dataclass(frozen=True)
class RunData:
    """A run as far as its folder tells."""

    run_dir: Path
    config_text: str  # config.yaml; "" = missing
    config: dict[str, Any]
    summary: dict[str, Any]  # empty until the run has finished
    metrics: list[Row]
    evaluations: list[Evaluation]  # oldest first
    samples: dict[str, list[Sample]]  # phase -> clips, in the order of the run

    @property
    def finished(self) -> bool:
        return bool(self.summary)

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def method(self) -> str:
        """As on the command line: ``diffusion_nft``."""
        target = str(self._config("method", "_target_", default=""))
        return str(self.summary.get("method", target.split(".")[-2] if target.count(".") else "unknown method"))

    @property
    def method_title(self) -> str:
        """As its class is written: ``DiffusionNFT``."""
        target = str(self._config("method", "_target_", default=""))
        return target.rsplit(".", 1)[-1] if target else self.method

    @property
    def card(self) -> str:
        return str(self.summary.get("card", self._config("card", "name", default="unknown card")))

    @property
    def steps_done(self) -> int:
        return int(self.summary.get("steps", self.metrics[-1]["step"] if self.metrics else 0))

    @property
    def steps_total(self) -> int | None:
        """What the configuration asks for; None = it does not say."""
        steps = self._config("method", "steps", default=self._config("steps", default=None))
        return int(steps) if isinstance(steps, int) else None

    @property
    def before(self) -> dict[str, float]:
        return self._evaluated("before")

    @property
    def after(self) -> dict[str, float]:
        """Of the finished model, else of the newest evaluation during training; empty when there is none."""
        later = [row.metrics for row in self.evaluations if row.phase != "before"]
        return self._evaluated("after") or (later[-1] if later else {})

    @property
    def after_label(self) -> str:
        """What ``after`` is: ``after``, or ``step 40`` of a run that has not finished."""
        later = [row for row in self.evaluations if row.phase != "before"]
        if self.finished or not later or later[-1].phase == "after":
            return "after"
        return f"step {later[-1].step}"

    @property
    def headline(self) -> str | None:
        """The metric that the run is about."""
        known = {**self.before, **self.after}
        return next((name for name in (*HEADLINES, *known) if name in known), None)

    def clips(self) -> list[Clip]:
        """The evaluation's clips, before beside the newest, in the order of the prompts."""
        later = [phase for phase in self.samples if phase != "before"]
        sides = (self.samples.get("before", []), self.samples[later[-1]] if later else [])
        before, after = ({(sample.prompt, sample.seed): sample for sample in side} for side in sides)
        return [Clip(*key, before.get(key), after.get(key)) for key in {**before, **after}]

    def _config(self, *keys: str, default: Any) -> Any:
        node: Any = self.config
        for key in keys:
            if not isinstance(node, Mapping) or node.get(key) is None:
                return default
            node = node[key]
        return node

    def _evaluated(self, phase: str) -> dict[str, float]:
        found = self.summary.get("eval", {}).get(phase)
        if found:
            return _numbers(found)
        return next((row.metrics for row in reversed(self.evaluations) if row.phase == phase), {})


def read_run(run_dir: Path) -> RunData:
    """Read a run's folder.

    Raises:
        UserError: not a run's folder, or a file in it that cannot be read.
    """
    if not any((run_dir / name).is_file() for name in _FILES):
        raise UserError(f"{run_dir} is not a run's folder: expected at least one of {', '.join(_FILES)} in it")
    text = _text(run_dir / "config.yaml")
    try:
        config = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{run_dir / 'config.yaml'}: not YAML ({error}); restore or delete it") from error
    summary_text = _text(run_dir / "summary.json")
    return RunData(
        run_dir=run_dir,
        config_text=text,
        config=config if isinstance(config, dict) else {},
        summary=_json(run_dir / "summary.json", summary_text) if summary_text else {},
        metrics=read_metrics(run_dir / "metrics.csv"),
        evaluations=_evaluations(run_dir / "eval.jsonl"),
        samples={phase: read_samples(run_dir, phase) for phase in phases(run_dir)},
    )


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); restore or delete it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: got {type(value).__name__}, expected a JSON object; restore or delete it")
    return value


def _evaluations(path: Path) -> list[Evaluation]:
    """Rows by step; a last line that a kill cut short is passed over."""
    whole = _text(path)
    rows = [_json(path, line) for line in whole[: whole.rfind("\n") + 1].splitlines() if line.strip()]
    known = [
        Evaluation(
            phase=str(row.get("phase", "")),
            step=int(row.get("step", 0)),
            metrics=_numbers({key: value for key, value in row.items() if key not in ("phase", "step")}),
        )
        for row in rows
    ]
    return sorted(known, key=lambda row: (row.step, row.phase != "before", row.phase == "after"))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
