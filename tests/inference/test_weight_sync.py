"""Weights that change under a running engine: no request is served by half of each, and nothing is lost on the way."""

from __future__ import annotations

import copy
import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

import inference.weight_sync
from cards.card import ModelCard
from cards.errors import UserError
from inference.engine import Engine
from inference.handle import Handle
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from inference.request import Request
from inference.sleep import state_of
from inference.weight_sync import MODES, StoppedBySync, WeightSyncController
from tests.support.tiny_qwen3 import save_tiny_qwen3

BASE = Request(prompt="a red circle", seed=1, steps=4, guidance=1.0, frames=5, height=16, width=16, output="latents")
TEXT = Request(prompt="abcabc end", task="text", seed=1, max_tokens=8, temperature=1.0)
PART = "transformer"
Weights = dict[str, Tensor]


def card_at(folder: Path) -> ModelCard:
    card = card_of(folder)
    return card.model_copy(update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 16})})


@pytest.fixture(scope="module")
def new_folder(
    wan_folder: Path, make_wan_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Wan folder with another transformer."""
    folder = Path(shutil.copytree(wan_folder, tmp_path_factory.mktemp("new") / "model"))
    shutil.rmtree(folder / PART)
    shutil.copytree(make_wan_folder(seed=7) / PART, folder / PART)
    return folder


@pytest.fixture
def instance(wan_folder: Path) -> ModelInstance:
    return ModelInstance.load(card_at(wan_folder))


@pytest.fixture(scope="module")
def fresh(new_folder: Path) -> ModelInstance:
    """A fresh load of the new weights."""
    return ModelInstance.load(card_at(new_folder))


@pytest.fixture
def new(fresh: ModelInstance) -> Weights:
    return weights_of(fresh, PART)


def weights_of(instance: ModelInstance, component: str) -> Weights:
    return {name: value.clone() for name, value in instance.module(component).state_dict().items()}


def same(ours: Weights, theirs: Weights) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def finish(engine: Engine) -> None:
    while engine.tick():
        pass


def midway(engine: Engine, instance: ModelInstance, *requests: Request) -> list[Handle]:
    """Requests that have taken two steps, an encoding and one of the solver's."""
    handles = [engine.submit(request, instance) for request in requests]
    engine.tick()
    engine.tick()
    assert all(0 < handle.progress[0] < handle.progress[1] for handle in handles)
    return handles


class Rows:
    """Rows of every forward of a module."""

    def __init__(self, module: torch.nn.Module):
        self.seen: list[int] = []
        self._hook = module.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.append(next(iter((*args, *kwargs.values()))).shape[0])


# -- what goes wrong without it, and does not with it


def test_a_swap_without_the_controller_changes_a_request_under_way(instance: ModelInstance, new: Weights) -> None:
    expected = Engine().run(BASE, instance).latents
    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    instance.module(PART).load_state_dict(new)
    finish(engine)
    assert not torch.equal(handle.result().latents, expected)


@pytest.mark.parametrize("batching", ["off", "shape"])
@pytest.mark.parametrize("mode", ["drain", "freeze"])
def test_requests_under_way_keep_the_old_weights_and_later_ones_get_the_new(
    instance: ModelInstance, fresh: ModelInstance, new: Weights, mode: Any, batching: Any
) -> None:
    requests = [replace(BASE, seed=seed, prompt=prompt) for seed, prompt in enumerate(("red", "blue", "red"))]
    expected = Engine(batching=batching).run_interleaved(requests, instance)
    renewed = Engine(batching=batching).run_interleaved(requests, fresh)
    engine = Engine(batching=batching)
    encoder = Rows(instance.module("text_encoder"))
    under_way = midway(engine, instance, *requests)
    encoded = len(encoder.seen)
    report = WeightSyncController(engine).sync(instance, PART, new, mode=mode)
    later = [engine.submit(request, instance) for request in requests]
    finish(engine)
    for handle, artifact in zip(under_way, expected, strict=True):
        assert torch.equal(handle.result().latents, artifact.latents)
        assert handle.result().provenance.weights_versions[PART] == 0
    for handle, artifact in zip(later, renewed, strict=True):
        assert torch.equal(handle.result().latents, artifact.latents)
        assert handle.result().provenance.weights_versions == {"text_encoder": 0, PART: 1, "vae": 0}
    assert len(encoder.seen) == encoded > 0
    assert (report.finished, report.frozen) == ((3, 0) if mode == "drain" else (0, 3))
    assert (report.component, report.mode, report.version, report.stopped) == (PART, mode, 1, 0)
    assert report.tensors == len(new)
    assert report.bytes == sum(value.numel() * value.element_size() for value in new.values())


def test_boundary_stops_requests_under_way_and_again_they_are_of_the_new_weights(
    instance: ModelInstance, fresh: ModelInstance, new: Weights
) -> None:
    renewed = Engine().run(BASE, fresh).latents
    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    report = WeightSyncController(engine).sync(instance, PART, new, mode="boundary")
    assert handle.done
    with pytest.raises(StoppedBySync, match=r"step 2 of 5; submit it again \(seed 1\)"):
        handle.result()
    assert [event.kind for event in handle.events(timeout=5)][-1] == "failed"
    assert (report.finished, report.frozen, report.stopped) == (0, 0, 1)
    assert engine.in_flight() == []
    again = engine.submit(replace(BASE, seed=handle.seed), instance)
    finish(engine)
    assert torch.equal(again.result().latents, renewed)


@pytest.mark.parametrize("mode", MODES)
def test_requests_on_other_weights_do_not_notice(
    instance: ModelInstance, fresh: ModelInstance, new: Weights, mode: Any
) -> None:
    expected = Engine().run(BASE, fresh).latents
    engine = Engine()
    (other,) = midway(engine, fresh, BASE)
    report = WeightSyncController(engine).sync(instance, PART, new, mode=mode)
    assert (report.finished, report.frozen, report.stopped) == (0, 0, 0)
    assert other.progress == (2, 5)
    finish(engine)
    assert torch.equal(other.result().latents, expected)


def test_the_frozen_copy_is_one_and_goes_with_the_last_request(instance: ModelInstance, new: Weights) -> None:
    engine = Engine()
    first, second = midway(engine, instance, BASE, replace(BASE, seed=2, steps=6))
    live = instance.module(PART)
    WeightSyncController(engine).sync(instance, PART, new, mode="freeze")
    copies = [weakref.ref(handle._running.instance.module(PART)) for handle in (first, second)]
    assert copies[0]() is copies[1]()
    assert copies[0]() is not live
    assert instance.module(PART) is live
    while not first.done:
        engine.tick()
    gc.collect()
    assert copies[0]() is not None
    finish(engine)
    gc.collect()
    assert copies[0]() is None
    assert first.done and second.done  # the handles are still here, their weights are not


def test_two_syncs_in_a_row_leave_each_request_its_own_weights(
    instance: ModelInstance, fresh: ModelInstance, new: Weights
) -> None:
    old = weights_of(instance, PART)
    newest = {name: value * 1.25 for name, value in new.items()}
    expected = [Engine().run(BASE, who).latents for who in (instance, fresh)]
    engine = Engine()
    controller = WeightSyncController(engine)
    (first,) = midway(engine, instance, BASE)
    controller.sync(instance, PART, new, mode="freeze")
    second = engine.submit(BASE, instance)
    engine.tick()
    report = controller.sync(instance, PART, newest, mode="freeze")
    assert (report.version, report.frozen) == (2, 1)
    third = engine.submit(BASE, instance)
    finish(engine)
    assert torch.equal(first.result().latents, expected[0])
    assert torch.equal(second.result().latents, expected[1])
    assert not torch.equal(third.result().latents, expected[1])
    controller.sync(instance, PART, old)
    assert torch.equal(engine.run(BASE, instance).latents, expected[0])


# -- who waits, and for whom


def test_nobody_is_admitted_while_a_drain_waits(instance: ModelInstance, fresh: ModelInstance, new: Weights) -> None:
    engine = Engine()
    waiting: list[Handle] = []
    seen: list[tuple[int, int]] = []

    def listener(label: str, done: int, total: int) -> None:
        if done == 3:
            waiting.append(engine.submit(BASE, instance))
        elif done > 3:
            seen.append(waiting[0].progress)

    engine.submit(BASE, instance, listener)
    engine.tick()
    WeightSyncController(engine).sync(instance, PART, new)
    assert [done for done, _ in seen] == [0, 0]
    finish(engine)
    assert torch.equal(waiting[0].result().latents, Engine().run(BASE, fresh).latents)
    assert waiting[0].result().provenance.weights_versions[PART] == 1


def test_a_sync_from_another_thread_beside_the_engine_thread(
    instance: ModelInstance, fresh: ModelInstance, new: Weights
) -> None:
    old = weights_of(instance, PART)
    expected = {0: Engine().run(BASE, instance).latents, 1: Engine().run(BASE, fresh).latents}
    engine = Engine()
    controller = WeightSyncController(engine)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not engine.tick():
                engine.wait(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    handles: list[Handle] = []
    try:
        for turn, mode in enumerate(("drain", "freeze", "drain", "freeze")):
            handles += [engine.submit(BASE, instance) for _ in range(2)]
            time.sleep(0.01)
            controller.sync(instance, PART, old if turn % 2 else new, mode=mode)  # type: ignore[arg-type]
        handles += [engine.submit(BASE, instance)]
        results = [handle.result(timeout=120) for handle in handles]
    finally:
        stop.set()
        engine.wake()
        thread.join(60)
    assert not thread.is_alive()
    for result in results:
        assert torch.equal(result.latents, expected[result.provenance.weights_versions[PART] % 2])


@pytest.mark.parametrize("mode", ["drain", "freeze"])
def test_a_run_of_another_thread_is_under_way_too(
    instance: ModelInstance, fresh: ModelInstance, new: Weights, mode: Any
) -> None:
    expected, renewed = (Engine().run(BASE, who).latents for who in (instance, fresh))
    engine = Engine()
    begun = threading.Event()
    results: list[Tensor] = []
    counts: list[int] = []

    def listener(label: str, done: int, total: int) -> None:
        counts.append(len(engine.in_flight(instance)))
        begun.set()
        time.sleep(0.02)

    def rollout() -> None:
        results.extend(artifact.latents for artifact in engine.run_interleaved([BASE], instance, listener))

    thread = threading.Thread(target=rollout)
    thread.start()
    assert begun.wait(60)
    report = WeightSyncController(engine).sync(instance, PART, new, mode=mode)
    later = engine.run(BASE, instance).latents
    thread.join(60)
    assert not thread.is_alive()
    assert report.finished + report.frozen == 1
    assert counts[0] == 1
    assert engine.in_flight() == []
    assert torch.equal(results[0], expected)
    assert torch.equal(later, renewed)


def test_a_suspended_request_cannot_be_drained_and_can_be_frozen(
    instance: ModelInstance, fresh: ModelInstance, new: Weights
) -> None:
    expected = Engine().run(BASE, instance).latents
    engine = Engine()
    controller = WeightSyncController(engine)
    (handle,) = midway(engine, instance, BASE)
    handle.suspend()
    engine.tick()
    with pytest.raises(UserError, match="is suspended"):
        controller.sync(instance, PART, new)
    handle.resume()  # it waits for admission, which a sync holds: still under way
    with pytest.raises(UserError, match="is suspended, or was and waits"):
        controller.sync(instance, PART, new)
    assert instance.versions()[PART] == 0
    controller.sync(instance, PART, new, mode="freeze")
    later = engine.submit(BASE, instance)
    finish(engine)
    assert torch.equal(handle.result().latents, expected)
    assert torch.equal(later.result().latents, Engine().run(BASE, fresh).latents)


def test_a_drain_that_takes_too_long_leaves_everything(instance: ModelInstance, new: Weights) -> None:
    expected = Engine().run(BASE, instance).latents
    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    with pytest.raises(UserError, match="did not end within 0 s"):
        WeightSyncController(engine).sync(instance, PART, new, timeout=0)
    later = engine.submit(BASE, instance)
    finish(engine)
    assert torch.equal(handle.result().latents, expected)
    assert torch.equal(later.result().latents, expected)


# -- checks, and failures midway


def broken(new: Weights) -> tuple[Weights, list[str]]:
    """Weights with a fault of every kind, and what must be said of each."""
    names = sorted(new)
    weights = dict(new)
    weights["no.such.weight"] = torch.zeros(1)
    weights[names[1]] = torch.zeros(3, 5, 7)
    weights[names[2]] = new[names[2]].to(torch.float16)
    del weights[names[3]], weights[names[4]]
    return weights, [
        "no such name: no.such.weight",
        f"{names[1]}: got [3, 5, 7], expected {list(new[names[1]].shape)}",
        f"{names[2]}: got torch.float16, expected torch.float32",
        f"missing: {names[3]}, {names[4]}",
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [dict, lambda weights: iter(weights.items())], ids=["mapping", "iterator"])
def test_every_fault_is_told_at_once_and_nothing_changes(
    instance: ModelInstance, new: Weights, mode: Any, shape: Callable[[Weights], Any]
) -> None:
    old = weights_of(instance, PART)
    expected = Engine().run(BASE, instance).latents
    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    weights, faults = broken(new)
    with pytest.raises(UserError, match="nothing was changed") as error:
        WeightSyncController(engine).sync(instance, PART, shape(weights), mode=mode)
    assert all(fault in str(error.value) for fault in faults), str(error.value)
    assert same(weights_of(instance, PART), old)
    assert instance.versions()[PART] == 0
    finish(engine)
    assert torch.equal(handle.result().latents, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_source_that_fails_midway_leaves_the_old_weights(instance: ModelInstance, new: Weights, mode: Any) -> None:
    def shards() -> Iterator[tuple[str, Tensor]]:
        for index, item in enumerate(new.items()):
            if index == len(new) // 2:
                raise ConnectionError("the trainer went away")
            yield item

    old = weights_of(instance, PART)
    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    with pytest.raises(ConnectionError):
        WeightSyncController(engine).sync(instance, PART, shards(), mode=mode)
    assert same(weights_of(instance, PART), old)
    finish(engine)
    assert handle.result().provenance.weights_versions[PART] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_write_that_fails_midway_is_taken_back(
    instance: ModelInstance, new: Weights, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = weights_of(instance, PART)
    expected = Engine().run(BASE, instance).latents
    write, calls = inference.weight_sync._write, []

    def failing(live: Tensor, value: Tensor) -> None:
        calls.append(1)
        write(live, value)
        if len(calls) == 5:
            raise RuntimeError("the device failed")

    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    monkeypatch.setattr(inference.weight_sync, "_write", failing)
    with pytest.raises(RuntimeError, match="the device failed"):
        WeightSyncController(engine).sync(instance, PART, new, mode=mode)
    assert same(weights_of(instance, PART), old)
    assert instance.versions()[PART] == 0
    later = engine.submit(BASE, instance)
    finish(engine)
    assert torch.equal(handle.result().latents, expected)
    assert torch.equal(later.result().latents, expected)


def test_shards_are_read_one_at_a_time_while_requests_go_on(instance: ModelInstance, new: Weights) -> None:
    engine = Engine()
    (handle,) = midway(engine, instance, BASE)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def shards() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, value in new.items():
            shard = value.clone()
            alive.append(weakref.ref(shard))
            yield name, shard
            del shard
            most = max(most, sum(ref() is not None for ref in alive))
            engine.tick()

    report = WeightSyncController(engine).sync(instance, PART, shards())
    assert most <= 1
    assert handle.done
    assert report.finished == 0
    assert same(weights_of(instance, PART), new)


@pytest.mark.parametrize(
    ("component", "mode", "message"), [("transfromer", "drain", "transformer"), (PART, "drian", "drain")]
)
def test_unknown_names_list_the_names(
    instance: ModelInstance, new: Weights, component: str, mode: Any, message: str
) -> None:
    with pytest.raises(UserError, match=f"Did you mean '{message}'"):
        WeightSyncController(Engine()).sync(instance, component, new, mode=mode)


# -- caches


def test_a_sync_of_the_encoder_encodes_again_and_drops_what_was_cached(instance: ModelInstance) -> None:
    engine = Engine()
    before = engine.run(BASE, instance).latents
    assert len(engine.features) == 1
    new = {name: value * 1.5 for name, value in weights_of(instance, "text_encoder").items()}
    WeightSyncController(engine).sync(instance, "text_encoder", new)
    assert len(engine.features) == 0
    after = engine.run(BASE, instance).latents
    assert not torch.equal(after, before)
    assert torch.equal(Engine().run(BASE, instance).latents, after)


@pytest.mark.parametrize("mode", ["drain", "freeze"])
def test_an_encoder_that_changes_before_a_request_encoded_is_the_one_it_began_with(
    instance: ModelInstance, mode: Any
) -> None:
    """Guided, in its first steps: the prompt is encoded with the old weights, and so is the negative one after."""
    request = replace(BASE, guidance=3.0, negative_prompt="green")
    expected = Engine().run(request, instance).latents
    engine = Engine()
    handle = engine.submit(request, instance)
    engine.tick()
    assert handle.progress[0] == 1
    new = {name: value * 1.5 for name, value in weights_of(instance, "text_encoder").items()}
    WeightSyncController(engine).sync(instance, "text_encoder", new, mode=mode)
    later = engine.submit(request, instance)
    finish(engine)
    assert torch.equal(handle.result().latents, expected)
    assert torch.equal(later.result().latents, Engine().run(request, instance).latents)
    assert not torch.equal(later.result().latents, expected)


# -- views


def test_a_role_of_its_own_weights_changes_alone(instance: ModelInstance, fresh: ModelInstance, new: Weights) -> None:
    role = instance.view({PART: Resident(copy.deepcopy(instance.module(PART)))})
    before = Engine().run(BASE, instance).latents
    engine = Engine()
    base, student = (engine.submit(BASE, who) for who in (instance, role))
    engine.tick()
    report = WeightSyncController(engine).sync(role, PART, new, mode="boundary")
    assert report.stopped == 1
    with pytest.raises(StoppedBySync):
        student.result()
    finish(engine)
    assert torch.equal(base.result().latents, before)
    assert instance.versions()[PART] == 0
    assert same(weights_of(role, PART), new)


def test_a_shared_component_changes_for_every_view(instance: ModelInstance) -> None:
    role = instance.view({PART: Resident(copy.deepcopy(instance.module(PART)))})
    engine = Engine()
    for who in (instance, role):
        engine.run(BASE, who)
    handles = [engine.submit(BASE, who) for who in (instance, role)]
    engine.tick()
    new = {name: value * 1.5 for name, value in weights_of(instance, "text_encoder").items()}
    report = WeightSyncController(engine).sync(role, "text_encoder", new)
    assert report.finished == 2
    assert all(handle.done for handle in handles)
    assert instance.versions()["text_encoder"] == role.versions()["text_encoder"] == 1
    assert len(engine.features) == 0


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # several adapters are what the test is about
@pytest.mark.parametrize("mode", ["drain", "freeze"])
def test_one_adapter_of_a_shared_base(instance: ModelInstance, mode: Any) -> None:
    """Roles on one module: a partial sync of an adapter moves its role, counts all, and the base stays to the bit."""
    module = instance.module(PART)
    torch.manual_seed(0)
    for name in ("old", "student"):
        config = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q"], init_lora_weights=False)
        inject_adapter_in_model(config, module, adapter_name=name)
    module.eval()
    roles = {name: instance.view({PART: Resident(module, adapter=name)}) for name in ("", "old", "student")}
    before = {name: Engine().run(BASE, who).latents for name, who in roles.items()}
    assert len({latents.sum().item() for latents in before.values()}) == 3
    adapter = {name: value for name, value in module.state_dict().items() if ".student." in name}
    new = {name: value.clone() * 2 for name, value in adapter.items()}
    assert 0 < len(new) < len(module.state_dict())
    engine = Engine()
    handles = {name: engine.submit(BASE, who) for name, who in roles.items()}
    engine.tick()
    engine.tick()
    report = WeightSyncController(engine).sync(roles["student"], PART, new, mode=mode, partial=True)
    assert (report.finished, report.frozen) == ((3, 0) if mode == "drain" else (0, 3))
    assert report.tensors == len(new)
    later = {name: engine.submit(BASE, who) for name, who in roles.items()}
    finish(engine)
    for name in roles:
        assert torch.equal(handles[name].result().latents, before[name])
        assert torch.equal(later[name].result().latents, before[name]) == (name != "student")
        assert roles[name].versions()[PART] == 1


def test_a_partial_sync_of_nothing_says_so(instance: ModelInstance) -> None:
    with pytest.raises(UserError, match="at least one tensor"):
        WeightSyncController(Engine()).sync(instance, PART, {}, partial=True)


# -- components that are not simply there


def test_an_unbuilt_and_a_sleeping_component_take_new_weights(
    instance: ModelInstance, fresh: ModelInstance, new: Weights
) -> None:
    engine = Engine()
    controller = WeightSyncController(engine)
    assert not instance.built(PART)
    controller.sync(instance, PART, new)
    expected = Engine().run(BASE, fresh).latents
    assert torch.equal(engine.run(BASE, instance).latents, expected)
    instance.sleep(PART)
    controller.sync(instance, PART, {name: value * 2 for name, value in new.items()})
    assert not torch.equal(engine.run(BASE, instance).latents, expected)
    instance.sleep(PART)
    controller.sync(instance, PART, new, mode="freeze")
    assert torch.equal(engine.run(BASE, instance).latents, expected)


def test_strides_and_addresses_stay(instance: ModelInstance) -> None:
    module = instance.module("vae")
    before = [(p.data_ptr(), p.stride()) for p in module.parameters()]
    new = {name: (value * 1.5).contiguous() for name, value in weights_of(instance, "vae").items()}
    WeightSyncController(Engine()).sync(instance, "vae", new)
    assert [(p.data_ptr(), p.stride()) for p in module.parameters()] == before
    assert same(weights_of(instance, "vae"), new)
    assert not state_of(module).asleep


# -- text


@pytest.fixture(scope="module")
def text_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Language models with tied embeddings, old and new."""
    return tuple(  # type: ignore[return-value]
        save_tiny_qwen3(tmp_path_factory.mktemp("lm"), seed=seed, tie_word_embeddings=True) for seed in (0, 1)
    )


@pytest.mark.parametrize("kv_bytes", [0, 2**20])
@pytest.mark.parametrize("mode", ["drain", "freeze"])
def test_a_text_under_way_is_of_one_model(text_folders: tuple[Path, Path], mode: Any, kv_bytes: int) -> None:
    old, new = (ModelInstance.load(card_of(folder)) for folder in text_folders)
    batching: Any = "shape" if kv_bytes else "off"
    expected = [Engine(batching=batching, kv_bytes=kv_bytes).run(TEXT, who).completion for who in (old, new)]
    assert expected[0] != expected[1]
    engine = Engine(batching=batching, kv_bytes=kv_bytes)
    first = engine.submit(TEXT, old)
    for _ in range(3):
        engine.tick()
    assert 0 < first.progress[0] < first.progress[1]
    weights = weights_of(new, "lm")
    assert "lm_head.weight" in weights
    del weights["lm_head.weight"]  # tied to the embedding, which is enough
    WeightSyncController(engine).sync(old, "lm", weights, mode=mode)
    later = engine.submit(TEXT, old)
    finish(engine)
    assert first.result().completion == expected[0]
    assert later.result().completion == expected[1]


def test_tied_names_with_two_values_are_refused(text_folders: tuple[Path, Path]) -> None:
    instance = ModelInstance.load(card_of(text_folders[0]))
    weights = weights_of(instance, "lm")
    before = weights_of(instance, "lm")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(UserError, match=r"given another value: lm_head\.weight"):
        WeightSyncController(Engine()).sync(instance, "lm", weights)
    assert same(weights_of(instance, "lm"), before)
