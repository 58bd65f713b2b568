"""The Makefile and the script behind `make demo`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str) -> str:
    result = subprocess.run(["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_make_alone_lists_every_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert make() == make("help")
    assert re.findall(r"^  make (\w+) +\w", make("help"), flags=re.MULTILINE) == phony.split()


def test_test_and_demo_start_from_a_pinned_install(tmp_path: Path) -> None:
    for target in ("test", "demo"):
        commands = make("--dry-run", target, f"VENV={tmp_path}").splitlines()
        installs = [index for index, line in enumerate(commands) if "pip install" in line]
        uses = [index for index, line in enumerate(commands) if "-m pytest" in line or "train.py" in line]
        assert len(installs) == 1 and uses and installs[0] < min(uses)
        assert "-c constraints.txt" in commands[installs[0]]


def write_run(run: Path, *, files: tuple[str, ...]) -> None:
    """A finished run's folder with the named files and a summary."""
    (run / "export").mkdir(parents=True)
    for name in files:
        (run / name).write_bytes(b"x")
    summary = {
        "card_digest": "0" * 64,
        "method": "diffusion_nft",
        "seed": 7,
        "steps": 120,
        "seconds": 630.0,
        "eval": {"before": {"all_correct": 0.25}, "after": {"all_correct": 0.625}},
        "weight_change": {"transformer": 0.01},
        "export": str(run / "export"),
    }
    (run / "summary.json").write_text(json.dumps(summary))


def summarise(run: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "demo_summary.py"
    return subprocess.run([sys.executable, str(script), str(run)], capture_output=True, text=True, timeout=60)


def test_the_demo_ends_with_the_reward_and_the_paths(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    write_run(run, files=("report.html", "demo.mp4"))
    result = summarise(run)
    assert result.returncode == 0, result.stderr
    assert "0.250 before -> 0.625 after (+0.375)" in result.stdout
    assert "seed 7: 120 steps in 10.5 min" in result.stdout
    for name in ("report.html", "export", "demo.mp4"):
        assert str(run / name) in result.stdout


def test_the_demo_fails_when_a_promised_file_is_missing(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    write_run(run, files=("report.html",))
    result = summarise(run)
    assert result.returncode == 1
    assert f"missing: {run / 'demo.mp4'}" in result.stderr


def test_the_demo_summary_of_a_folder_without_a_run_is_one_message(tmp_path: Path) -> None:
    result = summarise(tmp_path / "nothing")
    assert result.returncode == 2
    assert result.stderr.startswith("no ") and "Traceback" not in result.stderr
