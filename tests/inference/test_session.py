"""Sessions: many acts are one request to the bit, an act that fails never was, and no world touches another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cards.errors import UserError
from cards.wan21.card import card_from_folder as wan_card
from cards.wan_causal.card import card_from_folder, with_rollout
from inference.admission import AdmissionInfeasible, Budget
from inference.artifact import Artifact
from inference.engine import Cancelled, Engine, EngineFault
from inference.engine_thread import EngineThread
from inference.extend.observer import Observer
from inference.instance import ModelInstance
from inference.request import Request
from inference.session import WorldModelSession

PROMPT = "a red circle moves left"
REQUEST = Request(prompt=PROMPT, seed=5, height=16, width=16)


@pytest.fixture(scope="module")
def folder(make_wan_folder: Callable[..., Path]) -> Path:
    return make_wan_folder(seed=3)


def load(folder: Path, **options: Any) -> ModelInstance:
    card = card_from_folder(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "height": 16, "width": 16})
    return Engine().load(with_rollout(card.model_copy(update={"sampling": short}), **options))


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return load(folder, window=2, sinks=1)


def drain(engine: Engine) -> None:
    while engine.tick():
        pass


def session_of(instance: ModelInstance, engine: Engine | None = None, **settings: Any) -> WorldModelSession:
    return WorldModelSession(Engine(cache_bytes=0) if engine is None else engine, instance, PROMPT, **settings)


def acted(session: WorldModelSession, *chunks: int, **options: Any) -> list[Artifact]:
    """Acts one after the other, each to its end."""
    results = []
    for count in chunks:
        handle = session.act(chunks=count, **options)
        drain(session.engine)
        results.append(handle.result())
    return results


def joined(results: list[Artifact]) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and video of acts in a row."""
    videos = [r.video for r in results if r.video is not None]
    return torch.cat([r.latents for r in results], dim=1), torch.cat(videos, dim=1)


def assert_same(a: list[Artifact], b: list[Artifact]) -> None:
    for one, other in zip(joined(a), joined(b), strict=True):
        assert torch.equal(one, other)


def after(session: WorldModelSession) -> Artifact:
    """What the next act of a copy gives: it depends on all that the world holds."""
    return acted(session.fork(), 2)[0]


# -- acts in a row


@pytest.mark.parametrize("acts", [(1,) * 6, (2, 3, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"window": 2}, {"window": 2, "sinks": 1}, {"window": 9}, {"window": 2, "context_noise": 0.1}],
    ids=str,
)
def test_acts_are_one_request_of_as_many_chunks(folder: Path, options: dict[str, Any], acts: tuple[int, ...]) -> None:
    instance = load(folder, **options)
    whole = Engine(cache_bytes=0).run(replace(REQUEST, frames=21), instance)
    session = session_of(instance, seed=5)
    results = acted(session, *acts)
    assert torch.equal(joined(results)[0], whole.latents)
    assert whole.video is not None
    assert torch.equal(joined(results)[1], whole.video)
    assert (session.chunks, session.frames) == (6, 21)


def test_chunks_of_several_frames(folder: Path) -> None:
    instance = load(folder, window=2, chunk=3)
    whole = Engine(cache_bytes=0).run(replace(REQUEST, frames=33), instance)
    assert torch.equal(joined(acted(session_of(instance, seed=5), 1, 2))[0], whole.latents)


def test_a_session_in_latents_decodes_nothing(folder: Path) -> None:
    instance = load(folder, window=2)
    session = session_of(instance, seed=5, output="latents")
    latents = torch.cat([r.latents for r in acted(session, 1, 1, 1)], dim=1)
    assert not instance.built("vae")
    assert torch.equal(latents, Engine().run(replace(REQUEST, frames=9, output="latents"), instance).latents)


def test_frames_stream_with_their_place_in_the_whole_clip(instance: ModelInstance) -> None:
    session = session_of(instance, seed=5)
    acted(session, 2)
    handle = session.act(chunks=2)
    drain(session.engine)
    events = list(handle.events(timeout=1))
    frames: list[Any] = [event.frames for event in events if event.kind == "frames"]
    assert [part.first for part in frames] == [5, 9]
    shown = np.concatenate([part.pixels_FHWC for part in frames])
    assert np.array_equal(shown, handle.result().frames_FHWC())
    steps = [event.label for event in events if event.kind == "step"]
    assert len(steps) == events[-1].total == 2 * 6  # the prompt was encoded once and for all
    assert steps[0].startswith("chunk 3/4")


