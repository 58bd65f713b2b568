"""Actions of a causal card: new ones change no bit, each chunk is under its own, and exports carry trained ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from cards.card import CARD_FILE, ModelCard, Source
from cards.errors import UserError
from cards.registry import family
from cards.source import SourceError, check_source
from cards.wan_causal.actions import ActionEmbedding
from cards.wan_causal.card import build_card, card_from_folder, with_actions, with_rollout
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.chunks import chunk_gate, chunk_rows
from inference.parity.library import WanLibrary
from inference.parity.reference import drive_request
from inference.request import Request
from inference.session import WorldModelSession
from loops.loop import ModelCall

NAMES = ("none", "left", "right")
REQUEST = Request(prompt="a red circle", seed=5, frames=13, height=16, width=16)


@pytest.fixture(scope="module")
def folder(make_wan_folder: Callable[..., Path]) -> Path:
    return make_wan_folder(seed=3)


def card_of(folder: Path, **options: Any) -> ModelCard:
    card = card_from_folder(folder)
    short = card.sampling.model_copy(update={"max_sequence_length": 12, "height": 16, "width": 16})
    return with_rollout(card.model_copy(update={"sampling": short}), **options)


def with_vectors(instance: ModelInstance, scale: float = 1.0, seed: int = 0) -> ModelInstance:
    """The instance with action vectors of its own that are not zero."""
    from inference.resident import Resident

    module = ActionEmbedding(len(NAMES), 32)
    with torch.no_grad():
        module.embedding.weight.normal_(std=scale, generator=torch.Generator().manual_seed(seed))
    return instance.view({"actions": Resident(module.eval().requires_grad_(False))})


@pytest.fixture(scope="module")
def steered(folder: Path) -> ModelInstance:
    return with_vectors(Engine().load(with_actions(card_of(folder, window=2, sinks=1), NAMES)))


def run(instance: ModelInstance, *actions: str, **fields: Any) -> Any:
    request = replace(REQUEST, actions=actions if actions else None, **fields)
    return Engine(cache_bytes=0).run(request, instance)


# -- the card


def test_a_card_without_actions_says_nothing_of_them(folder: Path) -> None:
    """The bundled one's digest, as it was before there were any."""
    assert "action" not in build_card("tiny").to_json()
    assert build_card("tiny").digest == build_card("tiny", actions=None).digest


def test_a_card_with_actions_names_them_and_embeds_them(folder: Path) -> None:
    card = with_actions(card_of(folder), NAMES)
    card.validate()
    assert ModelCard.from_json(card.to_json()).digest == card.digest
    assert card.loops["denoise"].options["actions"] == list(NAMES)
    assert card.components["actions"].config == {"num_actions": 3, "width": 32}
    assert with_actions(card, NAMES) is card
    with pytest.raises(UserError, match="was trained for"):
        with_actions(card, ("none", "up"))
    with pytest.raises(UserError, match="at least one more"):
        with_actions(card_of(folder), ("none",))
    with pytest.raises(UserError, match="each name once"):
        Engine().load(with_actions(card_of(folder), ("none", "left", "left")))
    built = family("wan_causal").card("tiny", None, None, actions=["none", "left"])
    transformer: Any = Engine().load(built).module("transformer")
    width = transformer.proj_out.in_features
    assert built.components["actions"].config == {"num_actions": 2, "width": width}


# -- what they compute


def test_new_actions_change_no_bit(folder: Path) -> None:
    plain = run(Engine().load(card_of(folder)))
    instance = Engine().load(with_actions(card_of(folder), NAMES))
    for actions in ((), ("left", "right", "none", "left")):
        ours = run(instance, *actions)
        assert torch.equal(ours.latents, plain.latents)
        assert torch.equal(ours.video, plain.video)


