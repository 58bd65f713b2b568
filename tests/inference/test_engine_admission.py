"""The engine under a budget: who waits, who is refused, who is suspended, and that everything comes back."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.errors import UserError
from inference.admission import AdmissionInfeasible, Budget, Demand
from inference.batching import PoolFault
from inference.engine import Cancelled, Engine, EngineFault, Handle
from inference.engine_thread import EngineThread
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.request import Request
from inference.stream import CancelScope
from loops.loop import Profile
from tests.support.tiny_qwen3 import save_tiny_qwen3

BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")
TEXT = Request(prompt="abc", task="text", seed=1, max_tokens=6, temperature=0.0)
NOTHING = Demand(slots=0)


@pytest.fixture(scope="module")
def wan(wan_folder: Path) -> ModelInstance:
    card = card_of(wan_folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 16})
    return Engine().load(card.model_copy(update={"sampling": short}))


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    return Engine().load(save_tiny_qwen3(tmp_path_factory.mktemp("qwen3")))


def finish(engine: Engine) -> None:
    while engine.tick():
        pass


def assert_all_returned(engine: Engine) -> None:
    assert engine.ledger.used == NOTHING
    assert engine.ledger.tickets == 0
    assert engine.counts == (0, 0)
    stats = engine.caches.stats()
    assert stats.request_bytes == 0
    assert stats.paged_blocks_in_use == 0


def fault_view(wan: ModelInstance, failure: Exception) -> ModelInstance:
    """The instance with a transformer that fails on its second forward."""
    module = copy.deepcopy(wan.module("transformer"))
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise failure

    module.register_forward_pre_hook(fail)
    return wan.view({"transformer": Resident(module)})


# -- waiting


def test_what_does_not_fit_waits_and_is_let_in_as_others_end(wan: ModelInstance) -> None:
    alone = [Engine().run(replace(BASE, seed=seed), wan).latents for seed in range(5)]
    engine = Engine(budget=Budget(slots=2))
    handles = [engine.submit(replace(BASE, seed=seed), wan) for seed in range(5)]
    assert engine.counts == (0, 5)
    most = 0
    while engine.tick():
        running = sum(handle.state == "running" for handle in handles)
        most = max(most, running, engine.counts[0])
        assert engine.ledger.used.slots <= 2
    assert most == 2
    for handle, expected in zip(handles, alone, strict=True):
        assert torch.equal(handle.result().latents, expected)
    assert_all_returned(engine)


def test_what_can_never_fit_is_refused_at_submission_with_the_figures(wan: ModelInstance) -> None:
    engine = Engine(budget=Budget(resident_bytes=10_000))
    with pytest.raises(AdmissionInfeasible, match=r"resident_bytes: needs .* MiB, budget 0\.01 MiB.*fewer frames"):
        engine.submit(BASE, wan)
    assert engine.counts == (0, 0)


def test_the_demand_grows_with_the_request_and_covers_what_it_holds(wan: ModelInstance) -> None:
    demands = []
    for request in (BASE, replace(BASE, width=64, frames=9, guidance=3.0)):
        engine = Engine()
        handle = engine.submit(request, wan)
        while handle.progress[0] < 3:
            engine.tick()
        state: Any = handle._running._state
        tensors = _tensors([state.tensors, handle._running.slots, state.solver])
        held = sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())
        assert 0 < held <= handle.demand.resident_bytes
        demands.append(handle.demand)
        finish(engine)
        assert_all_returned(engine)
    small, wide = demands
    assert wide.resident_bytes > small.resident_bytes
    assert wide.seconds > small.seconds


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors that a value holds, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def test_one_that_waits_can_be_cancelled_and_never_takes_a_step(wan: ModelInstance) -> None:
    engine = Engine(budget=Budget(slots=1))
    scope = CancelScope()
    first = engine.submit(BASE, wan)
    engine.tick()
    line, under_scope = (
        engine.submit(replace(BASE, seed=2), wan),
        engine.submit(replace(BASE, seed=3), wan, None, scope),
    )
    engine.tick()
    in_inbox = engine.submit(replace(BASE, seed=4), wan)
    for handle in (line, in_inbox):
        handle.cancel()
    scope.cancel()
    engine.tick()
    for handle in (line, under_scope, in_inbox):
        assert handle.done
        assert handle.progress[0] == 0
        with pytest.raises(Cancelled):
            handle.result()
    finish(engine)
    assert torch.equal(first.result().latents, Engine().run(BASE, wan).latents)
    assert_all_returned(engine)


def test_the_more_urgent_of_those_who_wait_goes_first(wan: ModelInstance) -> None:
    order: list[str] = []

    def submit(engine: Engine, name: str, **fields: Any) -> Handle:
        request = replace(BASE, prompt=name, **fields)
        return engine.submit(request, wan, lambda label, done, total: order.append(name) if done == total else None)

    for policy, fields in (("fifo", {"priority": 3}), ("deadline", {"deadline": 60.0}), ("fair", {"steps": 1})):
        engine = Engine(policy=policy, budget=Budget(slots=1))  # type: ignore[arg-type]
        order.clear()
        submit(engine, "first", steps=4)
        engine.tick()
        later = submit(engine, "later", steps=4)
        urgent = submit(engine, "urgent", **fields)
        urgent.arrival = later.arrival  # fair is short first, less the head start that an earlier arrival has
        finish(engine)
        assert order == ["first", "urgent", "later"], policy


def test_nobody_is_admitted_while_the_engine_holds(wan: ModelInstance) -> None:
    engine = Engine()
    before = engine.submit(BASE, wan)
    engine.tick()
    engine.hold()
    after = engine.submit(replace(BASE, seed=2), wan)
    finish(engine)
    assert before.done and not after.done
    assert engine.counts == (0, 1)
    gone = engine.submit(replace(BASE, seed=3), wan)
    gone.cancel()
    finish(engine)
    with pytest.raises(Cancelled):  # at once, not when the engine goes on
        gone.result(timeout=0)
    engine.release()
    finish(engine)
    assert after.done


# -- suspending


@pytest.mark.parametrize("solver", ["euler", "unipc", "dpm2"])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 4])
def test_a_suspended_request_goes_on_to_the_bit(wan: ModelInstance, solver: str, steps_before: int) -> None:
    request = replace(BASE, steps=5, solver=solver, guidance=3.0, output="video", profile=Profile.ROLLOUT)
    request = replace(request, capture=("trajectory",))
    expected = Engine().run(request, wan)
    engine = Engine(budget=Budget(slots=1), cache_bytes=0)
    handle = engine.submit(request, wan)
    while handle.progress[0] < steps_before:
        engine.tick()
    handle.suspend()
    other = engine.submit(replace(BASE, seed=9), wan)
    finish(engine)
    assert handle.state == "suspended"
    assert handle.progress[0] == steps_before
    assert handle._running._state is None
    assert other.done  # in the slot that the suspended one gave up
    assert engine.ledger.used == NOTHING
    handle.resume()
    finish(engine)
    got = handle.result()
    assert torch.equal(got.latents, expected.latents)
    assert got.video is not None and expected.video is not None
    assert torch.equal(got.video, expected.video)
    assert got.behaviour is not None and expected.behaviour is not None
    assert torch.equal(got.behaviour.trajectory, expected.behaviour.trajectory)  # type: ignore[arg-type]
    assert_all_returned(engine)


def test_one_that_is_failed_after_it_asked_to_go_on_is_not_let_in(wan: ModelInstance) -> None:
    """Found by the soak test: it was over, and still in the inbox."""
    engine = Engine()
    handle = engine.submit(BASE, wan)
    engine.tick()
    handle.suspend()
    engine.tick()
    handle.resume()
    engine._intake.held = True
    engine.tick()
    engine.fail(handle, UserError("stopped"))
    engine._intake.held = False
    finish(engine)
    with pytest.raises(UserError, match="stopped"):
        handle.result()
    assert_all_returned(engine)


def test_a_suspended_text_goes_on_to_the_bit_and_one_that_is_cancelled_returns_its_blocks(lm: ModelInstance) -> None:
    request = replace(TEXT, temperature=1.0, max_tokens=8)
    expected = Engine().run(request, lm).text
    engine = Engine(kv_bytes=2**20)
    handle, other = engine.submit(request, lm), engine.submit(replace(request, seed=2), lm)
    for _ in range(3):
        engine.tick()
    handle.suspend()
    other.suspend()
    finish(engine)
    assert engine.caches.stats().paged_blocks_in_use > 0
    other.cancel()
    finish(engine)
    with pytest.raises(Cancelled):
        other.result()
    handle.resume()
    finish(engine)
    assert handle.result().text == expected
    assert_all_returned(engine)


# -- faults of the engine itself


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_a_fault_of_the_device_fails_what_is_in_flight_and_the_engine_goes_on(
    wan: ModelInstance, batching: str
) -> None:
    engine = Engine(batching=batching, budget=Budget(slots=2))  # type: ignore[arg-type]
    view = fault_view(wan, PoolFault("the worker died"))
    lost = [engine.submit(replace(BASE, steps=6), wan), engine.submit(BASE, view)]
    later = engine.submit(replace(BASE, seed=3), wan)
    finish(engine)
    for handle in lost:
        with pytest.raises(EngineFault, match="the worker died") as caught:
            handle.result()
        assert isinstance(caught.value.__cause__, PoolFault)
    assert torch.equal(later.result().latents, Engine().run(replace(BASE, seed=3), wan).latents)
    assert_all_returned(engine)


def test_out_of_memory_of_one_request_is_no_fault_of_the_engine(wan: ModelInstance) -> None:
    engine = Engine(budget=Budget(slots=2))
    bad = engine.submit(BASE, fault_view(wan, torch.OutOfMemoryError("out of memory")))
    good = engine.submit(BASE, wan)
    finish(engine)
    with pytest.raises(torch.OutOfMemoryError):
        bad.result()
    assert torch.equal(good.result().latents, Engine().run(BASE, wan).latents)
    assert_all_returned(engine)


def test_a_run_reports_a_fault_and_returns_everything(wan: ModelInstance) -> None:
    engine = Engine()
    with pytest.raises(PoolFault):
        engine.run(BASE, fault_view(wan, PoolFault("the worker died")))
    assert_all_returned(engine)


# -- keys and values of texts


def test_texts_from_the_pool_are_those_with_caches_of_their_own(lm: ModelInstance) -> None:
    requests = [
        replace(TEXT, prompt=prompt, seed=i, temperature=1.0) for i, prompt in enumerate(("a", "abc end", "xy"))
    ]
    expected = [artifact.completion for artifact in Engine().run_serial(requests, lm)]
    engine = Engine(kv_bytes=2**20)
    assert [artifact.completion for artifact in engine.run_interleaved(requests, lm)] == expected
    handles = [engine.submit(request, lm) for request in requests]
    finish(engine)
    assert [handle.result().completion for handle in handles] == expected
    assert_all_returned(engine)


def test_texts_of_different_lengths_share_forwards_and_prefixes_when_batched(lm: ModelInstance) -> None:
    from tests.inference.test_engine import counted

    engine = Engine(batching="shape", kv_bytes=2**20)
    prompts = ["a", "abc end", "the quick brown fox"]
    with counted(lm.module("lm")) as rows:
        texts = engine.run_interleaved([replace(TEXT, prompt=prompt) for prompt in prompts], lm)
    assert rows.count(3) >= TEXT.max_tokens - 1  # type: ignore[operator]
    again = engine.run(replace(TEXT, prompt=prompts[2]), lm)
    assert again.text == texts[2].text
    assert engine.caches.stats().prefix_hit_tokens >= 16
    assert_all_returned(engine)


def test_texts_wait_for_blocks_and_none_runs_out_of_them(lm: ModelInstance) -> None:
    one = Engine(kv_bytes=2**20)
    block = one._texts.pool(lm, "lm").spec.block_bytes
    engine = Engine(kv_bytes=4 * block)  # a request of 3 + 20 tokens takes two
    handles = [engine.submit(replace(TEXT, max_tokens=20, seed=seed, temperature=1.0), lm) for seed in range(5)]
    most = 0
    while engine.tick():
        most = max(most, engine.counts[0])
        assert engine.caches.stats().paged_blocks_in_use <= 4
    assert most == 2
    expected = Engine().run_serial([replace(TEXT, max_tokens=20, seed=s, temperature=1.0) for s in range(5)], lm)
    assert [handle.result().text for handle in handles] == [artifact.text for artifact in expected]
    with pytest.raises(AdmissionInfeasible, match="cache_bytes"):
        engine.submit(replace(TEXT, max_tokens=100), lm)
    assert_all_returned(engine)


# -- costs, threads


def test_steps_are_measured_and_kept_from_run_to_run(wan: ModelInstance, tmp_path: Path) -> None:
    engine = Engine(costs=tmp_path)
    first = engine.submit(BASE, wan)
    finish(engine)
    (figures,) = engine.figures()["costs"]
    steps = {(row["component"], row["rows"]): row for row in figures["steps"]}
    assert steps["transformer", 1]["observations"] == 3
    assert steps["transformer", 1]["seconds"] > 1e-4
    engine.close()
    again = Engine(costs=tmp_path).submit(BASE, wan)
    assert again.demand.seconds != first.demand.seconds
    assert again.demand.seconds == pytest.approx(
        sum(row["seconds"] * n for row, n in ((steps["transformer", 1], 3), (steps["text_encoder", 1], 1)))
    )


def test_an_engine_thread_serves_submissions_from_several_threads(wan: ModelInstance) -> None:
    engine = Engine(budget=Budget(slots=3))
    expected = {seed: Engine().run(replace(BASE, seed=seed), wan).latents for seed in range(4)}
    results: dict[int, list[torch.Tensor]] = {seed: [] for seed in range(4)}

    def client(seed: int) -> None:
        for _ in range(3):
            results[seed].append(engine.submit(replace(BASE, seed=seed), wan).result(60).latents)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    with EngineThread(engine) as thread:
        for one in clients:
            one.start()
        for one in clients:
            one.join(60)
    assert not thread.alive and thread.failure is None
    for seed, latents in results.items():
        assert len(latents) == 3 and all(torch.equal(x, expected[seed]) for x in latents)
    assert_all_returned(engine)


def test_a_wait_ends_with_a_submission(wan: ModelInstance) -> None:
    engine = Engine()
    engine.tick()
    assert not engine.wait(0.01)
    began = time.monotonic()
    timer = threading.Timer(0.05, lambda: engine.submit(BASE, wan))
    timer.start()
    assert engine.wait(30)
    assert time.monotonic() - began < 20
    finish(engine)
    assert_all_returned(engine)


@pytest.mark.parametrize(
    ("field", "value"), [("priority", 9), ("priority", True), ("deadline", 0.0), ("deadline", "x")]
)
def test_a_bad_priority_or_deadline_is_refused(wan: ModelInstance, field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{field}: got"):
        Engine().submit(replace(BASE, **{field: value}), wan)


def test_a_handle_knows_its_state(wan: ModelInstance) -> None:
    engine = Engine()
    handle: Handle = engine.submit(BASE, wan)
    assert handle.state == "waiting" and handle.admitted_at is None
    engine.tick()
    assert handle.state == "running" and handle.admitted_at is not None
    finish(engine)
    assert handle.state == "done"


# -- memory


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_counted_bytes_stay_under_the_budget(wan: ModelInstance, batching: str) -> None:
    """Every allocation of a loaded engine, counted, against what it was allowed to hold and to use at once."""
    requests = [
        replace(BASE, seed=seed, prompt=f"{seed}", width=16 * (1 + seed % 3), guidance=1.0 + seed % 2, output=output)
        for seed, output in enumerate(["latents", "video", "latents", "video", "latents", "video"])
    ]
    budget = _budget(requests, wan, running=3)
    counted = _counted(Engine(batching=batching, cache_bytes=0, budget=budget), requests, wan)  # type: ignore[arg-type]
    print(f"{batching}: counted {counted}, budget {budget}")
    assert counted <= budget.peak_bytes + budget.resident_bytes  # type: ignore[operator]


def test_without_a_budget_merged_forwards_take_more(wan: ModelInstance) -> None:
    """What the test above would see if the budget did nothing."""
    requests = [replace(BASE, seed=seed, width=128, height=128) for seed in range(8)]
    budget = _budget(requests, wan, running=2)
    bound = budget.peak_bytes + budget.resident_bytes  # type: ignore[operator]
    assert _counted(Engine(batching="shape", cache_bytes=0, budget=budget), requests, wan) <= bound
    assert _counted(Engine(batching="shape", cache_bytes=0), requests, wan) > bound


def _budget(requests: list[Request], wan: ModelInstance, running: int) -> Budget:
    """Room for the largest step alone, and for what the largest few requests hold."""
    demands = [Engine()._open(request, wan, None).demand for request in requests]
    resident = sum(sorted(demand.resident_bytes for demand in demands)[-running:])
    return Budget(peak_bytes=max(demand.peak_bytes for demand in demands), resident_bytes=resident)


def _counted(engine: Engine, requests: list[Request], wan: ModelInstance) -> int:
    """Peak bytes of a whole run; the results are dropped as they come."""
    from tests.support.live_bytes import LiveBytes

    handles = [engine.submit(request, wan) for request in requests]
    with LiveBytes() as live:
        while engine.tick():
            for handle in handles:
                if handle.done:
                    handle._artifact = None
    assert all(handle.done and handle._running.failure is None for handle in handles)
    assert_all_returned(engine)
    return live.peak