def test_memory_does_not_grow_with_the_world(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    session = session_of(instance, engine, seed=5)
    sizes, saved = set(), set()
    for _ in range(20):
        acted(session, 1)
        if session.chunks > 3:
            sizes.add(engine.caches.stats().slab_bytes)
            saved.add(len(session.save()) // 1024)
    assert session.chunks == 20
    assert len(sizes) == 1
    assert len(saved) == 1


def test_positions_go_on_beyond_the_table(instance: ModelInstance) -> None:
    """The random Wan's table of frames has 64 rows."""
    session = session_of(instance, seed=5, output="latents")
    (result,) = acted(session, 66)
    whole = Engine(cache_bytes=0).run(replace(REQUEST, frames=261, output="latents"), instance)
    assert torch.equal(result.latents, whole.latents)


# -- acts that do not complete


@pytest.mark.parametrize("before", [0, 2, 5])
@pytest.mark.parametrize("steps", [0, 4, 9, 17, 29])
def test_a_cancelled_act_never_was(instance: ModelInstance, before: int, steps: int) -> None:
    """At every phase: before the first step, amid a ladder, after a decode, chunks after the window has rolled."""
    session = session_of(instance, seed=5)
    first = acted(session, *([before] if before else []))
    handle = session.act(chunks=5)
    for _ in range(steps):
        session.engine.tick()
    handle.cancel()
    drain(session.engine)
    with pytest.raises(Cancelled):
        handle.result()
    assert session.chunks == before
    plain = session_of(instance, seed=5)
    assert_same(first + acted(session, 1, 2), acted(plain, *([before] if before else []), 1, 2))


class Breaks(Observer):
    """An observer that refuses one step, or breaks the engine's round by a failure that is nobody's own."""

    def __init__(self) -> None:
        self.at: str | None = None

    def on_forward(self, forward: Any) -> None:
        if self.at == "round":
            raise RuntimeError("the device is gone")

    def on_step(self, step: Any) -> None:
        if self.at is not None and step.plan.label.startswith(self.at):
            raise ValueError("refused")

    def on_finish(self, request_id: str, failure: BaseException | None) -> None:
        pass


@pytest.mark.parametrize(("at", "error"), [("chunk 5/6, rung 2", ValueError), ("round", EngineFault)])
def test_a_failed_act_and_a_lost_one_never_were(instance: ModelInstance, at: str, error: type[Exception]) -> None:
    breaks = Breaks()
    session = session_of(instance, Engine(cache_bytes=0, observers=[breaks]), seed=5)
    first = acted(session, 3)
    handle = session.act(chunks=3)
    for _ in range(7):
        session.engine.tick()
    breaks.at = at
    drain(session.engine)
    with pytest.raises(error):
        handle.result()
    breaks.at = None
    assert_same(first + acted(session, 1, 1), acted(session_of(instance, seed=5), 3, 1, 1))


def test_a_forward_that_fails_between_two_layers_leaves_the_window_whole(
    instance: ModelInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loops.slab import Slab

    session = session_of(instance, seed=5)
    first = acted(session, 4)
    put = Slab.put

    def fails(self: Slab, layer: int, chunk: int, k: Any, v: Any) -> None:
        if (layer, chunk) == (1, 5):
            raise RuntimeError("out of memory")
        put(self, layer, chunk, k, v)

    with monkeypatch.context() as patched:
        patched.setattr(Slab, "put", fails)
        handle = session.act(chunks=2)
        drain(session.engine)
    with pytest.raises(RuntimeError, match="out of memory"):
        handle.result()
    assert_same(first + acted(session, 1, 1), acted(session_of(instance, seed=5), 4, 1, 1))


def test_a_world_that_cannot_be_had_again_is_said_to_be_lost(
    instance: ModelInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loops.slab import Slab

    session = session_of(instance, seed=5)
    acted(session, 4)
    slot, calls = Slab._slot, 0

    def fails(self: Slab, *args: Any) -> Any:
        nonlocal calls
        calls += self._rolling
        if calls == 2:
            raise RuntimeError("amid a move")
        return slot(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Slab, "_slot", fails)
        handle = session.act()
        drain(session.engine)
    with pytest.raises(RuntimeError, match="amid a move"):
        handle.result()
    with pytest.raises(UserError, match="lost in a fault"):
        session.act()
    assert (session.engine.ledger.tickets, session.engine.caches.stats().slab_bytes) == (0, 0)
    session.close()


def test_a_first_act_that_is_cancelled_leaves_nothing(instance: ModelInstance) -> None:
    session = session_of(instance, seed=5)
    handle = session.act()
    for _ in range(4):
        session.engine.tick()
    handle.cancel()
    drain(session.engine)
    assert (session.engine.ledger.tickets, session.engine.caches.stats().slab_bytes) == (0, 0)
    assert (session.chunks, session.state) == (0, "open")
    assert_same(acted(session, 2), acted(session_of(instance, seed=5), 2))


def test_an_act_may_rest_and_be_cancelled_there(instance: ModelInstance) -> None:
    session = session_of(instance, seed=5)
    first = acted(session, 4)
    for cancels in (False, True):
        handle = session.act(chunks=3)
        for _ in range(9):
            session.engine.tick()
        handle.suspend()
        session.engine.tick()
        assert session.engine.caches.stats().slab_bytes == 0
        if cancels:
            handle.cancel()
        handle.resume()
        drain(session.engine)
        if not cancels:
            first.append(handle.result())
    assert session.engine.ledger.tickets == 0
    assert_same(first + acted(session, 1), acted(session_of(instance, seed=5), 4, 3, 1))


# -- several worlds


def test_sessions_do_not_smear(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    sessions = [session_of(instance, engine, seed=seed) for seed in (1, 2, 3)]
    results: list[list[Artifact]] = [[] for _ in sessions]
    for chunks in (1, 2, 2):
        handles = [session.act(chunks=chunks) for session in sessions]
        beside = engine.submit(replace(REQUEST, frames=9), instance)
        drain(engine)
        beside.result()
        for row, handle in zip(results, handles, strict=True):
            row.append(handle.result())
    for seed, row in zip((1, 2, 3), results, strict=True):
        assert_same(row, acted(session_of(instance, seed=seed), 1, 2, 2))


def test_a_cancelled_act_of_one_world_does_not_move_another(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    one, other = (session_of(instance, engine, seed=seed) for seed in (1, 2))
    acted(one, 3)
    kept = acted(other, 3)
    doomed, handle = one.act(chunks=2), other.act(chunks=2)
    for _ in range(8):
        engine.tick()
    doomed.cancel()
    drain(engine)
    assert_same([*kept, handle.result()], acted(session_of(instance, seed=2), 3, 2))


def test_a_fork_goes_its_own_way(instance: ModelInstance) -> None:
    session = session_of(instance, seed=5)
    first = acted(session, 3)
    twin = session.fork()
    assert (twin.chunks, twin.frames, twin.seed) == (3, 9, 5)
    assert_same(acted(twin, 2), acted(session, 2))
    acted(twin, 1)
    assert (twin.chunks, session.chunks) == (6, 5)
    twin.close()
    assert_same([*first, *acted(session.fork(), 1)], [*first, *acted(session, 1)])


def test_suspend_frees_everything_and_resume_is_the_same_to_the_bit(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    session = session_of(instance, engine, seed=5)
    first = acted(session, 4)
    assert engine.caches.stats().slab_bytes > 0
    assert engine.ledger.tickets == 1
    held = engine.ledger.used
    assert held.cache_bytes > 0
    assert (held.seconds, held.slots, held.weights) == (0, 0, ())
    session.suspend()
    assert (engine.ledger.tickets, engine.caches.stats().slab_bytes, session.state) == (0, 0, "suspended")
    with pytest.raises(UserError, match="suspended; call resume"):
        session.act()
    session.resume()
    assert_same(first + acted(session, 2), acted(session_of(instance, seed=5), 4, 2))


@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_saved_session_goes_on_elsewhere_to_the_bit(folder: Path, instance: ModelInstance, before: int) -> None:
    session = session_of(instance, seed=5)
    acted(session, *([before] if before else []))
    data = session.save()
    again = load(folder, window=2, sinks=1)
    loaded = WorldModelSession.load(data, Engine(cache_bytes=0), again)
    assert (loaded.chunks, loaded.prompt, loaded.seed) == (before, PROMPT, 5)
    assert_same(acted(loaded, 1, 2), acted(session, 1, 2))
    with pytest.raises(UserError, match="was saved on the card"):
        WorldModelSession.load(data, Engine(), load(folder, window=3))
    with pytest.raises(UserError, match="no saved session"):
        WorldModelSession.load(b"nothing", Engine(), again)


# -- admission


def needs(instance: ModelInstance) -> Any:
    engine = Engine(cache_bytes=0)
    session = session_of(instance, engine, seed=0)
    handle = session.act()
    return handle.demand


def test_an_idle_world_gives_its_bytes_to_whoever_waits_and_comes_back(instance: ModelInstance) -> None:
    one = needs(instance)
    engine = Engine(cache_bytes=0, budget=Budget(cache_bytes=one.cache_bytes))
    first, second = (session_of(instance, engine, seed=seed) for seed in (1, 2))
    results: tuple[list[Artifact], list[Artifact]] = ([], [])
    for _ in range(3):
        results[0].extend(acted(first, 1))
        results[1].extend(acted(second, 1))
        assert engine.caches.stats().slab_bytes <= one.cache_bytes
        assert engine.ledger.used.cache_bytes <= one.cache_bytes
    for seed, row in zip((1, 2), results, strict=True):
        assert_same(row, acted(session_of(instance, seed=seed), 1, 1, 1))
    both = [first.act(), second.act()]
    drain(engine)
    assert all(handle.result().latents.shape[1] == 1 for handle in both)


def test_worlds_whose_acts_wait_do_not_hold_up_those_who_need_their_bytes(instance: ModelInstance) -> None:
    """Both hold their bytes and wait for a place behind a request that needs the bytes of both."""
    one = needs(instance)
    budget = Budget(cache_bytes=2 * one.cache_bytes, slots=1)
    engine = Engine(cache_bytes=0, budget=budget)
    engine.ledger.max_bypass = 0
    sessions = [session_of(instance, engine, seed=seed) for seed in (1, 2)]
    for session in sessions:
        acted(session, 1)
    running = engine.submit(replace(REQUEST, frames=5), instance)
    engine.tick()
    large = engine.submit(replace(REQUEST, frames=13), load_like(instance, window=6))
    handles = [session.act() for session in sessions]
    drain(engine)
    assert [h.result().latents.shape[1] for h in (running, large, *handles)] == [2, 4, 1, 1]
    for session, seed in zip(sessions, (1, 2), strict=True):
        assert_same(acted(session, 1), acted(session_of(instance, seed=seed), 1, 1, 1)[2:])


def load_like(instance: ModelInstance, **options: Any) -> ModelInstance:
    return instance.view({}, card=with_rollout(instance.card, sinks=0, **options))


def test_a_larger_act_asks_for_more(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    session = session_of(instance, engine, seed=5)
    acted(session, 1)
    small = engine.ledger.used
    acted(session, 4)
    assert engine.ledger.used.resident_bytes > small.resident_bytes
    assert_same(acted(session, 1), acted(session_of(instance, seed=5), 5, 1)[1:])
    tight = Engine(cache_bytes=0, budget=Budget(cache_bytes=small.cache_bytes))
    with pytest.raises(AdmissionInfeasible):
        session_of(instance, tight, seed=5).act(chunks=3)


def test_acts_share_the_engine_with_requests(instance: ModelInstance) -> None:
    """Rounds give each a step: neither waits for the other's end."""
    engine = Engine(cache_bytes=0)
    session = session_of(instance, engine, seed=5)
    acted(session, 1)
    beside = engine.submit(replace(REQUEST, frames=21), instance)
    for _ in range(4):
        engine.tick()
    handle = session.act()
    had = beside.progress[0]
    while not handle.done:
        engine.tick()
    assert had < beside.progress[0] < beside.progress[1]
    drain(engine)
    assert beside.result().latents.shape[1] == 6


def test_a_session_from_another_thread(instance: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    with EngineThread(engine), session_of(instance, engine, seed=5) as session:
        results = [session.act().result(timeout=60) for _ in range(4)]
    assert_same(results, acted(session_of(instance, seed=5), 4))
    assert (engine.ledger.tickets, engine.caches.stats().slab_bytes) == (0, 0)


# -- mistakes


def test_what_a_session_refuses(folder: Path, instance: ModelInstance) -> None:
    session = session_of(instance, seed=5)
    handle = session.act()
    for call in (session.act, session.suspend, session.fork, session.save):
        with pytest.raises(UserError, match="an act under way"):
            call()
    session.close()
    with pytest.raises(Cancelled, match="session was closed"):
        handle.result()
    session.close()
    for call in (session.act, session.suspend, session.resume, session.fork, session.save):
        with pytest.raises(UserError, match="is closed"):
            call()
    assert (session.engine.ledger.tickets, session.engine.caches.stats().slab_bytes) == (0, 0)
    for chunks in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="chunks: got"):
            session.act(chunks=chunks)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="got 'left', expected none: card"):
        session.act("left")
    with pytest.raises(UserError, match=r"window: got none.*card.window="):
        session_of(load(folder))
    plain = wan_card(folder)
    with pytest.raises(UserError, match="rolls out in chunks"):
        session_of(ModelInstance.from_folder(plain, folder, tasks=()))
    with pytest.raises(UserError, match="height"):
        session_of(instance, height=15)
