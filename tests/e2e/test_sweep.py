"""Hydra multirun, and every config that the project ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from fastvideo_train.paths import conf_dir

GROUPS = sorted(
    (group.name, choice.stem) for group in conf_dir().iterdir() if group.is_dir() for choice in group.glob("*.yaml")
)


@pytest.mark.parametrize(("group", "choice"), GROUPS)
def test_every_yaml_composes(group: str, choice: str) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("train", overrides=[f"{group}={choice}"])
    assert cfg.method._target_ and cfg.card.name


@pytest.mark.slow
def test_multirun_over_methods_and_seeds(runs: Any, wan_folder: Path) -> None:
    output = runs.run(
        "-m",
        "method=finetune,diffusion_nft",
        "seed=1,2",
        "run=sweep",
        "steps=1",
        "batch_size=2",
        "data.clips=8",
        "prompts=shapeworld",
        "eval.prompts=none",
        "reward=callable",
        "reward.function=rewards_for_tests.redness",
        f"card.source={wan_folder}",
    )
    summaries = [json.loads(p.read_text()) for p in sorted(runs.outputs.glob("sweep-*/summary.json"))]
    assert sorted((s["method"], s["seed"]) for s in summaries) == [
        ("diffusion_nft", 1),
        ("diffusion_nft", 2),
        ("finetune", 1),
        ("finetune", 2),
    ], output[-2000:]
    assert len({s["card_digest"] for s in summaries}) == 4
