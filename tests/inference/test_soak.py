"""Everything at once, at random: submit, cancel, fail, suspend, resume, sync, hold, lose the device. In the end every
ticket, block and byte is back, and every request that completed is what it is alone.

    FASTVIDEO_SOAK_SECONDS=300 python -m pytest tests/inference/test_soak.py -s
"""

from __future__ import annotations

import copy
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.errors import UserError
from inference.admission import Budget, Demand
from inference.batching import PoolFault
from inference.engine import Engine, EngineFault, Handle
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from inference.resident import Resident
from inference.stream import CancelScope
from inference.weight_sync import StoppedBySync, WeightSyncController
from tests.support.tiny_qwen3 import save_tiny_qwen3

SECONDS = float(os.environ.get("FASTVIDEO_SOAK_SECONDS", "8"))
CLIP = Request(prompt="a", steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")
TEXT = Request(prompt="abc", task="text", max_tokens=6, temperature=1.0)
KV_BYTES = 2**16


class Failing:
    """A forward hook that raises now and then."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def __call__(self, *_: object) -> None:
        draw = self.rng.random()
        if draw < 0.05:
            raise torch.OutOfMemoryError("out of memory")
        if draw < 0.3:
            raise RuntimeError("this step fails")
        if draw < 0.31:
            raise PoolFault("the device is gone")


class Soak:
    """One engine, its models, and what was asked of it."""

    def __init__(self, wan_folder: Path, text_folder: Path, seed: int, batching: str):
        self.rng = random.Random(seed)
        card = card_of(wan_folder)
        short = card.sampling.model_copy(update={"max_sequence_length": 16})
        self.wan = ModelInstance.load(card.model_copy(update={"sampling": short}))
        self.lm = ModelInstance.load(card_of(text_folder))
        broken = copy.deepcopy(self.wan.module("transformer"))
        broken.register_forward_pre_hook(Failing(self.rng))
        self.bad = self.wan.view({"transformer": Resident(broken)})
        largest = Engine()._open(replace(CLIP, width=48, guidance=2.0, output="video"), self.wan, None).demand
        budget = Budget(slots=4, peak_bytes=2 * largest.peak_bytes, resident_bytes=3 * largest.resident_bytes)
        self.engine = Engine(batching=batching, budget=budget, cache_bytes=2**14, kv_bytes=KV_BYTES)  # type: ignore[arg-type]
        self.controller = WeightSyncController(self.engine)
        self.scopes = [CancelScope() for _ in range(3)]
        self.open: list[Handle] = []
        self.asked: list[tuple[Handle, Request, ModelInstance]] = []
        self.counts: dict[str, int] = {}
        self.first = {k: v.clone() for k, v in self.wan.module("transformer").state_dict().items()}

    def act(self) -> None:
        """One thing at random."""
        names = ["submit"] * 5 + ["tick"] * 14 + ["cancel", "suspend", "resume", "resume", "scope", "hold", "sync"]
        name = self.rng.choice(names)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.open = [handle for handle in self.open if not handle.done]
        if name == "submit":
            self.submit()
        elif name == "tick":
            self.engine.tick()
        elif name == "hold":
            self.engine.hold()
            for _ in range(self.rng.randrange(4)):
                self.engine.tick()
            self.engine.release()
        elif name == "scope":
            index = self.rng.randrange(3)
            self.scopes[index].cancel()
            self.scopes[index] = CancelScope()
        elif name == "sync":
            self.sync()
        elif self.open:
            getattr(self.rng.choice(self.open), name)()

    def submit(self) -> None:
        if len(self.open) >= 12:
            return
        rng, seed = self.rng, self.rng.randrange(4)
        if rng.random() < 0.4:
            request, instance = replace(TEXT, seed=seed, max_tokens=rng.choice([2, 6, 12])), self.lm
        else:
            request = replace(
                CLIP,
                seed=seed,
                prompt=rng.choice("abc"),
                steps=rng.choice([1, 3, 5]),
                guidance=rng.choice([1.0, 2.0]),
                width=rng.choice([16, 32, 48]),
                output=rng.choice(["latents", "video"]),  # type: ignore[arg-type]
                priority=rng.choice([-1, 0, 2]),
            )
            instance = self.bad if rng.random() < 0.25 else self.wan
        scope = rng.choice([None, *self.scopes])
        handle = self.engine.submit(request, instance, None, scope)
        self.open.append(handle)
        self.asked.append((handle, request, instance))

    def sync(self) -> None:
        """The same weights again under a new version, so that results stay comparable."""
        for handle in self.open:
            handle.resume()
        mode: Any = self.rng.choice(["drain", "freeze", "boundary"])
        try:
            self.controller.sync(self.wan, "transformer", self.first, mode=mode)
        except UserError as refused:  # one that was suspended has begun and is not in flight again yet
            assert "suspended" in str(refused)
            self.counts["sync refused"] = self.counts.get("sync refused", 0) + 1

    def end(self) -> None:
        for handle in self.open:
            handle.resume()
        while self.engine.tick():
            pass


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_soak(wan_folder: Path, tmp_path: Path, batching: str) -> None:
    seed = int(os.environ.get("FASTVIDEO_SOAK_SEED", random.randrange(10**6)))
    soak = Soak(wan_folder, save_tiny_qwen3(tmp_path / "lm"), seed, batching)
    began = time.monotonic()
    while time.monotonic() - began < SECONDS / 2:
        soak.act()
    soak.end()
    ends: dict[str, int] = {}
    alone = Engine(cache_bytes=0)
    for handle, _, instance in soak.asked:
        assert handle.done, f"seed {seed}: {handle.id} never ended"
        failure = handle._running.failure
        ends[type(failure).__name__] = ends.get(type(failure).__name__, 0) + 1
        assert failure is None or isinstance(failure, (UserError, RuntimeError, EngineFault, StoppedBySync)), (
            f"seed {seed}: {failure!r}"
        )
        if instance is not soak.bad:
            assert failure is None or isinstance(failure, (UserError, EngineFault)), f"seed {seed}: {failure!r}"
    print(f"{batching}, seed {seed}: {len(soak.asked)} requests ended {ends} after {soak.counts}")
    complete = [row for row in soak.asked if row[0]._running.failure is None and row[2] is not soak.bad]
    for handle, request, instance in complete[:: max(1, len(complete) // 20)]:
        got, expected = handle.result(), alone.run(request, instance)
        if batching == "off":
            assert got.completion == expected.completion, f"seed {seed}"
            assert torch.equal(got.latents, expected.latents), f"seed {seed}: {request}"
        elif instance is soak.wan:
            torch.testing.assert_close(got.latents, expected.latents, rtol=0, atol=1e-4)
    assert complete, f"seed {seed}: nothing completed"
    assert soak.engine.ledger.used == Demand(slots=0), f"seed {seed}"
    assert soak.engine.ledger.tickets == 0, f"seed {seed}"
    assert soak.engine.counts == (0, 0), f"seed {seed}"
    stats = soak.engine.caches.stats()
    assert stats.request_bytes == 0 and stats.paged_blocks_in_use == 0, f"seed {seed}: {stats}"
    assert all(not scope._hears for scope in soak.scopes), f"seed {seed}"
