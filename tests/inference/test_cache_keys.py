"""Cache keys: each field alone separates entries, and each cause in the world changes the fields that it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from cards.card import Precision
from inference.cache.feature import FeatureCache
from inference.cache.keys import CacheKey, PrefixRoot, adapter_set, feature_key, plan_hash
from inference.instance import ModelInstance, Resident
from inference.load import card_of
from loops.loop import SDE, ModelCall, SamplingParams, WorkPlan, WorkUnit

PARAMS = SamplingParams(
    frames=5,
    height=16,
    width=32,
    steps=4,
    guidance=3.0,
    guidance_policy="sequential",
    solver="unipc",
    shift=3.0,
    seed=7,
)
OTHER_PARAMS: dict[str, Any] = {
    "frames": 9,
    "height": 32,
    "width": 16,
    "steps": 5,
    "guidance": 2.0,
    "guidance_policy": "batched",
    "solver": "euler",
    "shift": 1.0,
    "seed": 8,
    "actions": ("left",),
    "sde": SDE(),
}
OTHER_PRECISION = {"serve": "bfloat16", "train": "bfloat16", "text_padding": "folded"}


def plan_of(**changes: Any) -> WorkPlan:
    call = {
        "component": "transformer",
        "method": "denoise",
        "tensors": {"latents": torch.zeros(1, 4)},
        "static": {"dtype": "float32"},
    }
    return WorkPlan(WorkUnit.DIFFUSION_STEP, (ModelCall(**{**call, **changes}),), "denoise 1/4")


PLAN = plan_of()


@dataclass(frozen=True)
class World:
    """All that a key is made of; a cause replaces one part."""

    instance: ModelInstance
    component: str = "transformer"
    plan: WorkPlan = PLAN
    branch: str = "conditional"
    params: SamplingParams = PARAMS
    inputs: float = 0.0
    step: int = 0

    def key(self) -> CacheKey:
        return CacheKey.of(
            self.instance,
            component=self.component,
            loop=next(iter(self.instance.card.loops)),
            plan=self.plan,
            branch=self.branch,
            params=self.params,
            inputs={"latents": torch.full((2,), self.inputs)},
            step=self.step,
        )


def changed(before: CacheKey, after: CacheKey) -> set[str]:
    return {f.name for f in fields(CacheKey) if getattr(before, f.name) != getattr(after, f.name)}


@pytest.fixture(scope="module")
def loaded(wan_folder: Path) -> ModelInstance:
    return ModelInstance.load(card_of(wan_folder))


@pytest.fixture
def world(loaded: ModelInstance) -> World:
    """Residents of its own, so that a bump stays in its test."""
    residents = {cid: replace(resident) for cid, resident in loaded.residents.items()}
    return World(loaded.view(residents))


def with_card(world: World, **changes: Any) -> World:
    return replace(world, instance=world.instance.view({}, world.instance.card.model_copy(update=changes)))


def with_resident(world: World, resident: Resident) -> World:
    return replace(world, instance=world.instance.view({"transformer": resident}))


def test_the_same_world_gives_the_same_key(world: World) -> None:
    cache = FeatureCache()
    cache.put(world.key(), torch.ones(1))
    assert cache.get(world.key()) is not None


@pytest.mark.parametrize("name", [f.name for f in fields(CacheKey)])
def test_each_field_alone_misses(world: World, name: str) -> None:
    key = world.key()
    value = getattr(key, name)
    other: Any
    if isinstance(value, int):
        other = value + 1
    elif isinstance(value, str):
        other = value + "x"
    else:
        other = (*value, ("x", (1.0,) if name == "adapters" else "x"))
    cache = FeatureCache()
    cache.put(key, torch.ones(1))
    assert cache.get(replace(key, **{name: other})) is None
    assert cache.get(replace(key, **{name: value})) is not None


def test_no_field_has_a_default() -> None:
    with pytest.raises(TypeError, match="required keyword-only argument"):
        CacheKey(model="m")  # type: ignore[call-arg]


CAUSES: dict[str, tuple[Callable[[World], World], set[str]]] = {
    "another card": (lambda w: with_card(w, size="other"), {"model"}),
    "another step": (lambda w: replace(w, step=1), {"step"}),
    "other inputs": (lambda w: replace(w, inputs=1.0), {"inputs"}),
    "the other branch": (lambda w: replace(w, branch="unconditional"), {"branch"}),
    "a static input": (lambda w: replace(w, plan=plan_of(static={"dtype": "float16"})), {"plan"}),
    "another operation": (lambda w: replace(w, plan=plan_of(method="other")), {"plan"}),
    "shapes of the call": (lambda w: replace(w, plan=plan_of(tensors={"latents": torch.zeros(2, 4)})), {"plan"}),
    "dtype of the call": (
        lambda w: replace(w, plan=plan_of(tensors={"latents": torch.zeros(1, 4, dtype=torch.float16)})),
        {"plan"},
    ),
    "other weights in memory": (
        lambda w: with_resident(w, Resident(w.instance.module("transformer"))),
        {"component_uid"},
    ),
    "another component": (lambda w: replace(w, component="vae"), {"component", "component_uid"}),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_changes_its_field_and_no_other(world: World, cause: str) -> None:
    change, expected = CAUSES[cause]
    assert changed(world.key(), change(world).key()) == expected


@pytest.mark.parametrize("name", [f.name for f in fields(SamplingParams)])
def test_every_sampling_parameter_is_in_exactly_one_field(world: World, name: str) -> None:
    other = replace(PARAMS, **{name: OTHER_PARAMS[name]})
    found = changed(world.key(), replace(world, params=other).key())
    assert len(found) == 1
    assert found <= {"seed", "shapes", "schedule", "guidance"}


@pytest.mark.parametrize("name", Precision.model_fields)
def test_every_numerics_setting_of_the_card_is_in_the_key(world: World, name: str) -> None:
    precision = world.instance.card.precision.model_copy(update={name: OTHER_PRECISION[name]})
    other = with_card(world, precision=precision)
    assert changed(world.key(), other.key()) == {"model", "precision"}
    assert PrefixRoot.of(other.instance, "transformer") != PrefixRoot.of(world.instance, "transformer")


def test_a_sync_of_one_component_leaves_the_others_keys(world: World) -> None:
    text = feature_key(world.instance, ("text_encoder", "encode", "prompt"))
    denoise, vae = world.key(), replace(world, component="vae").key()
    root = PrefixRoot.of(world.instance, "transformer").digest
    world.instance.bump("transformer")
    assert changed(denoise, world.key()) == {"version"}
    assert feature_key(world.instance, ("text_encoder", "encode", "prompt")) == text
    assert replace(world, component="vae").key() == vae
    assert PrefixRoot.of(world.instance, "transformer").digest != root


def test_the_next_step_of_a_request_differs_in_step_and_inputs(world: World) -> None:
    later = world.key().at(3, {"latents": torch.full((2,), 5.0)})
    assert later == replace(world, step=3, inputs=5.0).key()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # several adapters are what the test is about
def test_adapter_sets_partition_and_strengths_count(make_wan_folder: Callable[..., Path]) -> None:
    instance = ModelInstance.load(card_of(make_wan_folder(seed=3)))
    module = instance.module("transformer")
    for name, alpha in (("one", 4), ("two", 8)):
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=alpha, target_modules=["to_q"]), module, adapter_name=name)
    roles = {role: replace(instance.residents["transformer"], adapter=role) for role in ("", "one", "two")}
    assert adapter_set(roles[""]) == ()
    assert adapter_set(roles["one"]) == (("one", (1.0,)),)
    assert adapter_set(roles["two"]) == (("two", (2.0,)),)
    keys = {role: World(instance.view({"transformer": resident})).key() for role, resident in roles.items()}
    for role in ("one", "two"):
        assert changed(keys[""], keys[role]) == {"adapters"}
    roots = {PrefixRoot.of(instance.view({"transformer": resident}), "transformer") for resident in roles.values()}
    assert len(roots) == 3

    layers = [layer for layer in module.modules() if "one" in getattr(layer, "scaling", {})]
    layers[0].scaling["one"] = 0.5
    strengths = (0.5, *[1.0] * (len(layers) - 1))
    assert adapter_set(roles["one"]) == (("one", strengths),)
    assert World(instance.view({"transformer": roles["one"]})).key() != keys["one"]


def test_a_plan_is_known_by_its_content_and_refuses_what_has_none() -> None:
    assert plan_hash(plan_of()) == plan_hash(replace(plan_of(), label="denoise 2/4"))
    assert plan_hash(plan_of()) == plan_hash(plan_of(tensors={"latents": torch.ones(1, 4)}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        plan_hash(plan_of(static={"callback": object()}))


def test_the_table_of_parameters_is_whole() -> None:
    assert set(OTHER_PARAMS) == set(asdict(PARAMS))
