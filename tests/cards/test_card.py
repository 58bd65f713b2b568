"""ModelCard as data: digest, JSON, derivation and checks. Oracles: hashlib over json written here, and counts."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest

from cards.card import (
    CardError,
    Component,
    CostModel,
    Guidance,
    LoopMismatchError,
    LoopSpec,
    ModelCard,
    Parity,
    Recipe,
    Sampling,
    Schedule,
    Source,
)
from cards.errors import UserError
from cards.geometry import Geometry
from cards.program import Node, Program, active_nodes
from cards.registry import family, family_of_pipeline

PROGRAM = Program(
    nodes=(
        Node(id="encode_prompt", component="text", op="encode", reads=("prompt",), writes="text"),
        Node(
            id="encode_negative",
            component="text",
            op="encode",
            reads=("negative_prompt",),
            writes="negative_text",
            when="guided",
        ),
        Node(id="denoise", loop="denoise", reads=("text",), writes="latents"),
        Node(id="decode", component="vae", op="decode", reads=("latents",), writes="video", when="pixels"),
    )
)
LOOP = LoopSpec(
    kind="diffusion_denoise",
    unit="DIFFUSION_STEP",
    solver="unipc",
    schedule=Schedule(shift=3.0),
    guidance=Guidance(scale=5.0),
    components={"denoiser": "net"},
    semantics="flow-ode",
)


def component(kind: str, class_name: str, library: str = "diffusers") -> Component:
    return Component(kind=kind, library=library, class_name=class_name, subfolder=kind, required_for=("t2v",))


def make_card(**changes: Any) -> ModelCard:
    fields: dict[str, Any] = {
        "name": "toy",
        "family": "wan21",
        "size": "tiny",
        "source": Source(kind="none"),
        "geometry": Geometry(spatial=4, temporal=4, channels=4),
        "components": {
            "text": component("text_encoder", "UMT5EncoderModel", "transformers"),
            "net": component("transformer", "WanTransformer3DModel"),
            "vae": component("vae", "AutoencoderKLWan"),
        },
        "loops": {"denoise": LOOP},
        "programs": {"t2v": PROGRAM},
        "recipe": Recipe(method="pretrained", assumes_loop="flow-ode"),
        "sampling": Sampling(frames=9, height=32, width=32, fps=8.0, steps=20),
    }
    return ModelCard(**{**fields, **changes})


# -- digest and JSON


def test_the_digest_is_sha256_of_sorted_json_without_white_space() -> None:
    card = make_card()
    text = json.dumps(json.loads(card.to_json()), sort_keys=True, separators=(",", ":"))
    assert card.digest == hashlib.sha256(text.encode()).hexdigest()


def test_equal_cards_have_equal_digests_whatever_the_order_of_keys() -> None:
    card = make_card()
    shuffled = json.dumps(dict(reversed(list(json.loads(card.to_json()).items()))))
    assert ModelCard.from_json(shuffled).digest == card.digest
    reordered = make_card(components=dict(reversed(list(card.components.items()))))
    assert reordered.digest == card.digest


CHANGES: dict[str, Any] = {
    "name": "other",
    "family": "other",
    "size": "1.3b",
    "source": Source(kind="hub", location="a/b", revision="main"),
    "geometry": Geometry(spatial=8, temporal=4, channels=4),
    "components": {"net": component("transformer", "WanTransformer3DModel")},
    "loops": {"denoise": LOOP.model_copy(update={"schedule": Schedule(shift=3.0000001)})},
    "programs": {"t2v": Program(nodes=PROGRAM.nodes[:3])},
    "recipe": Recipe(method="pretrained", assumes_loop="flow-ode", weights={"net": "00"}),
    "sampling": Sampling(frames=9, height=32, width=32, fps=8.0, steps=21),
    "parity": Parity(tolerances={"C0": 0.0, "C1": 0.0, "C2": 0.0, "C3": 1e-3}),
    "precision": {"serve": "bfloat16"},
    "costs": {"net": CostModel(base_seconds=1.0)},
    "caches": (),
    "parallelism": ("single",),
    "capabilities": ("text_to_video",),
}


def test_the_list_of_changes_names_every_field() -> None:
    assert set(CHANGES) | {"schema_version"} == set(ModelCard.model_fields)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_is_in_the_digest(field: str) -> None:
    assert make_card(**{field: CHANGES[field]}).digest != make_card().digest


def test_a_card_survives_json() -> None:
    loop = LOOP.model_copy(update={"schedule": Schedule(ladder=(1.0, 0.9375, 0.1), options={"a": [1, None, "x"]})})
    card = make_card(loops={"denoise": loop})
    again = ModelCard.from_json(card.to_json())
    assert again == card
    assert again.loops["denoise"].schedule.ladder == (1.0, 0.9375, 0.1)


@pytest.mark.parametrize("place", ["top", "nested"])
def test_an_unknown_field_is_an_error_that_names_it(place: str) -> None:
    data = json.loads(make_card().to_json())
    (data if place == "top" else data["loops"]["denoise"]["schedule"])["shfit"] = 1
    with pytest.raises(CardError, match="shfit"):
        ModelCard.from_json(json.dumps(data))


def test_every_wrong_field_of_a_file_is_listed() -> None:
    data = json.loads(make_card().to_json())
    data["shfit"] = 1
    data["geometry"]["spatial"] = "four"
    del data["recipe"]
    with pytest.raises(CardError) as error:
        ModelCard.from_json(json.dumps(data), where="/x/card.json")
    message = str(error.value)
    assert all(word in message for word in ("/x/card.json", "shfit", "geometry.spatial", "recipe"))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_named_before_its_fields_are_read(version: Any) -> None:
    data = {**json.loads(make_card().to_json()), "schema_version": version, "later_field": 1}
    with pytest.raises(CardError) as error:
        ModelCard.from_json(json.dumps(data))
    assert f"got schema_version {version!r}" in str(error.value)
    assert "later_field" not in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '"card"', ""])
def test_a_file_that_is_no_card_is_a_user_error(text: str) -> None:
    with pytest.raises(CardError):
        ModelCard.from_json(text)


def test_a_card_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_card().name = "other"  # type: ignore[misc]


# -- derivation


def test_derive_records_its_parents_nearest_first() -> None:
    base = make_card()
    child = base.derive(name="child")
    grandchild = child.derive(recipe=Recipe(method="nft", assumes_loop="flow-ode"))
    assert child.recipe.parents == (base.digest,)
    assert grandchild.recipe.parents == (child.digest, base.digest)
    assert grandchild.recipe.method == "nft"
    assert (base.name, base.recipe.parents) == ("toy", ())


def test_a_child_without_changes_is_still_another_card() -> None:
    base = make_card()
    assert base.derive().digest != base.digest


def test_derive_refuses_a_field_that_cards_do_not_have() -> None:
    with pytest.raises(CardError, match="nmae"):
        make_card().derive(nmae="child")


# -- checks


def test_a_sound_card_has_no_problems() -> None:
    card = make_card()
    assert card.problems() == []
    card.validate()


def test_validate_lists_all_problems_at_once() -> None:
    loop = LOOP.model_copy(
        update={"schedule": Schedule(shift=-1.0, ladder=(0.5, 0.75)), "components": {"denoiser": "absent"}}
    )
    card = make_card(loops={"denoise": loop}, sampling=Sampling(frames=8, height=32, width=32, fps=8.0, steps=20))
    with pytest.raises(CardError) as error:
        card.validate()
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 4
    for word in ("'absent'", "shift is -1.0", "ladder [0.5, 0.75]", "frames: got 8"):
        assert sum(word in line for line in lines) == 1, (word, lines)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schedule": Schedule(shift=math.nan)}, "shift is nan"),
        ({"schedule": Schedule(shift=math.inf)}, "shift is inf"),
        ({"schedule": Schedule(ladder=())}, "ladder"),
        ({"schedule": Schedule(ladder=(1.0, 1.0))}, "ladder"),
        ({"schedule": Schedule(ladder=(1.5, 0.5))}, "ladder"),
        ({"schedule": Schedule(ladder=(1.0, 0.0))}, "ladder"),
        ({"schedule": Schedule(ladder=(math.nan,))}, "ladder"),
        ({"guidance": Guidance(scale=-1.0)}, "guidance scale is -1.0"),
        ({"guidance": Guidance(scale=math.nan)}, "guidance scale is nan"),
    ],
)
def test_one_wrong_loop_value_is_one_problem(change: dict[str, Any], word: str) -> None:
    (problem,) = make_card(loops={"denoise": LOOP.model_copy(update=change)}).problems()
    assert word in problem


def test_a_parity_level_without_a_tolerance_is_a_problem() -> None:
    (problem,) = make_card(parity=Parity(tolerances={"C0": 0.0, "C1": 0.0, "C2": 0.0})).problems()
    assert "C3" in problem


def test_a_component_of_a_task_without_a_program_is_a_problem() -> None:
    extra = component("vae", "AutoencoderKLWan").model_copy(update={"required_for": ("i2v",)})
    (problem,) = make_card(components={**make_card().components, "extra": extra}).problems()
    assert "'extra'" in problem
    assert "'i2v'" in problem


def test_weights_that_assume_another_loop_are_a_mismatch() -> None:
    card = make_card(recipe=Recipe(method="dmd2", assumes_loop="few-step-renoise"))
    with pytest.raises(LoopMismatchError, match=r"few-step-renoise.*flow-ode"):
        card.validate()


def test_a_mismatch_among_other_problems_is_listed_with_them() -> None:
    card = make_card(
        recipe=Recipe(method="dmd2", assumes_loop="few-step-renoise"),
        sampling=Sampling(frames=8, height=32, width=32, fps=8.0, steps=20),
    )
    with pytest.raises(CardError, match="few-step-renoise") as error:
        card.validate()
    assert "frames: got 8" in str(error.value)


# -- programs


@pytest.mark.parametrize(
    ("node", "word"),
    [
        (Node(id="n", reads=(), writes="x"), "exactly one"),
        (Node(id="n", component="vae", op="decode", loop="denoise", reads=(), writes="x"), "exactly one"),
        (Node(id="n", component="vea", op="decode", reads=(), writes="x"), "'vea' is not on the card"),
        (Node(id="n", component="vae", reads=(), writes="x"), "names its op"),
        (Node(id="n", loop="denosie", reads=(), writes="x"), "'denosie' is not on the card"),
        (Node(id="n", component="vae", op="decode", reads=("later",), writes="x"), "'later' before"),
        (Node(id="n", component="vae", op="decode", reads=("maybe",), writes="x"), "written when guided only"),
        (Node(id="n", component="vae", op="decode", reads=("maybe",), writes="x", when="pixels"), "guided only"),
    ],
)
def test_what_can_be_wrong_with_a_node(node: Node, word: str) -> None:
    maybe = Node(id="m", component="vae", op="encode", reads=("prompt",), writes="maybe", when="guided")
    (problem,) = Program(nodes=(maybe, node)).problems(["vae"], ["denoise"])
    assert "node 'n'" in problem
    assert word in problem


@pytest.mark.parametrize(
    ("guided", "pixels", "ids"),
    [
        (False, False, ["encode_prompt", "denoise"]),
        (True, False, ["encode_prompt", "encode_negative", "denoise"]),
        (False, True, ["encode_prompt", "denoise", "decode"]),
        (True, True, ["encode_prompt", "encode_negative", "denoise", "decode"]),
    ],
)
def test_only_the_nodes_that_a_request_needs_are_active(guided: bool, pixels: bool, ids: list[str]) -> None:
    assert [node.id for node in active_nodes(PROGRAM, guided=guided, pixels=pixels)] == ids


# -- registry


def test_a_registry_miss_lists_the_names_and_suggests_one() -> None:
    with pytest.raises(UserError, match=r"unknown card 'wan2'.*wan21.*Did you mean 'wan21'"):
        family("wan2")
    with pytest.raises(UserError, match=r"'13b'.*1\.3b.*14b.*tiny"):
        family("wan21").card("13b")
    with pytest.raises(UserError, match=r"FluxPipeline.*WanPipeline"):
        family_of_pipeline("FluxPipeline", "/models/x")
