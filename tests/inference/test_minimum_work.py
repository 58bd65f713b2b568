"""Only what a request needs is built and run, for a card of two tasks as for any other.

The VAE of these tests raises when it is built: what must not build it proves so by working.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cards.registry
import cards.source
import inference.instance
from cards.card import Component, ModelCard
from cards.errors import UserError
from cards.needs import needed_components, optional_components, request_needs
from cards.source import SourceError, check_source, load_component
from inference.engine import Engine
from inference.extend.observer import Forward, Observer
from inference.instance import ModelInstance
from inference.parity.reference import drive_request
from inference.request import Request
from inference.resident import Once
from tests.support.omni.card import omni_card, registered, save_omni

CLIP = Request(prompt="a red circle", seed=1, steps=2, guidance=1.0, frames=5, height=16, width=16, output="latents")
PIXELS = replace(CLIP, output="video")
TEXT = Request(prompt="a red circle", task="text", seed=1, max_tokens=4, temperature=0.0)
MODULES = {"text_encoder", "transformer", "vae", "lm"}


class Broken(RuntimeError):
    """What a component raises that cannot be built."""


@pytest.fixture(scope="module")
def folder(wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_omni(wan_folder, tmp_path_factory.mktemp("omni") / "model")


@pytest.fixture
def card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCard:
    monkeypatch.setattr(cards.registry, "FAMILIES", registered())
    return omni_card(folder)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders that components were built from."""
    seen: list[str] = []

    def load(component: Component, folder: Path, device: Any = "cpu") -> Any:
        seen.append(component.subfolder)
        return load_component(component, folder, device)

    for module in (cards.source, inference.instance):
        monkeypatch.setattr(module, "load_component", load)
    return seen


@pytest.fixture
def broken_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(component: Component, folder: Path, device: Any = "cpu") -> Any:
        if component.kind == "vae":
            raise Broken("this VAE cannot be built")
        return load_component(component, folder, device)

    for module in (cards.source, inference.instance):
        monkeypatch.setattr(module, "load_component", load)


def built(instance: ModelInstance) -> set[str]:
    return {cid for cid in instance.residents if instance.built(cid)}


# -- the one place that decides


@pytest.mark.parametrize(
    ("task", "guided", "pixels", "nodes", "components"),
    [
        ("t2v", False, False, ["encode_prompt", "denoise"], ("text_encoder", "transformer")),
        ("t2v", True, False, ["encode_prompt", "encode_negative", "denoise"], ("text_encoder", "transformer")),
        ("t2v", False, True, ["encode_prompt", "denoise", "decode"], ("text_encoder", "transformer", "vae")),
        ("text", False, True, ["decode"], ("lm",)),
    ],
)
def test_a_request_needs_what_its_nodes_call(
    card: ModelCard, task: str, guided: bool, pixels: bool, nodes: list[str], components: tuple[str, ...]
) -> None:
    needs = request_needs(card, task, guided=guided, pixels=pixels)
    assert [node.id for node in needs.nodes] == nodes
    assert needs.components == components


def test_a_task_requires_what_names_it_or_names_no_task(card: ModelCard) -> None:
    assert set(needed_components(card, ("text",))) == {"tokenizer", "lm"}
    assert set(needed_components(card, ("t2v",))) == {"tokenizer", "text_encoder", "transformer", "vae"}
    assert set(needed_components(card)) == set(card.components)
    assert set(needed_components(card, ())) == set()
    extra = card.components["lm"].model_copy(update={"required_for": (), "optional_for": ()})
    anywhere = card.model_copy(update={"components": {**card.components, "extra": extra}})
    assert set(needed_components(anywhere, ("text",))) == {"tokenizer", "lm", "extra"}


def test_an_optional_component_is_not_required(card: ModelCard) -> None:
    optional = with_optional_vae(card)
    assert "vae" not in needed_components(optional)
    assert set(optional_components(optional)) == {"vae"}
    assert set(optional_components(optional, ("text",))) == set()


def test_an_unknown_task_lists_the_tasks(card: ModelCard) -> None:
    for ask in (lambda: needed_components(card, ("t2w",)), lambda: ModelInstance.load(card, tasks=("t2w",))):
        with pytest.raises(UserError, match="Did you mean 't2v'"):
            ask()


# -- built at the first use


