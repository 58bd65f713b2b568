"""Placement and transfer: pure decisions over fake pools, and the engine that carries them out."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError
from inference.admission import Budget
from inference.carrier import Carrier
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.load import card_of
from inference.request import Request
from inference.scheduling.placement import NoRoom, Piece, Pool, place, pools_of, serving
from inference.scheduling.policy import Entry
from inference.scheduling.transfer import ASLEEP, DISK, PRIOR_BYTES_PER_SECOND, Bandwidths, Move, moves_of
from loops.loop import ModelCall, WorkUnit

PIXELS = Request(prompt="a red circle", seed=1, steps=3, guidance=3.0, frames=5, height=16, width=16)
LATENTS = replace(PIXELS, output="latents")
GPU = Pool("gpu", "cpu", frozenset({"device"}), 10)
HOST = Pool("host", "cpu", frozenset({"cpu"}))


def piece(key: str, size: int, **fields: Any) -> Piece:
    return Piece(key, size, **fields)


# -- placement


def test_the_pools_of_a_process() -> None:
    (only,) = pools_of("cpu", 5)
    assert only.serves == {"device", "cpu"} and only.limit == 5
    own, host = pools_of("cuda:1", 5)
    assert (own.device, own.limit) == ("cuda:1", 5) and (host.device, host.limit) == ("cpu", None)
    assert serving("cpu", (own, host)) == [host] and serving("device", (own, host)) == [own]
    with pytest.raises(UserError, match=r"expected a pool that serves it; the pools: cuda:1 \(device\)"):
        serving("cpu", (own,))


def test_components_go_where_they_are_served() -> None:
    got = place([piece("encoder", 40, wish="cpu"), piece("net", 8)], [], (GPU, HOST))
    assert got.homes == {"encoder": "host", "net": "gpu"}
    assert got.come == ("encoder", "net") and got.go == ()


def test_what_is_there_neither_comes_nor_moves() -> None:
    there = piece("net", 8, at="gpu", here=True)
    got = place([there], [there], (replace(GPU, name="larger", limit=99), GPU))
    assert got.homes == {"net": "gpu"} and got.come == () and got.go == ()


def test_the_one_needed_longest_ago_goes_and_no_more_than_must() -> None:
    others = [
        piece("a", 3, at="gpu", here=True, needed=5),
        piece("b", 3, at="gpu", here=True, needed=1),
        piece("c", 3, at="gpu", here=True, needed=0, pinned=True),
        piece("d", 9, at="gpu", here=False, needed=0),
    ]
    assert place([piece("net", 4)], others, (GPU, HOST)).go == ("b",)
    assert place([piece("net", 5)], others, (GPU, HOST)).go == ("b", "a")
    assert place([piece("net", 1)], others, (GPU, HOST)).go == ()
    with pytest.raises(NoRoom, match="8 bytes of weights: gpu holds 9 of 10, 6 idle"):
        place([piece("net", 8)], others, (GPU, HOST))


def test_of_several_pools_the_emptiest_that_fits_as_it_is() -> None:
    pools = (replace(GPU, name="one"), replace(GPU, name="two"), HOST)
    others = [piece("a", 6, at="one", here=True), piece("b", 5, at="two", here=True)]
    assert place([piece("net", 5)], others, pools).homes == {"net": "two"}
    assert place([piece("net", 5, at="one")], others, pools).go == ("a",)  # where it was placed first
    got = place([piece("x", 4), piece("y", 4)], others, pools)
    assert got.homes == {"x": "two", "y": "one"} and got.go == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_placement_fits_and_leaves_what_is_pinned(seed: int) -> None:
    rng = random.Random(seed)
    pools = (replace(GPU, name="one"), replace(GPU, name="two", limit=rng.randint(5, 15)), HOST)
    limits = {pool.name: pool.limit for pool in pools}
    pieces: dict[str, Piece] = {}
    for turn in range(100):
        keys = rng.sample("abcdefgh", rng.randint(1, 3))
        step = [pieces.get(key, piece(key, rng.randint(0, 6), wish=rng.choice(["device", "cpu"]))) for key in keys]
        pinned = {key for key in pieces if rng.random() < 0.2}
        others = [replace(other, pinned=other.key in pinned) for other in pieces.values()]
        try:
            got = place(step, others, pools)
        except NoRoom:
            continue
        assert not set(got.go) & (pinned | set(keys))
        for key in got.go:
            pieces[str(key)] = replace(pieces[str(key)], here=False)
        for one in step:
            pieces[str(one.key)] = replace(one, at=got.homes[one.key], here=True, needed=turn)
        for name, limit in limits.items():
            held = sum(p.size for p in pieces.values() if p.here and p.at == name)
            assert limit is None or held <= limit
        again = place([pieces[key] for key in keys], list(pieces.values()), pools)
        assert again.come == () and again.go == () and again.homes == got.homes


# -- transfer


def test_the_moves_of_a_placement() -> None:
    step = [piece("net", 8, lies=ASLEEP), piece("encoder", 40, wish="cpu", lies=DISK)]
    others = [piece("old", 3, at="gpu", here=True)]
    moves = moves_of(place(step, others, (GPU, HOST)), [*step, *others])
    assert moves == (
        Move("old", 3, "gpu", ASLEEP),
        Move("net", 8, ASLEEP, "gpu"),
        Move("encoder", 40, DISK, "host"),
    )
    transfer = Bandwidths().transfer(moves)
    assert transfer.unit is WorkUnit.TRANSFER and transfer.size == 51
    assert transfer.seconds == pytest.approx(51 / PRIOR_BYTES_PER_SECOND)


def test_bandwidth_is_measured_each_way_and_a_small_move_says_little() -> None:
    known = Bandwidths()
    for _ in range(3):
        known.observe(Move("net", 1000, ASLEEP, "gpu"), 0.5)
    known.observe(Move("net", 1000, "gpu", ASLEEP), 2.0)
    known.observe(Move("net", 0, "gpu", "host"), 1.0)
    assert known.transfer((Move("x", 500, ASLEEP, "gpu"),)).seconds == pytest.approx(0.25)
    assert known.transfer((Move("x", 500, "gpu", ASLEEP),)).seconds == pytest.approx(1.0)
    assert known.rate("gpu", "host") == PRIOR_BYTES_PER_SECOND
    known.observe(Move("ids", 1, ASLEEP, "gpu"), 0.01)
    assert known.rate(ASLEEP, "gpu") == pytest.approx(2000, rel=0.02)
    for _ in range(30):
        known.observe(Move("net", 1000, ASLEEP, "gpu"), 0.1)
    assert known.rate(ASLEEP, "gpu") == pytest.approx(10_000, rel=0.01)
    assert {(row["source"], row["target"]) for row in known.figures()} == {(ASLEEP, "gpu"), ("gpu", ASLEEP)}


# -- the engine


@pytest.fixture(autouse=True)
def nap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights sleep in a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def card(wan_folder: Path) -> ModelCard:
    found = card_of(wan_folder)
    short = found.sampling.model_copy(update={"max_sequence_length": 16})
    return found.model_copy(update={"sampling": short})


def on_host(card: ModelCard, *components: str) -> ModelCard:
    changed = {cid: card.components[cid].model_copy(update={"placement": "cpu"}) for cid in components}
    return card.model_copy(update={"components": {**card.components, **changed}})


def two_pools(card: ModelCard) -> ModelInstance:
    """An instance over two logical pools, which are both this machine's memory."""
    return ModelInstance.load(card, pools=(replace(GPU, limit=None), HOST))


