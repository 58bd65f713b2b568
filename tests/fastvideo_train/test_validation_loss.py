"""Validation loss by how much noise there is: quarters of the clips by their own fixed sigmas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastvideo_train.evaluation import EvalSettings, by_quantile, evaluate
from fastvideo_train.report import write_report
from fastvideo_train.rundir import write_json
from methods.finetune import Finetune
from methods.roles import STUDENT

CLIPS = 10


def batches() -> list[dict[str, Any]]:
    """Ten clips in batches of six and four, their rows in no order."""
    latents = torch.randn(CLIPS, 4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([7, 3, 9, 1, 0, 2, 8, 4, 6, 5])
    cuts = (slice(0, 6), slice(6, CLIPS))
    return [{"latents": latents[cut], "prompt": ["a red circle"] * len(rows[cut]), "index": rows[cut]} for cut in cuts]


def test_quarters_are_means_of_the_clips_with_the_least_to_the_most_noise(training: Any) -> None:
    """Against every clip's own loss, evaluated alone, and its sigma as the network was told it."""
    method = Finetune(lr=1e-3, steps=1, batch_size=2, micro_batch=3, shift=5.0)
    module = training.module(method)
    found: list[dict[str, float]] = []
    alone: list[tuple[float, float]] = []

    def at_the_end() -> None:
        settings = EvalSettings((), None)
        found.append(evaluate(module, settings, batches(), lambda *_: None).metrics)
        told: list[float] = []
        context = module.context()
        hook = context.roles[STUDENT].register_forward_hook(
            lambda _, args, kwargs, out: told.append(kwargs["timestep"].item() / 1000), with_kwargs=True
        )
        for batch in batches():
            for x0, prompt, row in zip(batch["latents"], batch["prompt"], batch["index"].tolist(), strict=True):
                loss = method.losses(x0[None], [prompt], [(0, "validation", row)], context, training=False).item()
                alone.append((told[-1], loss))
        hook.remove()

    module.on_end = at_the_end
    training.fit(module, [{"latents": torch.randn(2, 4, 2, 4, 4), "prompt": ["a"] * 2}])
    losses = [loss for _, loss in sorted(alone)]
    groups = [losses[0:3], losses[3:6], losses[6:8], losses[8:10]]
    expected = {f"val_loss_q{i}": float(np.mean(group)) for i, group in enumerate(groups, start=1)}
    expected["val_loss"] = float(np.mean(losses))
    assert found[0] == pytest.approx(expected, rel=1e-5)


def test_fewer_clips_than_quarters_give_the_mean_alone() -> None:
    assert by_quantile("x", [1.0, 2.0, 3.0], [0.1, 0.2, 0.3]) == {}
    assert by_quantile("x", [4.0, 3.0, 2.0, 1.0], [0.4, 0.3, 0.2, 0.1]) == {
        "x_q1": 1.0,
        "x_q2": 2.0,
        "x_q3": 3.0,
        "x_q4": 4.0,
    }


def test_the_report_shows_the_quarters_in_words(tmp_path: Path) -> None:
    names = ("val_loss", "val_loss_q1", "val_loss_q2", "val_loss_q3", "val_loss_q4")
    before, after = ({name: base + i / 8 for i, name in enumerate(names)} for base in (1.0, 0.5))
    write_json(
        tmp_path / "summary.json", {"method": "finetune", "steps": 1, "eval": {"before": before, "after": after}}
    )
    page = Path(write_report(tmp_path)).read_text()
    for words in ("Validation loss, least noise", "Validation loss, most noise"):
        assert words in page
    assert page.index("least noise") < page.index("second quarter") < page.index("most noise")
    assert "1.125 → <b>0.625</b>" in page
