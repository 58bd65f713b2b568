"""Event streams and cancel scopes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from inference.engine import Cancelled, Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from inference.stream import CancelScope, EventStream

BASE = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, frames=5, height=16, width=16, output="latents")


@pytest.fixture(scope="module")
def instance(wan_folder: Path) -> ModelInstance:
    return Engine().load(card_of(wan_folder))


def test_a_request_tells_its_steps_in_order_and_how_it_ended(instance: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(BASE, instance)
    while engine.tick():
        pass
    events = list(handle.events(timeout=1))
    assert [e.number for e in events] == list(range(len(events)))
    assert [(e.kind, e.label, e.done) for e in events] == [
        ("queued", "", 0),
        ("step", "encode_prompt", 1),
        ("step", "denoise 1/3", 2),
        ("step", "denoise 2/3", 3),
        ("step", "denoise 3/3", 4),
        ("completed", "", 4),
    ]
    assert all(e.total == 4 for e in events)
    seconds = [e.seconds for e in events]
    assert seconds == sorted(seconds)
    assert list(handle.events(timeout=1)) == events  # a second reader sees the same


def test_a_reader_in_another_thread_follows_while_the_request_runs(instance: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(BASE, instance)
    kinds: list[str] = []
    reader = threading.Thread(target=lambda: kinds.extend(e.kind for e in handle.events(timeout=30)))
    reader.start()
    while engine.tick():
        pass
    reader.join(30)
    assert kinds == ["queued", *["step"] * 4, "completed"]


def test_waiting_for_an_event_that_does_not_come_says_so() -> None:
    stream = EventStream()
    stream.put("queued", "", 0, 1)
    events = stream.read(timeout=0.01)
    assert next(events).kind == "queued"
    with pytest.raises(TimeoutError, match="no event 1"):
        next(events)


def test_a_scope_cancels_all_of_its_requests_at_the_next_step_and_no_others(instance: ModelInstance) -> None:
    engine = Engine()
    outer = CancelScope()
    inner = CancelScope(outer)
    mine = engine.submit(BASE, instance, scope=inner)
    also = engine.submit(replace(BASE, seed=2), instance, scope=outer)
    other = engine.submit(replace(BASE, seed=3), instance)
    for _ in range(2):
        engine.tick()
    inner.cancel()
    engine.tick()
    assert mine.done and not also.done
    outer.cancel()
    while engine.tick():
        pass
    for handle, steps in ((mine, 2), (also, 3)):
        with pytest.raises(Cancelled):
            handle.result()
        assert handle.progress[0] == steps
        assert [e.kind for e in handle.events(timeout=1)][-1] == "cancelled"
    assert other.result().latents.shape[0] == 4
    assert not CancelScope(CancelScope()).cancelled


def test_a_failure_ends_the_stream_with_its_reason(instance: ModelInstance) -> None:
    engine = Engine()
    handle = engine.submit(replace(BASE, guidance=3.0), instance.view({}, _without_negative(instance)))
    while engine.tick():
        pass
    last = list(handle.events(timeout=1))[-1]
    assert last.kind == "failed" and "negative_text" in last.label


def _without_negative(instance: ModelInstance):  # type: ignore[no-untyped-def]
    from cards.program import Program

    nodes = tuple(node for node in instance.card.programs["t2v"].nodes if node.id != "encode_negative")
    return instance.card.model_copy(update={"programs": {"t2v": Program(nodes=nodes)}})