def test_on_a_cpu_both_placements_are_one_pool(card: ModelCard) -> None:
    instance = Engine().load(on_host(card, "text_encoder"))
    assert instance.elsewhere == {}
    assert instance.device_of("text_encoder") == torch.device("cpu")


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_components_elsewhere_give_the_same_bits_and_their_tensors_move(card: ModelCard, batching: str) -> None:
    requests = [PIXELS, replace(PIXELS, seed=2)]
    here = Engine(batching=batching)  # type: ignore[arg-type]
    expected = here.run_interleaved(requests, here.load(card))
    engine = Engine(batching=batching, cache_bytes=0)  # type: ignore[arg-type]
    instance = two_pools(on_host(card, "text_encoder", "vae"))
    assert set(instance.elsewhere) == {"text_encoder", "vae"}
    handles = [engine.submit(request, instance) for request in requests]
    while engine.tick():
        pass
    for handle, artifact in zip(handles, expected, strict=True):
        assert torch.equal(handle.result().latents, artifact.latents)
        assert torch.equal(handle.result().video, artifact.video)  # type: ignore[arg-type]
    links = {(row["source"], row["target"]) for row in engine.figures()["transfers"]}
    assert {("cpu", "host"), ("host", "cpu")} <= links


def test_nothing_is_carried_for_an_instance_on_one_pool(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("carried")

    for name in ("there", "back", "ahead"):
        monkeypatch.setattr(Carrier, name, refuse)
    engine = Engine()
    handle = engine.submit(PIXELS, engine.load(card))
    while engine.tick():
        pass
    assert handle.result().latents.isfinite().all()


def test_the_result_of_a_component_elsewhere_is_back_on_the_instances_device(card: ModelCard) -> None:
    """Another device than the CPU cannot compute here; ``meta`` shows where tensors would be."""
    instance = two_pools(on_host(card, "text_encoder"))
    instance.device = torch.device("meta")
    seen: dict[str, torch.device] = {}

    def encode(module: Any, tensors: Mapping[str, Tensor], static: Mapping[str, Any]) -> Tensor:
        seen.update({name: tensor.device for name, tensor in tensors.items()})
        return torch.zeros(1, 2, 3)

    instance._operations = {("text_encoder", "encode"): encode}
    ids = torch.zeros(1, 4, dtype=torch.long)
    call = ModelCall("text_encoder", "encode", {"ids": ids, "mask": ids})
    assert instance.call(call).device.type == "meta"
    assert instance.compute(call).device.type == "cpu"
    assert {device.type for device in seen.values()} == {"cpu"}


def charged(engine: Engine) -> list[float]:
    """What each step was charged with, as it is taken."""
    seconds: list[float] = []
    served = engine.scheduler.served

    def note(entry: Entry, taken: float | None = None) -> None:
        seconds.append(entry.step_seconds)
        served(entry, taken)

    engine.scheduler.served = note  # type: ignore[method-assign, assignment]
    return seconds


def test_waking_is_a_transfer_that_the_step_pays_for(card: ModelCard) -> None:
    engine = Engine()
    instance = engine.load(card, tasks=("t2v",))
    engine.run(LATENTS, instance)
    instance.sleep("transformer")
    size = instance.weights_bytes("transformer")
    seconds = charged(engine)
    handle = engine.submit(LATENTS, instance)
    while engine.tick():
        pass
    assert handle.result().latents.isfinite().all()
    first, *later = seconds
    assert first - later[0] == pytest.approx(size / PRIOR_BYTES_PER_SECOND, rel=0.5, abs=later[0])
    (row,) = (row for row in engine.figures()["transfers"] if row["source"] == ASLEEP)
    assert row["target"] == "cpu"
    measured = row["bytes_per_second"]
    instance.sleep("transformer")
    ahead = engine._residency.ahead(instance, ["transformer"])
    assert ahead.moves == (Move(instance.resident("transformer").key, size, ASLEEP, "cpu"),)
    assert ahead.seconds == pytest.approx(size / measured)
    asleep = engine.submit(LATENTS, instance).demand.seconds
    instance.wake("transformer")
    assert engine.submit(LATENTS, instance).demand.seconds == asleep  # admission is of forwards alone


def test_a_component_is_built_in_its_step_and_not_before(card: ModelCard) -> None:
    engine = Engine(cache_bytes=0)
    instance = engine.load(card)
    handle = engine.submit(PIXELS, instance)
    built = []
    while engine.tick():
        built.append([cid for cid in instance.residents if instance.built(cid)])
    assert handle.result().latents.isfinite().all()
    assert built[0] == ["text_encoder"]
    assert "vae" not in built[-2] and "vae" in built[-1]


def test_who_makes_room_pays_for_what_goes(card: ModelCard) -> None:
    sizes = {cid: ModelInstance.load(card).weights_bytes(cid) for cid in ("text_encoder", "transformer", "vae")}
    engine = Engine(budget=Budget(weights_bytes=sum(sizes.values())), cache_bytes=0)
    first, second = engine.load(card, tasks=("t2v",)), engine.load(card)
    engine.submit(PIXELS, second)
    assert list(engine._intake.settle()) == []
    ahead = engine._residency.ahead(second, ["text_encoder"])
    assert [(move.source, move.target) for move in ahead.moves] == [("cpu", ASLEEP), (DISK, "cpu")]
    assert ahead.moves[0].key == first.resident("text_encoder").key
    while engine.tick():
        pass
    links = {(row["source"], row["target"]) for row in engine.figures()["transfers"]}
    assert {("cpu", ASLEEP), (DISK, "cpu")} <= links
