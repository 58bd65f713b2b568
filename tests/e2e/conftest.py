"""Whole runs through the command line, on tiny random Wan folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_i2v import write_i2v_folder
from tests.support.tiny_unified import save_tiny_unified

REPO = Path(__file__).resolve().parents[2]


class TrainRuns:
    """Starts ``train.py`` in a folder of its own and reads what it leaves."""

    def __init__(self, outputs: Path, cache: Path):
        self.outputs = outputs
        self.cache = cache

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "FASTVIDEO_CACHE": str(self.cache),
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(REPO), str(REPO / "tests" / "support"))),
        }
        flags = [part for part in overrides if part.startswith("-")]
        keys = [part for part in overrides if not part.startswith("-")]
        command = [sys.executable, str(REPO / "train.py"), *flags, f"outputs={self.outputs}", "logger=none", *keys]
        return subprocess.Popen(
            command, env=environment, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def run(self, *overrides: str) -> str:
        """A run to its end; fails the test with its output when it does not exit with 0."""
        process = self.start(*overrides)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output[-4000:]
        return output

    def kill_at(self, run: str, step: int, *overrides: str) -> None:
        """Starts a run and kills it with SIGKILL once ``step`` rows of metrics are there."""
        process = self.start(f"run={run}", *overrides)
        metrics = self.outputs / run / "metrics.csv"
        deadline = time.monotonic() + 300
        while not metrics.is_file() or metrics.read_text().count("\n") < step + 1:
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline, "the run made no progress"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def state(self, run: str) -> dict[str, Any]:
        """The newest checkpoint's state."""
        return torch.load(self.outputs / run / "checkpoints" / "last" / "state.pt", weights_only=True)

    def metrics(self, run: str) -> list[dict[str, str]]:
        """Rows of metrics.csv as text, without the columns that tell time."""
        import csv

        with (self.outputs / run / "metrics.csv").open() as stream:
            return [
                {key: value for key, value in row.items() if not key.startswith("time/")}
                for row in csv.DictReader(stream)
            ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TrainRuns:
    return TrainRuns(tmp_path_factory.mktemp("outputs"), tmp_path_factory.mktemp("cache"))


def same(a: Any, b: Any, where: str = "") -> list[str]:
    """Places where two nested states differ, bit for bit."""
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict):
        if set(a) != set(b):
            return [f"{where}: keys"]
        return [place for key in a for place in same(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{where}: length"]
        return [place for i, (x, y) in enumerate(zip(a, b, strict=True)) for place in same(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


@pytest.fixture(scope="session")
def differences() -> Callable[[Any, Any], list[str]]:
    return same


NFT = (
    "method=diffusion_nft",
    "batch_size=2",
    "method.samples=3",
    "method.rollout_steps=4",
    "method.timesteps=2",
    "method.updates=2",
    "method.ema=0.9",
    "method.kl=1e-3",
    "reward=callable",
    "reward.function=rewards_for_tests.redness",
    "eval.count=2",
    "eval.steps=2",
)
FLOW_GRPO = (
    "method=flow_grpo",
    "batch_size=2",
    "method.samples=3",
    "method.rollout_steps=4",
    "method.window=[0,3]",
    "method.timesteps=2",
    "method.updates=2",
    "method.clip_range=0.1",
    "method.ema=0.9",
    "method.kl=1e-3",
    *NFT[-4:],
)
RFT = (
    "method=rft",
    "batch_size=2",
    "method.samples=3",
    "method.rollout_steps=4",
    "method.draws=2",
    "method.eta=0.5",
    "method.ema=0.9",
    "reward=callable",
    "reward.function=rewards_for_tests.redness",
    "reward.learned=true",
    "eval.count=2",
    "eval.steps=2",
)
FINETUNE = (
    "method=finetune",
    "batch_size=4",
    "data.clips=24",
    "eval.prompts=none",
    "method.warmup=2",
    "method.lr=1e-4",
)
DMD2 = (
    "method=dmd2",
    "batch_size=4",
    "method.ttur=2",
    "method.rungs=[1000,500]",
    "method.ema=0.9",
    "method.micro_batch=3",
    "eval.count=2",
    "eval.steps=2",
)
DMD2_GAN = (*DMD2, "method.gan={weight_g: 3e-3, weight_d: 1e-2}", "data.clips=24")
UNIRL = (
    "method=unirl",
    "card=unified",
    "batch_size=2",
    "method.samples=3",
    "method.num_skip_refinement=1",
    "method.max_tokens=8",
    "method.format=ended",
    "method.rollout_steps=4",
    "method.num_sde=2",
    "method.clip_range=0.1",
    "method.kl=1e-3",
    "method.ema=0.9",
    "method.lr=1e-3",
    "method.lm_lr=1e-3",
    *NFT[-4:],
)
WORKFLOW_RL = (
    "method=workflow_rl",
    "batch_size=2",
    "method.samples=3",
    "method.rollout_steps=3",
    "method.second_steps=2",
    "method.second_lr=1e-3",
    "method.timesteps=2",
    "method.updates=2",
    "method.clip_range=0.1",
    "method.ema=0.9",
    "method.kl=1e-3",
    "method.films=2",
    "reward=callable",
    "reward.function=rewards_for_tests.redness",
)
SELF_FORCING = (*DMD2[1:], "method=self_forcing", "card=wan_causal")


@pytest.fixture(scope="session")
def method_overrides(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """Small runs of the methods from ``wan_folder``."""
    refiner = tmp_path_factory.mktemp("refiner") / "unified"
    save_tiny_unified(wan_folder, refiner, initializer_range=0.1, tie_word_embeddings=True)
    clips = write_i2v_folder(tmp_path_factory.mktemp("i2v"))
    teacher = f"method.teacher={{name: wan21, size: tiny, source: {wan_folder}}}"
    return {
        "diffusion_nft": NFT,
        "flow_grpo": FLOW_GRPO,
        "rft": RFT,
        "finetune": FINETUNE,
        "dmd2": DMD2,
        "dmd2-gan": DMD2_GAN,
        "self_forcing": (*SELF_FORCING, teacher),
        "workflow_rl": (*WORKFLOW_RL, f"method.second.source={clips}"),
        "unirl": (*UNIRL, f"card.refiner={refiner}"),
    }
