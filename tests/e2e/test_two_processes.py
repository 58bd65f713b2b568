"""Two processes with ddp and with fsdp2 give what one process gives on the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inference.engine import Engine
from inference.request import Request
from methods.ladder import ladder_of

LOSS_TOLERANCE = 1e-5
GREY_LEVEL = {"unirl": 5e-3}
"""Of a loss whose advantages are divided by a group's small std: with other rows in a forward a pixel may be off by a
grey level, and the reward with it."""
LATENT_TOLERANCE = 1e-4


def _latents(export: Path) -> torch.Tensor:
    engine = Engine()
    steps = None if ladder_of(engine.load(export).card) is not None else 4
    return engine.run(Request("a red circle", seed=5, steps=steps, output="latents")).latents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "steps"),
    [
        ("finetune", 6),
        ("diffusion_nft", 2),
        ("dmd2", 4),
        ("dmd2-gan", 3),
        ("self_forcing", 3),
        ("flow_grpo", 2),
        ("rft", 3),
        ("unirl", 2),
    ],
)
def test_ddp_and_fsdp2_equal_one_process(
    method: str, steps: int, runs: Any, wan_folder: Path, method_overrides: dict[str, tuple[str, ...]]
) -> None:
    common = (*method_overrides[method], f"card.source={wan_folder}", f"steps={steps}", "parity_every=1")
    runs.run(f"run={method}-single", *common)
    reference = runs.metrics(f"{method}-single")
    expected = _latents(runs.outputs / f"{method}-single" / "export")
    weights = Path("transformer") / "diffusion_pytorch_model.safetensors"
    start, end = load_file(wan_folder / weights), load_file(runs.outputs / f"{method}-single" / "export" / weights)
    assert max((start[k] - end[k]).abs().max().item() for k in start) > 1e-5, "nothing was trained"
    for plan in ("ddp", "fsdp2"):
        runs.run(f"run={method}-{plan}", *common, f"parallel={plan}", "devices=2")
        rows = runs.metrics(f"{method}-{plan}")
        assert len(rows) == len(reference) == steps
        gaps = [abs(float(a["train/loss"]) - float(b["train/loss"])) for a, b in zip(rows, reference, strict=True)]
        relative = max(gap / max(1.0, abs(float(row["train/loss"]))) for gap, row in zip(gaps, reference, strict=True))
        difference = (_latents(runs.outputs / f"{method}-{plan}" / "export") - expected).abs().max().item()
        print(f"{method} {plan}: largest loss difference {max(gaps):.2e}, latents {difference:.2e}")
        assert [row.get("train/exit_rung") for row in rows] == [row.get("train/exit_rung") for row in reference]
        assert relative <= GREY_LEVEL.get(method, LOSS_TOLERANCE)
        assert difference <= LATENT_TOLERANCE
