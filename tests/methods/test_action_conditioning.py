"""Training on actions: whose vectors learn, what a role serves, what an export and a checkpoint hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from torch import Tensor

from cards.errors import UserError
from cards.wan21.card import card_from_folder as wan_card
from cards.wan_causal.card import causal_card, with_actions, with_rollout
from fastvideo_train.checkpoint import gather_roles, weight_change
from fastvideo_train.export import export_model, reference_request
from fastvideo_train.trained_weights import weights_digest
from inference.engine import Engine
from inference.request import Request
from methods.causal_init import CausalInit
from methods.roles import EMA, STUDENT, joined_names
from methods.self_forcing import clip_shape

NAMES = ("none", "left", "right")
WORDS = ("a red circle", "the blue square")


@pytest.fixture(scope="module")
def acting(wan_folder: Path, training: Any) -> Any:
    """Parts of a run on the causal card of the tiny random Wan, with actions."""
    parts = type(training)(wan_folder)
    base = wan_card(wan_folder)
    short = base.sampling.model_copy(update={"max_sequence_length": 12, "frames": 9, "height": 16, "width": 16})
    parts.card = with_actions(with_rollout(causal_card(base.model_copy(update={"sampling": short})), window=2), NAMES)
    return parts


def method_of(**options: Any) -> CausalInit:
    settings: dict[str, Any] = {
        "way": "teacher_forcing",
        "lr": 1e-2,
        "steps": 2,
        "batch_size": 2,
        "caption_dropout": 0.0,
        "weight_decay": 0.0,
        "text_padding": "folded",
    }
    return CausalInit(**(settings | options))


def batch_of(acting: Any, *actions: tuple[str, ...]) -> dict[str, Any]:
    x0 = torch.randn(2, *clip_shape(acting.card), generator=torch.Generator().manual_seed(2))
    rows = {"actions": list(actions)} if actions else {}
    return {"latents": x0, "prompt": list(WORDS), "index": torch.arange(2), "conditions": {}, **rows}


ACTS = (("none", "left", "left"), ("none", "left", "none"))


def test_only_the_vectors_of_actions_that_were_seen_learn(acting: Any) -> None:
    method = method_of()
    ctx = acting.context(method)
    (update,) = list(method.updates(batch_of(acting, *ACTS), 0, ctx))
    assert update.loss is not None
    update.loss.backward()
    grad = ctx.roles["actions"].embedding.weight.grad
    assert [bool(row.any()) for row in grad] == [True, True, False]
    assert ctx.roles["actions"] is acting_module(ctx)
    trained = ctx.roles.trained(STUDENT)
    assert any(p is ctx.roles["actions"].embedding.weight for p in trained)
    assert all(p.grad is not None for p in ctx.roles[STUDENT].parameters() if p.requires_grad and p.ndim > 1)


def acting_module(ctx: Any) -> Any:
    return ctx.roles.instance(STUDENT).module("actions")


def test_actions_alone_may_be_trained(acting: Any) -> None:
    method = method_of(actions_only=True)
    ctx = acting.context(method)
    assert [tuple(p.shape) for p in ctx.roles.trained(STUDENT)] == [(3, 32)]
    (update,) = list(method.updates(batch_of(acting, *ACTS), 0, ctx))
    assert update.loss is not None
    update.loss.backward()
    assert ctx.roles["actions"].embedding.weight.grad.any()


def test_clips_without_actions_are_under_none_and_tails_are_cut(acting: Any) -> None:
    method = method_of()
    ctx = acting.context(method)
    with torch.no_grad():
        ctx.roles["actions"].embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    x0, addresses = batch_of(acting)["latents"], [(0, "train", 3, row) for row in range(2)]

    def losses(actions: Any) -> Tensor:
        return method.losses(x0, WORDS, addresses, ctx, training=False, actions=actions)

    none = losses([("none",) * 3] * 2)
    assert torch.equal(losses(None), none)
    assert torch.equal(losses([("none",) * 3, ()]), none)
    assert torch.equal(losses([("none",) * 5] * 2), none)
    assert (losses(ACTS) != none).all()
    with pytest.raises(UserError, match=r"jump.*left, none, right"):
        losses([("jump",) * 3] * 2)


def test_a_noised_past_is_seen_in_training_alone(acting: Any) -> None:
    plain, noised = method_of(), method_of(past_noise=0.5)
    ctx = acting.context(plain)
    x0, addresses = batch_of(acting)["latents"], [(0, "train", 3, row) for row in range(2)]
    for training, same in ((True, False), (False, True)):
        one, other = (
            method.losses(x0, WORDS, addresses, ctx, training=training).detach() for method in (plain, noised)
        )
        assert torch.equal(one, other) == same


def test_the_first_chunk_counts_as_it_is_weighted(acting: Any) -> None:
    x0, addresses = batch_of(acting)["latents"], [(0, "train", 3, row) for row in range(2)]

    def losses(weight: float) -> Tensor:
        method = method_of(first_weight=weight)
        return method.losses(x0, WORDS, addresses, acting.context(method)).detach().double()

    chunks = x0.shape[2]
    first = chunks * losses(1.0) - (chunks - 1) * losses(0.0)
    assert (first > 0.1).all()
    expected = (3 * first + (chunks - 1) * losses(0.0)) / (chunks + 2)
    torch.testing.assert_close(losses(3.0), expected, rtol=1e-6, atol=0)


def test_a_run_trains_averages_checkpoints_and_exports_the_vectors(
    acting: Any, tmp_path: Path, wan_folder: Path
) -> None:
    method = method_of(ema=0.5)
    module = acting.module(method)
    acting.fit(module, [batch_of(acting, *ACTS)] * 2)
    student, average = module.roles["actions"].embedding.weight, module.roles["actions_of_ema"].embedding.weight
    assert student[1].abs().max() > 1e-3
    assert student[2].abs().max() == 0
    assert 0.2 * student[1].abs().max() < average[1].abs().max() < student[1].abs().max()
    assert joined_names(acting.card, EMA) == module.roles.joined(EMA) == {"actions": "actions_of_ema"}
    roles = gather_roles(module)
    joined = {cid: roles[name] for cid, name in module.roles.joined(EMA).items()}
    changes = weight_change(acting.card, roles[EMA], EMA, None, joined)
    assert changes["actions"] == pytest.approx(average.abs().max().item())
    assert changes["transformer"] > 0
    request = Request(prompt="a red circle", seed=3, actions=("none", "left", "left"), output="latents")
    expected = module.engine.run(request, module.roles.instance(EMA)).latents
    exported = export_model(
        card=module.card,
        out=tmp_path / "export",
        state=roles[EMA],
        joined=joined,
        role=EMA,
        lora=None,
        method="causal_init",
        guidance=1.0,
        data="",
        metrics={},
        reference_latents=expected,
        reference_request=request,
        samples=[("a red circle", np.zeros((9, 16, 16, 3), dtype=np.uint8))],
    )
    assert exported.latents_difference == 0
    digest = weights_digest(exported.folder / "actions")
    assert exported.card.recipe.weights["actions"] == digest
    again = Engine().load(exported.folder)
    assert torch.equal(Engine().run(request, again).latents, expected)
    assert type(WanPipeline.from_pretrained(exported.folder).transformer).__name__ == "WanTransformer3DModel"
    code = re.search(r"```python\n(.*?)```", (exported.folder / "README.md").read_text(), re.DOTALL)
    assert code is not None and "Pipeline" not in code[1]
    names: dict[str, Any] = {}
    exec(code[1].replace('"export"', repr(str(exported.folder))), names)
    assert names["world"].chunks == 1 and len(names["video"]) == names["world"].frames
    # One that trains the transformer alone hands the vectors on.
    plain = export_model(
        card=exported.card,
        out=tmp_path / "next",
        state=roles[EMA],
        role=EMA,
        lora=None,
        method="self_forcing",
        guidance=1.0,
        data="",
        metrics={},
        reference_latents=None,
        reference_request=reference_request(exported.card, 0, None),
        samples=[],
    )
    assert plain.card.recipe.weights["actions"] == digest
    assert torch.equal(Engine().run(request, Engine().load(plain.folder)).latents, expected)


def test_settings_that_do_not_fit_the_card_are_named(acting: Any) -> None:
    assert method_of(actions_only=True).problems(acting.card, 1) == []
    bare = with_rollout(causal_card(wan_card(acting.folder)), window=2)
    (problem,) = method_of(actions_only=True).problems(bare, 1)
    assert "has no actions" in problem
    (problem,) = method_of(action_eval=4).problems(acting.card, 1)
    assert "expected ['none', 'left', 'right', 'up', 'down']" in problem
    (problem,) = method_of(past_noise=1.0).problems(acting.card, 1)
    assert "past_noise: got 1.0" in problem
    (problem,) = method_of(first_weight=-1.0).problems(acting.card, 1)
    assert "first_weight: got -1.0" in problem
