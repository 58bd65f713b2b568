"""Weights under a budget: what is claimed fits together, what is idle sleeps when its room is needed."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cards.card import ModelCard
from inference.admission import AdmissionInfeasible, Budget, Demand, Ledger, Ticket, Waiting
from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.request import Request
from inference.residency import NoRoom
from tests.support.tiny_clip import save_tiny_clip
from tests.support.tiny_qwen3 import save_tiny_qwen3

LATENTS = Request(prompt="a red circle", seed=1, steps=2, guidance=1.0, frames=5, height=16, width=16, output="latents")
TEXT = Request(prompt="abc", task="text", seed=1, max_tokens=3, temperature=0.0)
COMPONENTS = ("text_encoder", "transformer", "vae")


@pytest.fixture(autouse=True)
def nap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights sleep in a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def card(wan_folder: Path) -> ModelCard:
    found = card_of(wan_folder)
    short = found.sampling.model_copy(update={"max_sequence_length": 16})
    return found.model_copy(update={"sampling": short})


@pytest.fixture(scope="module")
def lm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Smaller than the smallest component of the clip model."""
    small: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True, **small)


@pytest.fixture(scope="module")
def sizes(card: ModelCard) -> dict[str, int]:
    instance = ModelInstance.load(card)
    return {cid: instance.weights_bytes(cid) for cid in COMPONENTS}


def finish(engine: Engine, limit: int) -> None:
    """To the end; what is in memory stays within the budget after every round."""
    while engine.tick():
        awake = engine.figures()["awake_bytes"]
        assert awake is not None and awake <= limit
    assert engine.ledger.used == Demand(slots=0)


# -- the figures