def test_text_and_latents_never_build_the_vae(card: ModelCard, broken_vae: None) -> None:
    instance = ModelInstance.load(card)
    assert built(instance) == set()
    engine = Engine()
    text = engine.run(TEXT, instance)
    assert built(instance) == {"lm"}
    latents = engine.run(CLIP, instance)
    assert built(instance) == MODULES - {"vae"}
    assert len(text.completion.token_ids) >= 1  # type: ignore[union-attr]
    assert torch.equal(latents.latents, drive_request(instance, CLIP)["latents"][0])


@pytest.mark.parametrize("batching", ["off", "shape"])
def test_a_build_that_fails_fails_its_request_alone(card: ModelCard, broken_vae: None, batching: Any) -> None:
    instance = ModelInstance.load(card)
    engine = Engine(batching=batching)
    bad, clip, text = (engine.submit(request, instance) for request in (PIXELS, CLIP, TEXT))
    while engine.tick():
        pass
    with pytest.raises(Broken):
        bad.result()
    assert clip.result().latents.shape[0] == card.geometry.channels
    assert text.result().text is not None


def test_a_build_that_failed_is_tried_again(card: ModelCard, monkeypatch: pytest.MonkeyPatch, broken_vae: None) -> None:
    instance = ModelInstance.load(card)
    with pytest.raises(Broken):
        Engine().run(PIXELS, instance)
    monkeypatch.setattr(cards.source, "load_component", load_component)
    assert Engine().run(PIXELS, instance).video is not None


def test_the_tasks_asked_for_are_built_at_once_and_no_others(card: ModelCard, loads: list[str]) -> None:
    instance = ModelInstance.load(card, tasks=("text",))
    assert loads == ["lm"]
    assert built(instance) == {"lm"}
    Engine().run(TEXT, instance)
    assert loads == ["lm", "tokenizer"]
    Engine().run(CLIP, instance)
    assert sorted(loads) == ["lm", "text_encoder", "tokenizer", "transformer"]


def test_lazy_and_eager_give_the_same_bits(card: ModelCard) -> None:
    lazy = ModelInstance.load(card)
    eager = ModelInstance.load(card, tasks=tuple(card.programs))
    assert built(eager) == MODULES
    ours, theirs = Engine().run(PIXELS, lazy), Engine().run(PIXELS, eager)
    assert torch.equal(ours.video, theirs.video)  # type: ignore[arg-type]


def test_views_share_what_is_built_later(card: ModelCard, loads: list[str]) -> None:
    instance = ModelInstance.load(card)
    view = instance.view({})
    Engine().run(PIXELS, view)
    Engine().run(PIXELS, instance)
    assert sorted(loads) == ["text_encoder", "tokenizer", "transformer", "vae"]
    assert instance.module("vae") is view.module("vae")


def test_a_build_leaves_the_global_random_numbers_alone(card: ModelCard) -> None:
    instance = ModelInstance.load(card)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    instance.build(("text_encoder", "transformer"))
    assert torch.equal(torch.rand(3), expected)


def test_a_component_built_under_inference_mode_can_be_trained(card: ModelCard) -> None:
    instance = ModelInstance.load(card)
    with torch.inference_mode():
        module = instance.module("transformer")
    assert not any(p.is_inference() for p in module.parameters())


def test_a_config_is_read_without_building(card: ModelCard, loads: list[str]) -> None:
    instance = ModelInstance.load(card)
    before = {cid: instance.config(cid) for cid in MODULES}
    assert before["text_encoder"].d_model == 24
    assert before["vae"].z_dim == card.geometry.channels
    assert loads == []
    assert built(instance) == set()
    instance.build(("vae",))
    assert instance.config("vae").z_dim == before["vae"].z_dim


