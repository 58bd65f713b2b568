"""The mixed interleave gate: clips, texts, scores and decodes by tiles in one engine, step by step, are what each is
alone. Bit for bit with batching off; within the cards' own tolerances where equal calls share forwards."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.wan21.card import with_vae_tiles
from inference.artifact import Artifact
from inference.books import Books
from inference.engine import Engine
from inference.extend.observer import Forward, Observer, Step
from inference.instance import ModelInstance
from inference.load import card_of
from inference.parity.interleave import artifact_difference, worst
from inference.parity.requests import noise_frames
from inference.request import Request
from loops.loop import Profile, WorkUnit
from tests.support.tiny_clip import save_tiny_clip
from tests.support.tiny_qwen3 import save_tiny_qwen3

KINDS = (WorkUnit.DIFFUSION_STEP, WorkUnit.AR_TOKEN, WorkUnit.REWARD_BATCH)
KV_BYTES = 2**20


@dataclass(frozen=True)
class Work:
    """A request and whose it is."""

    kind: str
    request: Request
    instance: ModelInstance


class Watch(Observer):
    """The units in the order of their steps, and the rows of every forward."""

    def __init__(self) -> None:
        self.units: list[WorkUnit] = []
        self.rows: dict[str, list[int]] = {}

    def on_step(self, step: Step) -> None:
        self.units.append(step.plan.unit)

    def on_forward(self, forward: Forward) -> None:
        self.rows.setdefault(forward.method, []).append(forward.rows)

    def span(self, unit: WorkUnit) -> range:
        """From the first step of a unit to its last."""
        first = self.units.index(unit)
        return range(first, len(self.units) - self.units[::-1].index(unit))


@pytest.fixture(scope="module")
def load(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Work]:
    """4 clips (two with pixels, by tiles), 8 texts, 6 scores: all unlike each other."""
    loader = Engine()
    card = card_of(wan_folder)
    small = {"frames": 5, "height": 16, "width": 16, "max_sequence_length": 16}
    card = card.model_copy(update={"sampling": card.sampling.model_copy(update=small)})
    wan = loader.load(with_vae_tiles(card, tile=(12, 12), stride=(8, 8)))
    lm = loader.load(save_tiny_qwen3(tmp_path_factory.mktemp("qwen3")))
    clip = loader.load(save_tiny_clip(tmp_path_factory.mktemp("clip")))
    first = Request(prompt="a red circle", seed=1, steps=3, guidance=1.0, output="latents")
    kept: dict[str, Any] = {"profile": Profile.ROLLOUT, "capture": ("trajectory", "velocities")}
    clips = (
        first,
        replace(first, prompt="two blue squares", seed=2, steps=5, guidance=3.0, solver="euler", output="video"),
        replace(first, prompt="", seed=3, steps=4, guidance=2.0, solver="dpm2", output="video"),
        replace(first, prompt="the green triangle moves left", seed=4, steps=5, solver="euler", **kept),
    )
    texts = tuple(
        Request(
            prompt="the quick brown fox jumps over"[: 1 + 4 * i],
            task="text",
            seed=i,
            max_tokens=6 + 2 * i,
            temperature=(0.0, 1.0)[i % 2],
            profile=Profile.ROLLOUT,
        )
        for i in range(8)
    )
    sizes = ((1, 16, 16), (9, 20, 24), (17, 24, 16), (3, 48, 20), (30, 16, 16), (8, 20, 24))
    scores = tuple(
        Request(
            prompt=("a red cube", "blue", "a red cube")[i % 3],
            task="score",
            frames=size[0],
            inputs={"pixels": noise_frames(*size, seed=i)},
        )
        for i, size in enumerate(sizes)
    )
    return [
        *(Work("clip", request, wan) for request in clips),
        *(Work("text", request, lm) for request in texts),
        *(Work("score", request, clip) for request in scores),
    ]


@pytest.fixture(scope="module")
def alone(load: list[Work]) -> list[Artifact]:
    """Each by itself, in an engine of its own that has cached nothing."""
    return [Engine(cache_bytes=0).run(work.request, work.instance) for work in load]


def together(engine: Engine, load: Sequence[Work], order: Sequence[int]) -> list[Artifact]:
    """All of them in one engine; half are there at the start, the others come one a round."""
    waiting = list(order)
    handles = {}
    for i in itertools.islice(order, len(order) // 2):
        handles[i] = engine.submit(load[i].request, load[i].instance)
        waiting.remove(i)
    while engine.tick() or waiting:
        if waiting:
            i = waiting.pop(0)
            handles[i] = engine.submit(load[i].request, load[i].instance)
    return [handles[i].result() for i in range(len(load))]


def differences(load: Sequence[Work], ours: Sequence[Artifact], theirs: Sequence[Artifact]) -> dict[str, float]:
    """The largest by kind of request."""
    pairs = list(zip(load, ours, theirs, strict=True))
    return {
        kind: worst(artifact_difference(a, b) for work, a, b in pairs if work.kind == kind)
        for kind in ("clip", "text", "score")
    }


EXACT = {"clip": 0.0, "text": 0.0, "score": 0.0}
ENGINES: dict[str, Callable[..., Engine]] = {
    "fair": Engine,
    "fifo": lambda **options: Engine(policy="fifo", **options),
    "deadline": lambda **options: Engine(policy="deadline", **options),
    "kv pool": lambda **options: Engine(kv_bytes=KV_BYTES, **options),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [0, 1])
def test_interleaved_is_serial_to_the_bit(load: list[Work], alone: list[Artifact], engine: str, seed: int) -> None:
    order = random.Random(seed).sample(range(len(load)), len(load))
    watch = Watch()
    got = together(ENGINES[engine](observers=(watch,)), load, order)
    assert differences(load, got, alone) == EXACT
    assert set(watch.rows["score"]) == {1, 3, 6, 8}  # a request's own frames and no others
    assert set(watch.rows["velocity"]) == {1}
    assert set(watch.rows["next_logits"]) == {1}


def test_the_kinds_do_take_turns(load: list[Work], alone: list[Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the gate above is about interleaving: every kind steps within the span of every other, and tiles, which
    come last, within that of the texts."""
    monkeypatch.setattr(Books, "observe", lambda *_: None)  # shares by the cards' cost models, not by the clock
    watch = Watch()
    together(Engine(observers=(watch,)), load, range(len(load)))
    counts = Counter(watch.units)
    assert counts[WorkUnit.AR_PREFILL] == 8
    assert counts[WorkUnit.DIFFUSION_STEP] == 3 + 5 + 4 + 5
    assert counts[WorkUnit.REWARD_BATCH] == sum(
        -(-len(w.request.inputs["pixels"]) // 8) for w in load if w.request.inputs
    )
    assert counts[WorkUnit.VAE_TILE] == 2 * 4
    within = [*itertools.permutations(KINDS, 2), (WorkUnit.VAE_TILE, WorkUnit.AR_TOKEN)]
    for unit, other in within:
        assert any(watch.units[i] is unit for i in watch.span(other)), (unit, other)
    assert sum(a is not b for a, b in itertools.pairwise(watch.units)) > 20


@pytest.mark.parametrize("kv_bytes", [0, KV_BYTES])
def test_merged_forwards_stay_within_the_cards_tolerances(
    load: list[Work], alone: list[Artifact], kv_bytes: int
) -> None:
    watch = Watch()
    engine = Engine(batching="shape", kv_bytes=kv_bytes, observers=(watch,))
    got = together(engine, load, range(len(load)))
    found = differences(load, got, alone)
    for method, rows in sorted(watch.rows.items()):
        print(f"{method}: {len(rows)} forwards of {max(rows)} rows at most")
    print("largest difference of a merged run:", {kind: f"{value:.1e}" for kind, value in found.items()})
    for kind, value in found.items():
        tolerance = min(w.instance.card.parity.tolerances["C3"] for w in load if w.kind == kind)
        assert value <= tolerance, (kind, value)
    assert max(watch.rows["velocity"]) > 1
    assert max(watch.rows["score"]) > 8
    assert (max(watch.rows["next_logits"]) > 1) == (kv_bytes > 0)


def test_what_is_cancelled_or_fails_takes_no_other_kind_with_it(load: list[Work], alone: list[Artifact]) -> None:
    engine = Engine()
    broken = replace(load[4].request, max_tokens=10_000)
    doomed = [engine.submit(broken, load[4].instance), *(engine.submit(w.request, w.instance) for w in load[::5])]
    handles = [engine.submit(w.request, w.instance) for w in load]
    for _ in range(2):
        engine.tick()
    for handle in doomed:
        handle.cancel()
    while engine.tick():
        pass
    assert all(handle.done for handle in doomed)
    with pytest.raises(Exception, match="context holds 256"):
        doomed[0].result()
    got = [handle.result() for handle in handles]
    assert differences(load, got, alone) == EXACT


@pytest.mark.parametrize("kv_bytes", [0, KV_BYTES])
def test_what_was_suspended_goes_on_to_the_bit(load: list[Work], alone: list[Artifact], kv_bytes: int) -> None:
    engine = Engine(kv_bytes=kv_bytes)
    handles = [engine.submit(work.request, work.instance) for work in load]
    for _ in range(3):
        engine.tick()
    resting = {kind: next(h for w, h in zip(load, handles) if w.kind == kind and not h.done) for kind in EXACT}
    for handle in resting.values():
        handle.suspend()
    for _ in range(4):
        engine.tick()
    stopped = {kind: handle.progress for kind, handle in resting.items()}
    engine.tick()
    assert {kind: handle.state for kind, handle in resting.items()} == dict.fromkeys(EXACT, "suspended")
    assert {kind: handle.progress for kind, handle in resting.items()} == stopped
    assert all(done < total for done, total in stopped.values())
    for handle in resting.values():
        handle.resume()
    while engine.tick():
        pass
    assert differences(load, [handle.result() for handle in handles], alone) == EXACT


def test_the_gate_sees_a_request_that_depends_on_its_neighbours(load: list[Work], alone: list[Artifact]) -> None:
    """A module that remembers its last call, in each kind."""
    for kind, component in (("clip", "transformer"), ("text", "lm"), ("score", "clip")):
        module = next(w.instance.module(component) for w in load if w.kind == kind)
        part = {"clip": "proj_out", "text": "lm_head", "score": "visual_projection"}[kind]
        last: list[torch.Tensor] = []

        def hook(_module: Any, _args: Any, output: torch.Tensor, last: list[torch.Tensor] = last) -> torch.Tensor:
            previous, last[:] = list(last), [output]
            return output + 1e-3 * previous[0].mean() if previous else output

        handle = getattr(module, part).register_forward_hook(hook)
        try:
            found = differences(load, together(Engine(), load, range(len(load))), alone)
        finally:
            handle.remove()
        assert found[kind] > 0
        assert all(found[other] == 0 for other in found if other != kind)