def test_bytes_are_known_before_anything_is_built(
    card: ModelCard, lm_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for found in (card, card_of(lm_folder), card_of(save_tiny_clip(tmp_path_factory.mktemp("clip")))):
        instance = ModelInstance.load(found)
        for cid in instance.residents:
            before, key = instance.weights_bytes(cid), instance.resident(cid).key
            assert not instance.built(cid)
            instance.build([cid])
            assert instance.resident_bytes(cid) == before
            instance.sleep(cid)
            assert instance.resident_bytes(cid) == 0
            assert instance.weights_bytes(cid) == before
            assert instance.resident(cid).key is key
            assert Resident(instance.residents[cid].peek(), adapter="").key is key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bytes_in_a_short_dtype_are_a_bound(card: ModelCard, dtype: str) -> None:
    components = {cid: c.model_copy(update={"dtype": dtype}) for cid, c in card.components.items()}
    instance = ModelInstance.load(card.model_copy(update={"components": components}))
    for cid in COMPONENTS:
        planned = instance.weights_bytes(cid)
        instance.build([cid])
        assert instance.resident_bytes(cid) <= planned <= 1.3 * instance.resident_bytes(cid)


# -- the ledger


def test_weights_that_several_claim_count_once_and_until_the_last_lets_go() -> None:
    ledger = Ledger(Budget(weights_bytes=10))
    both = [ledger.admit(Demand(weights=(("a", 4), ("b", 4)))), ledger.admit(Demand(weights=(("a", 4),)))]
    assert ledger.used.weights_bytes == 8
    waits = ledger.admit(Demand(weights=(("b", 4), ("c", 4))))
    assert isinstance(waits, Waiting)
    assert isinstance(both[0], Ticket) and isinstance(both[1], Ticket)
    both[1].refund()
    both[1].refund()
    assert ledger.claimed("a") and ledger.ready() == []
    both[0].refund()
    assert ledger.ready() == [waits]
    assert {key for key, _ in ledger.used.weights} == {"b", "c"}
    with pytest.raises(AdmissionInfeasible, match="weights_bytes: needs") as failure:
        ledger.admit(Demand(weights=(("a", 7), ("d", 4))))
    assert failure.value.shortfalls == (("weights_bytes", 11, 10),)


@pytest.mark.parametrize("seed", range(5))
def test_claims_add_up_however_they_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {key: rng.randint(0, 5) for key in "abcdef"}
    ledger = Ledger(Budget(weights_bytes=12, slots=6))
    held: list[tuple[Ticket, tuple[str, ...]]] = []
    line: dict[Waiting, tuple[str, ...]] = {}
    for _ in range(400):
        if rng.random() < 0.5:
            keys = tuple(rng.sample(sorted(sizes), rng.randint(0, 3)))
            demand = Demand(weights=tuple((key, sizes[key]) for key in keys))
            try:
                place = ledger.admit(demand)
            except AdmissionInfeasible:
                assert demand.weights_bytes > 12
                continue
            if isinstance(place, Ticket):
                held.append((place, keys))
            else:
                line[place] = keys
        elif held:
            held.pop(rng.randrange(len(held)))[0].refund()
        for place in ledger.ready():
            assert place.ticket is not None
            held.append((place.ticket, line.pop(place)))
        claimed = {key for _, keys in held for key in keys}
        assert ledger.used.weights_bytes == sum(sizes[key] for key in claimed) <= 12
    while held:
        held.pop()[0].refund()
        for place in ledger.ready():
            assert place.ticket is not None
            held.append((place.ticket, line.pop(place)))
    assert line == {} and ledger.used == Demand(slots=0)


# -- the engine


def test_what_never_fits_is_refused_with_figures_and_nothing_is_built(card: ModelCard, sizes: dict[str, int]) -> None:
    need = sizes["text_encoder"] + sizes["transformer"]
    engine = Engine(budget=Budget(weights_bytes=need - 1))
    instance = engine.load(card)
    with pytest.raises(AdmissionInfeasible, match=r"weights_bytes: needs .* MiB, budget .* MiB") as failure:
        engine.submit(LATENTS, instance)
    assert failure.value.shortfalls == (("weights_bytes", need, need - 1),)
    with pytest.raises(AdmissionInfeasible, match="weights_bytes"):
        engine.load(card, tasks=("t2v",))
    assert not any(instance.built(cid) for cid in COMPONENTS)
    fits = Engine(budget=Budget(weights_bytes=need))
    handle = fits.submit(LATENTS, fits.load(card))
    finish(fits, need)
    assert handle.result().latents.isfinite().all()


def test_a_second_model_waits_and_the_idle_one_sleeps_for_it(
    card: ModelCard, lm_folder: Path, sizes: dict[str, int]
) -> None:
    limit = sizes["text_encoder"] + sizes["transformer"]
    engine = Engine(budget=Budget(weights_bytes=limit))
    wan, lm = engine.load(card), engine.load(lm_folder)
    other = replace(LATENTS, prompt="the left square")
    expected = (Engine().run(LATENTS, wan).latents, Engine().run(TEXT, lm).text, Engine().run(other, wan).latents)
    for cid in ("text_encoder", "transformer"):
        wan.sleep(cid)
    lm.sleep("lm")
    first = engine.submit(LATENTS, wan)
    engine.tick()
    second, third = engine.submit(TEXT, lm), engine.submit(replace(LATENTS, seed=2), wan)
    engine.tick()
    assert (first.state, second.state, third.state) == ("running", "waiting", "running")
    assert engine.ledger.used.weights_bytes == limit
    finish(engine, limit)
    assert torch.equal(first.result().latents, expected[0]) and second.result().text == expected[1]
    assert not lm.asleep("lm")
    assert wan.asleep("text_encoder") and not wan.asleep("transformer")  # the one that was needed longest ago
    assert torch.equal(engine.run(LATENTS, wan).latents, expected[0])
    assert wan.asleep("text_encoder")  # the prompt's encoding was kept
    again = engine.submit(other, wan)
    finish(engine, limit)
    assert torch.equal(again.result().latents, expected[2])
    assert lm.asleep("lm")


def test_loading_for_a_task_makes_room_too(card: ModelCard, lm_folder: Path, sizes: dict[str, int]) -> None:
    limit = sum(sizes.values())
    engine = Engine(budget=Budget(weights_bytes=limit))
    lm = engine.load(lm_folder, tasks=("text",))
    assert lm.built("lm") and not lm.asleep("lm")
    wan = engine.load(card, tasks=("t2v",))
    assert all(wan.built(cid) and not wan.asleep(cid) for cid in COMPONENTS)
    assert lm.asleep("lm")
    assert engine.figures()["awake_bytes"] == limit


def test_a_component_that_cannot_sleep_fails_the_one_that_needs_its_room(
    card: ModelCard, lm_folder: Path, sizes: dict[str, int]
) -> None:
    limit = sum(sizes.values())
    engine = Engine(budget=Budget(weights_bytes=limit))
    wan, lm = engine.load(card, tasks=("t2v",)), engine.load(lm_folder)
    with wan.resident("vae").active(), wan.resident("transformer").active(), wan.resident("text_encoder").active():
        handle = engine.submit(TEXT, lm)
        finish(engine, limit)
        with pytest.raises(NoRoom, match=r"lm: no room for a component of .* bytes .* 0 idle; wait"):
            handle.result()
    later = engine.submit(TEXT, lm)
    finish(engine, limit)
    assert later.result().text


def test_a_run_passes_by_the_budget_and_what_it_left_sleeps_for_the_next_request(
    card: ModelCard, lm_folder: Path, sizes: dict[str, int]
) -> None:
    engine = Engine(budget=Budget(weights_bytes=sizes["transformer"]))
    wan, lm = engine.load(card), engine.load(lm_folder)
    engine.run(LATENTS, wan)
    assert engine.figures()["awake_bytes"] >= sizes["transformer"]
    handle = engine.submit(TEXT, lm)
    finish(engine, sizes["transformer"])
    assert handle.result().text


def test_without_a_budget_nothing_sleeps_and_nothing_is_counted(card: ModelCard) -> None:
    engine = Engine()
    wan = engine.load(card, tasks=("t2v",))
    handle = engine.submit(LATENTS, wan)
    assert handle.demand.weights == ()
    while engine.tick():
        pass
    assert handle.result().latents.isfinite().all()
    assert not any(wan.asleep(cid) for cid in COMPONENTS)
    assert engine.figures()["awake_bytes"] is None