def test_the_time_of_a_build_is_not_that_of_a_forward(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted costs come from measured forwards; a load of minutes would spoil them."""

    class Clock(Observer):
        def __init__(self) -> None:
            self.seconds: dict[str, float] = {}

        def on_forward(self, forward: Forward) -> None:
            self.seconds[forward.component] = forward.seconds

    def slow(component: Component, folder: Path, device: Any = "cpu") -> Any:
        if component.kind == "vae":
            time.sleep(1.5)
        return load_component(component, folder, device)

    monkeypatch.setattr(cards.source, "load_component", slow)
    clock = Clock()
    began = time.monotonic()
    Engine(observers=(clock,)).run(PIXELS, ModelInstance.load(card))
    assert time.monotonic() - began > 1.5
    assert clock.seconds["vae"] < 1.5


# -- the checks come first


def test_every_task_is_checked_before_any_weight_loads(
    card: ModelCard, folder: Path, tmp_path: Path, loads: list[str]
) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "model"))
    (broken / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match="truncated"):
        ModelInstance.load(omni_card(broken), tasks=("text",))
    assert loads == []


def test_weights_that_changed_since_the_check_are_refused(card: ModelCard, folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "model"))
    instance = ModelInstance.load(omni_card(moved))
    Engine().run(CLIP, instance)
    file = moved / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes())
    with pytest.raises(SourceError, match="changed since"):
        Engine().run(PIXELS, instance)


def with_optional_vae(card: ModelCard) -> ModelCard:
    vae = card.components["vae"].model_copy(update={"required_for": (), "optional_for": ("t2v",)})
    return card.model_copy(update={"components": {**card.components, "vae": vae}})


def test_a_missing_optional_component_fails_who_needs_it(card: ModelCard, folder: Path, tmp_path: Path) -> None:
    without = Path(shutil.copytree(folder, tmp_path / "model"))
    shutil.rmtree(without / "vae")
    index = (without / "model_index.json").read_text().replace('"AutoencoderKLWan"', "null")
    (without / "model_index.json").write_text(index.replace('"vae": ["diffusers", null]', '"vae": [null, null]'))
    required = card.model_copy(update={"source": card.source.model_copy(update={"location": str(without)})})
    with pytest.raises(SourceError, match="vae"):
        ModelInstance.load(required)
    instance = ModelInstance.load(with_optional_vae(required))
    Engine().run(CLIP, instance)
    with pytest.raises(SourceError, match="optional, but this request needs it"):
        Engine().run(PIXELS, instance)


def test_an_optional_component_that_is_there_is_checked_and_built_when_needed(card: ModelCard, folder: Path) -> None:
    optional = with_optional_vae(card)
    assert check_source(optional) == folder
    instance = ModelInstance.load(optional, tasks=("t2v",))
    assert built(instance) == {"text_encoder", "transformer"}
    assert Engine().run(PIXELS, instance).video is not None


# -- threads


def test_threads_that_build_different_components_do_not_disturb_each_other(card: ModelCard) -> None:
    """The libraries switch torch's functions over while they build, so one build must wait for the other."""
    expected = {cid: tensors(ModelInstance.load(card, tasks=tuple(card.programs)), cid) for cid in MODULES}
    for _ in range(3):
        instance = ModelInstance.load(card)
        ids = iter(sorted(MODULES) * 2)
        run_together(8, lambda instance=instance, ids=ids: instance.build((next(ids),)))  # type: ignore[misc]
        for cid in MODULES:
            ours = tensors(instance, cid)
            assert all(torch.equal(value, expected[cid][name]) for name, value in ours.items())


def tensors(instance: ModelInstance, component: str) -> dict[str, torch.Tensor]:
    return dict(instance.module(component).state_dict())


def test_threads_that_need_a_component_build_it_once(card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def slow(component: Component, folder: Path, device: Any = "cpu") -> Any:
        calls.append(1)
        time.sleep(0.05)
        return load_component(component, folder, device)

    monkeypatch.setattr(cards.source, "load_component", slow)
    instance = ModelInstance.load(card)
    modules: list[nn.Module] = []
    run_together(8, lambda: modules.append(instance.module("transformer")))
    assert len(calls) == 1
    assert len(modules) == 8
    assert all(module is modules[0] for module in modules)


def test_a_failure_of_one_builder_is_not_that_of_the_next() -> None:
    attempts: list[int] = []

    def make() -> str:
        attempts.append(1)
        time.sleep(0.02)
        if len(attempts) == 1:
            raise Broken("the first fails")
        return "made"

    once = Once(make)
    outcomes: list[str] = []

    def ask() -> None:
        try:
            outcomes.append(once.get())
        except Broken:
            outcomes.append("failed")

    run_together(4, ask)
    assert sorted(outcomes) == ["failed", "made", "made", "made"]
    assert len(attempts) == 2


def run_together(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
