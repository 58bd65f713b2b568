"""A run that is killed with SIGKILL and resumed equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastvideo_train.export import main as export_checkpoint

STEPS = 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["finetune", "diffusion_nft", "flow_grpo", "rft", "dmd2", "dmd2-gan", "self_forcing", "unirl", "workflow_rl"],
)
def test_resume_equals_the_uninterrupted_run(
    method: str,
    runs: Any,
    wan_folder: Path,
    method_overrides: dict[str, tuple[str, ...]],
    differences: Callable[[Any, Any], list[str]],
) -> None:
    common = (*method_overrides[method], f"card.source={wan_folder}", f"steps={STEPS}", "save_every=2", "seed=3")
    runs.run(f"run={method}-whole", *common)
    at = random.randrange(1, STEPS - 1)
    print(f"killed once {at} rows of metrics were written")
    runs.kill_at(f"{method}-killed", at, *common)
    assert not (runs.outputs / f"{method}-killed" / "summary.json").exists()
    runs.run(f"run={method}-killed", *common, "resume=auto")

    whole, resumed = runs.state(f"{method}-whole"), runs.state(f"{method}-killed")
    assert all(optimizer["state"] for optimizer in whole["optimizers"].values()), "the comparison would be empty"
    assert {"student", "ema"} <= set(whole["roles"])
    assert method not in ("diffusion_nft", "rft") or "old" in whole["roles"]
    assert method != "rft" or whole["data"]["hacking"]["steps"] == list(range(1, STEPS + 1))
    critic = "critic" in whole["roles"] and "teacher" not in whole["roles"]
    assert critic or method in ("finetune", "diffusion_nft", "flow_grpo", "rft", "unirl", "workflow_rl")
    exported = runs.outputs / f"{method}-whole" / "export-second" / "card.json"
    assert exported.is_file() == ("second" in whole["roles"]) == (method == "workflow_rl")
    assert method != "unirl" or {"llm", "llm_of_ema", "llm_of_reference"} <= set(whole["roles"])
    assert differences(whole, resumed) == []
    assert runs.metrics(f"{method}-whole") == runs.metrics(f"{method}-killed")
    assert [row["step"] for row in runs.metrics(f"{method}-killed")] == [str(i + 1) for i in range(STEPS)]
    if method == "workflow_rl":
        later = runs.outputs / "later"
        assert (
            export_checkpoint([f"ckpt={runs.outputs / f'{method}-killed' / 'checkpoints' / 'last'}", f"out={later}"])
            == 0
        )
        for name in ("", "-second"):
            first, again = (
                json.loads((folder / "card.json").read_text())["recipe"]["weights"]
                for folder in (runs.outputs / f"{method}-whole" / f"export{name}", later.with_name(f"later{name}"))
            )
            assert first == again


@pytest.mark.slow
def test_a_finished_run_is_neither_overwritten_nor_lost(
    runs: Any, wan_folder: Path, method_overrides: dict[str, tuple[str, ...]]
) -> None:
    common = (*method_overrides["finetune"], f"card.source={wan_folder}", "steps=2", "run=done")
    runs.run(*common)
    summary = (runs.outputs / "done" / "summary.json").read_bytes()
    process = runs.start(*common)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "resume=auto" in output and "overwrite=true" in output and "Traceback" not in output
    assert (runs.outputs / "done" / "summary.json").read_bytes() == summary

    process = runs.start(*common, "resume=auto", "seed=9")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "seed" in output
    process = runs.start(*method_overrides["diffusion_nft"], f"card.source={wan_folder}", "run=done", "resume=auto")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and "method: the checkpoint has finetune" in output