def test_a_chunk_is_under_its_own_action_and_those_after_see_it(steered: ModelInstance) -> None:
    base = run(steered, "none", "none", "none", "none").latents
    assert torch.equal(run(steered).latents, base)
    for j in range(4):
        actions = ["none"] * 4
        actions[j] = "left"
        moved = run(steered, *actions).latents
        changed = [not torch.equal(moved[:, i], base[:, i]) for i in range(4)]
        assert changed == [i >= j for i in range(4)]
    assert not torch.equal(run(steered, *["left"] * 4).latents, run(steered, *["right"] * 4).latents)


def test_an_action_is_added_to_the_timesteps_embedding(steered: ModelInstance) -> None:
    """Told again by a hook: the library's own forward whose time embedder gives the sum."""
    from cards.wan_causal.transformer import block_causal

    module: Any = steered.module("transformer")
    vector = steered.call(ModelCall("actions", "embed", {"ids": torch.tensor([[1]])}))
    generator = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 4, 1, 4, 4, generator=generator), torch.randn(1, 6, 24, generator=generator)
    t = torch.tensor([617.25])
    handle = module.condition_embedder.time_embedder.register_forward_hook(lambda m, a, out: out + vector[:, 0])
    with torch.no_grad():
        expected = super(type(module), module).forward(latents, t, text, return_dict=False)[0]
        handle.remove()
        (ours,) = module(latents, t, text, causal=block_causal(1, 4), action=vector[:, 0])
        (by_chunk,) = module(latents, t[None], text, causal=block_causal(1, 4), action=vector)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(by_chunk, expected, rtol=0, atol=1e-6)


def test_teacher_forcing_on_actions_is_the_cached_forward_on_clean_chunks(steered: ModelInstance) -> None:
    from loops.chunk_rollout import ChunkOptions, slab_spec
    from loops.options import read_options
    from loops.slab import SlabHandle
    from methods.causal_init import teacher_forced_velocity

    spec = steered.card.loops["denoise"]
    options = read_options(ChunkOptions, spec, steered.card)
    generator = torch.Generator().manual_seed(1)
    noisy, clean = (torch.randn(1, 4, 4, 4, 4, generator=generator) for _ in range(2))
    text: Tensor = torch.randn(1, 12, 24, generator=generator)
    sigma_BJ, actions = torch.tensor([[0.9, 0.5, 0.2, 0.7]]), ("none", "left", "right", "left")
    got = teacher_forced_velocity(steered, noisy, clean, sigma_BJ, text, gradient=False, actions=[actions])
    kv = SlabHandle(
        slab_spec(
            steered.config("transformer"),
            options,
            chunks=4,
            shape=(1, 4, 1, 4, 4),
            dtype=torch.float32,
            device="cpu",
        )
    )
    ids = torch.tensor([[NAMES.index(name) for name in actions]])
    vectors = steered.call(ModelCall("actions", "embed", {"ids": ids}))
    static = steered.numerics("transformer")
    for j in range(4):
        outputs = []
        for latents, sigma in ((noisy, sigma_BJ[0, j]), (clean, torch.tensor(0.0))):
            tensors = {
                "latents": latents[:, :, j : j + 1],
                "timestep": 1000 * sigma[None],
                "text": text,
                "action": vectors[:, j],
            }
            outputs.append(
                steered.call(ModelCall("transformer", "velocity_chunk", tensors, {**static, "index": j}, state=kv))
            )
        torch.testing.assert_close(got[:, :, j : j + 1], outputs[0], rtol=0, atol=5e-6)


# -- requests, sessions and gates


def test_acts_are_one_request_with_as_many_actions(steered: ModelInstance) -> None:
    whole = run(steered, "none", "left", "right", "right")
    session = WorldModelSession(Engine(cache_bytes=0), steered, "a red circle", 5)
    assert session.actions == NAMES
    latents = []
    for action, chunks in ((None, 1), ("left", 1), ("right", 2)):
        handle = session.act(action, chunks)
        while session.engine.tick():
            pass
        latents.append(handle.result().latents)
        assert handle.progress[0] == handle.progress[1]
    assert torch.equal(torch.cat(latents, dim=1), whole.latents)


