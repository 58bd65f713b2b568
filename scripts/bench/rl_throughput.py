"""DiffusionNFT with rollouts in this process, in an engine process, and there a step ahead: samples a second, in turns.

    python scripts/bench/rl_throughput.py [rounds=3] [iterations=4] [prompts=4] [samples=4] [cores=<of the machine>]

Each side trains the bundled tiny card by itself: a turn is ``iterations`` whole training steps (rollouts, rewards,
updates), and a round is a turn of each, in changing order. Every side has ``cores`` cores: in this process and in step
all of them are torch's threads of whoever works; a step ahead the trainer and the engine process have half of them
each. A turn of the last begins with no batch under way and leaves none, so that nothing runs in another's turn: of
``iterations`` batches one is waited for. In this process and in step draw the same samples; their rewards are compared.

The figure is the median over rounds of a step ahead / in this process in samples a second. The sync pause is what
training stands still to send the changed weights and to have them confirmed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from _tools import options, report

from cards.registry import family
from fastvideo_train.build import card_for, in_numerics_of
from fastvideo_train.data.shapeworld_prompts import ShapeWorldPrompts
from fastvideo_train.host_memory import keep_freed_memory
from fastvideo_train.rollout_record import plan_record
from fastvideo_train.rollouts import AsyncRollouts, InProcessRollouts, ProcessRollouts, RolloutSettings
from inference.engine import Engine
from inference.instance import ModelInstance
from methods.diffusion_nft import DiffusionNFT
from methods.method import Context
from methods.rewards.shape_eval import ShapeEvalReward
from methods.roles import STUDENT, Roles
from methods.rollout_process import Asynchronous, SeparateProcess
from methods.world import World

GOAL = 1.0
SEED = 0
MAX_ROWS = 32


@dataclass
class Turn:
    """Of one side in one round."""

    seconds: float = 0.0
    samples: int = 0
    rewards: list[float] = field(default_factory=list)
    sync_seconds: list[float] = field(default_factory=list)
    sync_bytes: list[int] = field(default_factory=list)
    received: int = 0
    """Bytes of results."""

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class Side:
    """A training run without a trainer around it."""

    def __init__(self, settings: RolloutSettings, method: DiffusionNFT, threads: int):
        base_card = family("wan21").card("tiny")
        card = card_for(base_card, method)
        base = ModelInstance.load(in_numerics_of(base_card, method))
        self.name = settings.name
        self.method = method
        self.threads = threads
        roles = Roles(base, (*method.roles(), *settings.roles), card=card)
        engine = Engine("cpu", batching="shape", max_rows=MAX_ROWS)
        self.runner = settings.make(engine, roles, MAX_ROWS)
        self.prompts = ShapeWorldPrompts(seed=SEED)
        self.last = 0
        """Step that ends the turn."""
        if isinstance(self.runner, Asynchronous):
            self.runner.ahead = self._ahead
        reward = ShapeEvalReward()
        self.ctx = Context(card, engine, roles, World(), SEED, torch.device("cpu"), reward, self.runner)
        self.optimizer = torch.optim.AdamW(
            roles.trained(), lr=method.lr, betas=method.betas, weight_decay=method.weight_decay
        )
        self.step = self.optimizer_steps = 0

    def _batch(self, step: int) -> list[Any]:
        return [self.prompts.at(step * self.method.batch_size + i) for i in range(self.method.batch_size)]

    def _ahead(self, step: int) -> Any:
        if step > self.last:
            return None
        return self.method.rollout_plan(self._batch(step), step, seed=SEED, world=World())

    def turn(self, iterations: int) -> Turn:
        torch.set_num_threads(self.threads)
        self.last = self.step + iterations - 1
        done = Turn()
        apart = self.runner if isinstance(self.runner, SeparateProcess) else None
        before = 0 if apart is None else apart.process.received_bytes
        began = time.perf_counter()
        for _ in range(iterations):
            done.rewards.append(self._iterate())
            done.samples += self.method.batch_size * self.method.samples
            if apart is not None and apart.cost.syncs:
                done.sync_seconds.append(apart.cost.sync_seconds)
                done.sync_bytes.append(sum(sync.bytes for sync in apart.cost.syncs))
        done.seconds = time.perf_counter() - began
        done.received = 0 if apart is None else apart.process.received_bytes - before
        return done

    def _iterate(self) -> float:
        """One training step; the mean reward of its samples."""
        roles, reward = self.ctx.roles, float("nan")
        for update in self.method.updates(self._batch(self.step), self.step, self.ctx):
            reward = update.metrics.get("train/reward", reward)
            if update.loss is not None:
                update.loss.backward()
                if update.step:
                    assert self.method.clip is not None
                    torch.nn.utils.clip_grad_norm_(roles.trained(), self.method.clip)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    roles.changed(STUDENT)
                    self.optimizer_steps += 1
        self.runner.end_updates()
        self.method.after_step(self.step, self.optimizer_steps, self.ctx)
        self.step += 1
        return reward


def main(arguments: list[str]) -> int:
    keep_freed_memory()  # as a run on a CPU does
    cores = os.cpu_count()
    chosen = options(
        arguments, {"rounds": 3, "iterations": 4, "prompts": 4, "samples": 4, "cores": 1 if cores is None else cores}
    )
    cores, half = chosen["cores"], max(1, chosen["cores"] // 2)

    def method() -> DiffusionNFT:
        return DiffusionNFT(
            lr=5e-4,
            steps=10**6,
            batch_size=chosen["prompts"],
            samples=chosen["samples"],
            kl=0.0,
            updates=2,
            timesteps=4,
            eta=0.9,
            betas=(0.95, 0.99),
            weight_decay=0.0,
            text_padding="folded",
        )

    sides = [
        Side(InProcessRollouts(), method(), cores),
        Side(ProcessRollouts(threads=cores), method(), cores),
        Side(AsyncRollouts(threads=half), method(), half),
    ]
    turns: dict[str, list[Turn]] = {side.name: [] for side in sides}
    try:
        for side in sides:  # compiles nothing, but starts the processes and fills the caches
            side.runner.start()
            side.turn(1)
        for index in range(chosen["rounds"]):
            for side in sides if index % 2 == 0 else sides[::-1]:
                turns[side.name].append(side.turn(chosen["iterations"]))
            rates = ", ".join(f"{name} {of[-1].rate:.2f}" for name, of in turns.items())
            print(f"round {index}: samples/s {rates}", flush=True)
    finally:
        for side in sides:
            side.runner.close()
    same = all(a.rewards == b.rewards for a, b in zip(turns["in_process"], turns["process"], strict=True))
    ratios = {
        name: statistics.median(a.rate / b.rate for a, b in zip(turns[name], turns["in_process"], strict=True))
        for name in ("process", "async")
    }
    record = plan_record(sides[0].ctx.card, sides[0].method)
    assert record is not None
    apart = {name: turns[name] for name in ("process", "async")}
    sent = {name: round(sum(t.received for t in of) / sum(t.samples for t in of)) for name, of in apart.items()}
    report(
        "rl_throughput",
        ratios["async"],
        "async / in-process rollouts, samples a second",
        GOAL,
        same and ratios["async"] >= GOAL,
        samples_per_second={name: round(statistics.median(t.rate for t in of), 3) for name, of in turns.items()},
        process_ratio=round(ratios["process"], 4),
        same_rewards=same,
        sync_pause_ms={
            name: round(1e3 * statistics.median(s for t in of for s in t.sync_seconds), 2) for name, of in apart.items()
        },
        sync_bytes={name: statistics.median_low(b for t in of for b in t.sync_bytes) for name, of in apart.items()},
        bytes_per_sample={"record": record.bytes_per_sample, "sent": sent},
        threads={side.name: side.threads for side in sides},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
