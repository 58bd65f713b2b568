"""Which curves the page shows: what the run is about first, everything else folded away."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastvideo_train.logging.metrics_csv import STEP, TIME_PREFIX
from fastvideo_train.report.charts import SMALL, Curve, chart
from fastvideo_train.report.run_data import RunData
from fastvideo_train.report.words import metric_title, section

MAIN_METRICS = {
    "train/loss": "Training loss",
    "train/reward": "Reward of training rollouts",
    "watch/score": "ShapeEval of training rollouts, held out",
}
_NO_CATEGORY = ("all_correct", "score", "valid")


def curves(run: RunData) -> str:
    """Loss, reward and the evaluated number as charts; every other column as small ones."""
    logged = _logged(run)
    main = [chart(MAIN_METRICS[name], [logged[name]], i) for i, name in enumerate(_main_metrics(logged))]
    evaluated = _evaluated(run)
    headline = run.headline
    if headline in evaluated and len(evaluated[headline].points) > 1:
        main.insert(0, chart(f"{metric_title(headline)}, evaluated", [evaluated[headline]], 1))
    categories = [name for name in logged if name.startswith("reward/") and name.split("/")[1] not in _NO_CATEGORY]
    if categories:
        lines = [Curve(metric_title(name.split("/", 1)[1]), logged[name].points) for name in categories]
        main.append(chart("Reward by category, training rollouts", lines))
    shown = {*_main_metrics(logged), *categories}
    rest = [name for name in logged if name not in shown and not name.startswith(TIME_PREFIX)]
    rest += [name for name in logged if name.startswith(TIME_PREFIX)]
    small = [chart(name, [logged[name]], 4, SMALL) for name in rest]
    small += [chart(f"eval/{name}", [curve], 1, SMALL) for name, curve in evaluated.items() if len(curve.points) > 2]
    body = f'<div class="charts">{"".join(main)}</div>' if any(main) else ""
    if any(small):
        body += f'<details><summary>All metrics</summary><div class="charts small">{"".join(small)}</div></details>'
    return section("Training", body)


def _main_metrics(logged: Mapping[str, Curve]) -> list[str]:
    return [name for name in MAIN_METRICS if name in logged]


def _logged(run: RunData) -> dict[str, Curve]:
    """Columns of metrics.csv with at least one finite number."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in run.metrics:
        for name, value in row.items():
            if name != STEP and math.isfinite(value):
                points.setdefault(name, []).append((row[STEP], value))
    return {name: Curve(name, values) for name, values in points.items()}


def _evaluated(run: RunData) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in run.evaluations:
        for name, value in row.metrics.items():
            if math.isfinite(value):
                points.setdefault(name, []).append((row.step, value))
    return {name: Curve(name, values, measured=True) for name, values in points.items()}
