"""Worst cases of texts and scores: every step within what the request was admitted with, by counted allocations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inference.admission import Budget
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from tests.support.live_bytes import LiveBytes
from tests.support.tiny_clip import save_tiny_clip
from tests.support.tiny_qwen3 import save_tiny_qwen3

TEXT = Request(prompt="the quick brown fox jumps over", task="text", seed=1, max_tokens=20, temperature=1.0)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    return Engine().load(save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), eos_token_id=None), tasks=("text",))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    return Engine().load(save_tiny_clip(tmp_path_factory.mktemp("clip")), tasks=("score",))


def counted(engine: Engine, requests: list[Request], instance: ModelInstance) -> tuple[int, int]:
    """(peak bytes of a whole run, bytes that the budget allowed) under a budget of exactly what is needed."""
    handles = [engine.submit(request, instance) for request in requests]
    with LiveBytes() as live:
        while engine.tick():
            pass
    for handle in handles:
        handle.result()
    budget = engine.ledger.budget
    assert budget.peak_bytes is not None and budget.resident_bytes is not None
    return live.peak, budget.peak_bytes + budget.resident_bytes


def budget_of(requests: list[Request], instance: ModelInstance, kv_bytes: int = 0) -> Budget:
    demands = [Engine(kv_bytes=kv_bytes)._open(request, instance, None).demand for request in requests]
    assert all(demand.peak_bytes > 0 for demand in demands)
    return Budget(
        peak_bytes=sum(demand.peak_bytes for demand in demands),
        resident_bytes=sum(demand.resident_bytes for demand in demands),
    )


def test_a_text_with_keys_and_values_of_its_own(lm: ModelInstance) -> None:
    got, allowed = counted(Engine(budget=budget_of([TEXT], lm)), [TEXT], lm)
    assert got <= allowed <= 3 * got


def test_the_keys_and_values_of_a_text_are_held_where_no_pool_holds_them(lm: ModelInstance) -> None:
    own, pooled = (Engine(kv_bytes=kv)._open(TEXT, lm, None).demand for kv in (0, 2**20))
    heads, width, layers = 2, 8, 3
    tokens = lm.tokenize(TEXT.prompt, 256)["ids"].shape[1] + 20
    assert own.resident_bytes - pooled.resident_bytes == 2 * layers * heads * width * 4 * tokens
    assert pooled.cache_bytes > 0 == own.cache_bytes


def test_texts_of_unequal_lengths_in_one_forward(lm: ModelInstance) -> None:
    """The shortest is padded to the longest, and counted so."""
    requests = [replace(TEXT, prompt=TEXT.prompt * times, seed=times) for times in (1, 1, 1, 5)]
    engine = Engine(batching="shape", kv_bytes=2**22, budget=budget_of(requests, lm, 2**22))
    engine._texts.pool(lm, "lm")
    got, allowed = counted(engine, requests, lm)
    assert got <= allowed


def test_a_step_beside_a_longer_text_is_counted_as_padded(lm: ModelInstance) -> None:
    long = replace(TEXT, prompt=TEXT.prompt * 5)
    alone, beside = (_peak_of_a_token(lm, others) for others in ([], [long]))
    assert beside > 2 * alone


def _peak_of_a_token(lm: ModelInstance, others: list[Request]) -> int:
    """Bytes of a text's step once it and the others have their first token."""
    engine = Engine(batching="shape", kv_bytes=2**22)
    text, *rest = [engine.submit(request, lm) for request in (replace(TEXT, max_tokens=100), *others)]
    while any(handle.progress[0] == 0 for handle in (text, *rest)):
        engine.tick()
    text._running.plan()
    peak = engine._peak_bytes(text)
    text.cancel()
    while engine.tick():
        pass
    return peak


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_scores(clip: ModelInstance, batching: str) -> None:
    frames = torch.randint(0, 256, (8, 16, 16, 3), dtype=torch.uint8)
    requests = [Request(prompt=text, task="score", inputs={"pixels": frames}, frames=8) for text in ("red", "blue")]
    budget = budget_of(requests, clip)
    got, allowed = counted(Engine(batching=batching, cache_bytes=0, budget=budget), requests, clip)  # type: ignore[arg-type]
    assert got <= allowed
