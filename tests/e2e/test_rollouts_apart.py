"""A whole run whose rollouts an engine process samples ahead, killed with SIGKILL and resumed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 6


def children(pid: int) -> list[int]:
    """Processes that a process started, and theirs."""
    try:
        own = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [found for child in map(int, own) for found in (child, *children(child))]


def gone(pids: list[int]) -> bool:
    """Whether none of them runs any more; a zombie does not."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
        except FileNotFoundError:
            continue
    return True


def wait_for(what: Callable[[], bool], seconds: float, process: Any = None) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process is None or process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_leaves_no_process_and_resumes_to_the_bit(
    runs: Any,
    wan_folder: Path,
    method_overrides: dict[str, tuple[str, ...]],
    differences: Callable[[Any, Any], list[str]],
) -> None:
    name = "ahead"
    common = (*method_overrides["diffusion_nft"], f"card.source={wan_folder}", f"steps={STEPS}", "save_every=1")
    common = (*common, "rollout=async", "seed=3")
    runs.run(f"run={name}-whole", *common)
    process = runs.start(f"run={name}", *common)
    metrics = runs.outputs / name / "metrics.csv"
    wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") >= 4, 300, process)
    started = children(process.pid)
    assert started, "the engine process does not run"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: gone(started), 60)
    assert not (runs.outputs / name / "summary.json").exists()
    runs.run(f"run={name}", *common, "resume=auto")
    assert "behaviour" in runs.state(name)["roles"]
    assert differences(runs.state(f"{name}-whole"), runs.state(name)) == []
    rows = runs.metrics(name)
    assert rows == runs.metrics(f"{name}-whole")
    assert [float(row["train/staleness"]) for row in rows] == [0.0] + [1.0] * (STEPS - 1)