def test_different_acts_of_two_forks_do_not_meet(steered: ModelInstance) -> None:
    engine = Engine(cache_bytes=0)
    session = WorldModelSession(engine, steered, "a red circle", 5)

    def together(*acts: tuple[WorldModelSession, str]) -> list[Tensor]:
        handles = [world.act(action) for world, action in acts]
        while engine.tick():
            pass
        return [handle.result().latents for handle in handles]

    together((session, "none"))
    twin, third = session.fork(), session.fork()
    left, right = together((session, "left"), (twin, "right"))
    assert not torch.equal(left, right)
    assert torch.equal(together((third, "left"))[0], left)
    again = together((session, "none"), (third, "none"), (twin, "none"))
    assert torch.equal(again[0], again[1])
    assert not torch.equal(again[0], again[2])


def test_the_engine_is_the_reference_driver_and_the_gates_pass(steered: ModelInstance, folder: Path) -> None:
    request = replace(REQUEST, actions=("none", "left", "right", "left"))
    driven = drive_request(steered, request)
    assert torch.equal(Engine(cache_bytes=0).run(request, steered).latents, driven["latents"][0])
    assert chunk_gate(steered, prompt="a red circle", seed=3).difference == 0
    rows = list(chunk_rows(steered, "t2v", WanLibrary(steered.card, torch.device("cpu")), seed=1))
    assert [row for row in rows if not row.passed] == []
    assert len(rows) == 6


def test_wrong_actions_are_refused_with_the_list(folder: Path, steered: ModelInstance) -> None:
    with pytest.raises(UserError, match=r"jump.*left, none, right"):
        run(steered, "none", "jump", "none", "none")
    with pytest.raises(UserError, match="actions: got 2, expected one a chunk: 4"):
        run(steered, "none", "left")
    with pytest.raises(UserError, match="expected a tuple of names"):
        Engine().run(replace(REQUEST, actions="left"), steered)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has no actions"):
        run(Engine().load(card_of(folder)), *["left"] * 4)
    session = WorldModelSession(Engine(), steered, "a red circle", 5)
    with pytest.raises(UserError, match=r"jump.*left, none, right"):
        session.act("jump")
    from cards.wan21.card import card_from_folder as wan_card

    with pytest.raises(UserError, match="actions"):
        Engine().submit(
            replace(REQUEST, actions=("left",)), ModelInstance.from_folder(wan_card(folder), folder, tasks=())
        )


# -- the folder


def test_weights_lie_beside_the_pipeline_which_loads_unchanged(
    folder: Path, steered: ModelInstance, tmp_path: Path
) -> None:
    where = tmp_path / "export"
    shutil.copytree(folder, where)
    module: Any = steered.module("actions")
    module.save_pretrained(where / "actions")
    (where / CARD_FILE).write_text(
        steered.card.model_copy(update={"source": Source(kind="folder", location=".")}).to_json()
    )
    again = Engine().load(where)
    actions = ("none", "left", "right", "right")
    assert torch.equal(run(again, *actions).latents, run(steered, *actions).latents)
    lazily = ModelInstance.from_folder(again.card, where, tasks=())
    assert lazily.weights_bytes("actions") == 3 * 32 * 4
    assert torch.equal(run(lazily, *actions).latents, run(steered, *actions).latents)
    pipeline = WanPipeline.from_pretrained(where)
    assert type(pipeline.transformer).__name__ == "WanTransformer3DModel"
    (where / "actions" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(SourceError, match="missing file"):
        check_source(again.card)


def test_trained_actions_that_are_not_there_are_missed(folder: Path) -> None:
    card = with_actions(card_of(folder), NAMES)
    check_source(card)
    new = ModelInstance.from_folder(card, folder, tasks=())
    assert new.weights_bytes("actions") == 3 * 32 * 4
    weight: Any = new.module("actions").state_dict()["embedding.weight"]
    assert weight.shape == (3, 32)
    assert not weight.any()
    trained = card.model_copy(update={"recipe": card.recipe.model_copy(update={"weights": {"actions": "0" * 64}})})
    with pytest.raises(SourceError, match="holds no 'actions'"):
        check_source(trained)
