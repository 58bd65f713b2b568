"""Two components of one card in training: a language model beside the denoiser, each with an optimizer of its own; and
the denoiser left alone. On tiny random Wan and Qwen3 modules in one folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

import cards.registry
from cards.card import ModelCard
from fastvideo_train import checkpoint as ckpt
from fastvideo_train.export import export_model, reference_request
from fastvideo_train.memory_plan import Clip, plan_memory
from fastvideo_train.parallel.plan import Single
from fastvideo_train.trained_weights import weights_digest
from inference.engine import Engine
from inference.request import Request
from methods.forward import velocity
from methods.method import Context, Method, OptimizerSpec, Update
from methods.roles import EMA, REFERENCE, STUDENT, Roles, trainable_component
from tests.support.omni.card import omni_card, registered, save_omni

LM, OF_EMA, OF_REFERENCE = "lm", "lm_of_ema", "lm_of_reference"
REQUEST = Request(prompt="a red circle", seed=3, steps=2, guidance=1.0, output="latents")


class Shrink(Method):
    """Makes the language model's logits and the denoiser's velocities smaller, a step of each or of one."""

    name = "shrink"

    def __init__(self, *, lm_lr: float = 3e-2, frozen: bool = False, lm_steps: int = 1, **common: Any):
        super().__init__(**{"lr": 1e-2, "steps": 4, "batch_size": 1, "clip": None, **common})
        self.lm_lr = lm_lr
        self.frozen = frozen
        self.lm_steps = lm_steps

    def roles(self) -> tuple[str, ...]:
        return ()

    def optimizers(self) -> dict[str, OptimizerSpec]:
        lm = OptimizerSpec(self.lm_lr, self.betas, self.weight_decay, self.clip, steps=self.steps * self.lm_steps)
        return {**({} if self.frozen else super().optimizers()), LM: lm}

    def attach_heads(self, roles: Roles) -> None:
        roles.join(LM, apart=True, roles=(REFERENCE,))

    def token_batches(self, card: ModelCard) -> dict[str, tuple[int, int]]:
        return {LM: (8, 100)}

    def updates(self, batch: Any, step: int, ctx: Context) -> Iterator[Update]:
        if "student" in batch:
            text = torch.ones(1, 16, 24)
            predicted = velocity(
                ctx.roles.instance(STUDENT), torch.ones(1, 4, 3, 8, 8), torch.ones(1), text, gradient=True
            )
            yield Update(predicted.square().mean(), step=True)
        for _ in range(self.lm_steps if LM in batch else 0):
            logits = ctx.roles[LM](input_ids=torch.tensor([[3, 5, 7, step]]), use_cache=False).logits
            yield Update(logits.square().mean(), step=True, optimizer=LM)


@pytest.fixture(scope="module")
def joint(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Training parts of a card whose language model comes first."""
    folder = save_omni(training.folder, tmp_path_factory.mktemp("joint") / "omni")
    patch = pytest.MonkeyPatch()
    patch.setattr(cards.registry, "FAMILIES", registered())
    card = omni_card(folder)
    lm = card.components[LM].model_copy(update={"trainable": True})
    others = {cid: c for cid, c in card.components.items() if cid != LM}
    made = copy.copy(training)
    made.folder, made.card = folder, card.model_copy(update={"components": {LM: lm, **others}})
    yield made
    patch.undo()


def weights(module: Any, *names: str) -> dict[str, Tensor]:
    return {f"{n}.{k}": p.detach().clone() for n in names for k, p in module.roles[n].state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    assert before.keys() == after.keys()
    return any(not torch.equal(before[key], after[key]) for key in before)


def test_the_student_is_the_denoiser_whatever_comes_first_on_the_card(joint: Any) -> None:
    assert next(iter(joint.card.components)) == LM
    assert trainable_component(joint.card) == "transformer"
    module = joint.module(Shrink())
    assert module.roles[STUDENT] is module.base.module("transformer")
    assert module.roles[LM] is module.base.module(LM)
    assert isinstance(module.roles[LM], Qwen3ForCausalLM)


@pytest.mark.parametrize("turn", [STUDENT, LM])
def test_each_optimizer_touches_only_its_own_parameters(joint: Any, turn: str) -> None:
    """Weight decay and moments included: the other part keeps every bit and gets no gradient."""
    module = joint.module(Shrink(weight_decay=0.5))
    parts = {STUDENT: weights(module, STUDENT), LM: weights(module, LM)}
    frozen = weights(module, OF_REFERENCE)
    (row,) = joint.fit(module, [(turn,)])
    other = LM if turn == STUDENT else STUDENT
    assert moved(parts[turn], weights(module, turn))
    assert not moved(parts[other], weights(module, other))
    assert not moved(frozen, weights(module, OF_REFERENCE))
    assert all(p.grad is None for p in module.roles[other].parameters())
    names = {STUDENT: {"train/grad_norm", "train/lr"}, LM: {"train/lm_grad_norm", "train/lm_lr"}}
    assert names[turn] <= row.keys() and not names[other] & row.keys()


def test_two_optimizers_two_rates_two_schedules(joint: Any) -> None:
    """Against AdamW by hand on each part."""
    method = Shrink(lr=1e-2, lm_lr=4e-2, lr_schedule="cosine", lm_steps=2)
    module = joint.module(method)
    owned = {name: {id(p) for p in module.roles.trained(name)} for name in (STUDENT, LM)}
    assert owned[STUDENT] == {id(p) for p in module.roles[STUDENT].parameters()}
    assert owned[LM] == {id(p) for p in module.roles[LM].parameters()}
    rows = joint.fit(module, [(STUDENT, LM)] * 2)
    # A row shows the rate of its last step: 0 and 1 of 4, and 1 and 3 of 8.
    assert [row["train/lr"] for row in rows] == pytest.approx([1e-2, 1e-2 * method.lr_factor(1, 4)])
    assert [row["train/lm_lr"] for row in rows] == pytest.approx([4e-2 * method.lr_factor(n, 8) for n in (1, 3)])
    by_hand = joint.module(method).roles[LM]
    by_hand.requires_grad_(True)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=4e-2, weight_decay=method.weight_decay)
    for n in range(4):
        optimizer.param_groups[0]["lr"] = 4e-2 * method.lr_factor(n, 8)
        ids = torch.tensor([[3, 5, 7, n // 2]])
        by_hand(input_ids=ids, use_cache=False).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(module.roles[LM].parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_each_component_has_its_own_version_and_the_text_cache_survives_both(joint: Any) -> None:
    module = joint.module(Shrink())
    engine, seen = module.engine, []
    for turn in ((LM,), (STUDENT,)):
        before = module.roles.instance(STUDENT).versions()
        latents = engine.run(REQUEST, module.roles.instance(STUDENT)).latents
        joint.fit(module, [turn])
        after = module.roles.instance(STUDENT).versions()
        component = {LM: LM, STUDENT: "transformer"}[turn[0]]
        assert after == before | {component: before[component] + 1}
        again = engine.run(REQUEST, module.roles.instance(STUDENT)).latents
        seen.append(torch.equal(latents, again))
    assert seen == [True, False]
    assert engine.features.misses == 1  # one encode for four requests over two syncs


def test_a_reference_of_the_language_model_alone_shares_the_denoiser(joint: Any) -> None:
    module = joint.module(Shrink())
    student, reference = (module.roles.instance(role) for role in (STUDENT, REFERENCE))
    assert reference.resident("transformer") is student.resident("transformer")
    assert reference.module(LM) is module.roles[OF_REFERENCE] is not student.module(LM)
    joint.fit(module, [(LM,)])
    source = Qwen3ForCausalLM.from_pretrained(joint.folder / LM)
    assert all(torch.equal(p, q) for p, q in zip(reference.module(LM).parameters(), source.parameters(), strict=True))


def test_a_frozen_denoiser_keeps_every_byte_and_is_not_copied(joint: Any) -> None:
    module = joint.module(Shrink(frozen=True, weight_decay=0.5, ema=0.7))
    before = weights(module, STUDENT)
    assert set(module.roles) == {STUDENT, LM, OF_EMA, OF_REFERENCE}
    assert module.roles.instance(EMA).resident("transformer") is module.roles.instance(STUDENT).resident("transformer")
    kept: dict[str, Any] = {}
    module.on_end = lambda: kept.update(state=ckpt.state_of(module, {}))
    rows = joint.fit(module, [(LM,)] * 3)
    after = weights(module, STUDENT)
    assert all(before[key].numpy().tobytes() == after[key].numpy().tobytes() for key in before)
    assert not any(p.requires_grad for p in module.roles[STUDENT].parameters())
    assert module.optimizer_steps == 3  # of the only optimizer
    assert "train/lr" not in rows[0] and rows[0]["train/lm_grad_norm"] > 0
    assert set(kept["state"]["roles"]) == {LM, OF_EMA, OF_REFERENCE}  # the source still has the denoiser


def test_the_average_follows_each_component_at_its_own_steps(joint: Any) -> None:
    """Two steps of the language model a step of the denoiser; the average starts after the third step of each."""
    module = joint.module(Shrink(ema=0.7, ema_start=3, lm_steps=2))
    seen: dict[str, list[dict[str, Tensor]]] = {STUDENT: [], LM: []}
    changed = module.roles.changed

    def watched(name: str) -> None:
        seen[name].append(weights(module, name))
        changed(name)

    module.roles.changed = watched
    joint.fit(module, [(STUDENT, LM)] * 2)
    assert [len(states) for states in seen.values()] == [2, 4]
    average = module.roles[EMA].state_dict()
    assert all(torch.equal(average[k.partition(".")[2]], v) for k, v in seen[STUDENT][-1].items())  # still copies
    lm = module.roles[OF_EMA].state_dict()
    for key, third in seen[LM][2].items():
        expected = 0.7 * third.double() + 0.3 * seen[LM][3][key].double()
        torch.testing.assert_close(lm[key.partition(".")[2]].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("frozen", [False, True])
def test_two_and_two_steps_are_four_steps_bit_for_bit(joint: Any, tmp_path: Path, frozen: bool) -> None:
    turns = [(STUDENT, LM) if not frozen else (LM,)] * 4
    kept: dict[str, Any] = {}

    def run(steps: Any, start: int, name: str, on_start: Any = None) -> Any:
        module = joint.module(Shrink(ema=0.7, frozen=frozen), start_step=start)
        module.on_start = None if on_start is None else lambda: on_start(module)
        module.on_end = lambda: kept.update({name: (ckpt.save(tmp_path / name, module, {}), ckpt.state_of(module, {}))})
        joint.fit(module, steps)
        return module

    whole = run(turns, 0, "whole")
    run(turns[:2], 0, "half")
    checkpoint = kept["half"][0]
    meta = ckpt.read_meta(checkpoint)

    def resume(module: Any) -> None:
        before = module.roles.instance(EMA).versions()
        ckpt.restore(ckpt.load_state(checkpoint), meta, module)
        assert module.roles.instance(EMA).versions()[LM] > before[LM]

    resumed = run(turns[2:], 2, "resumed", resume)
    ours, theirs = (kept[name][1] for name in ("resumed", "whole"))
    assert set(ours["optimizers"]) == ({LM} if frozen else {STUDENT, LM})
    assert _flat(ours) == _flat(theirs)
    assert not moved(weights(whole, *whole.roles), weights(resumed, *resumed.roles))


def _flat(state: Any) -> Any:
    """Nested state with tensors as bytes."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: _flat(value) for key, value in state.items()}
    return [_flat(value) for value in state] if isinstance(state, list | tuple) else state


@pytest.mark.parametrize("frozen", [False, True])
def test_an_export_holds_every_trained_component(joint: Any, tmp_path: Path, frozen: bool) -> None:
    module = joint.module(Shrink(ema=0.5, frozen=frozen))
    joint.fit(module, [(STUDENT, LM) if not frozen else (LM,)] * 2)
    gathered = ckpt.gather_roles(module)
    joined = {cid: gathered[name] for cid, name in module.roles.parts(EMA).items()}
    state = joined.pop("transformer", None)
    assert (state is None) == frozen
    changes = ckpt.weight_change(joint.card, state, EMA, None, joined)
    assert set(changes) == ({LM} if frozen else {LM, "transformer"}) and min(changes.values()) > 1e-4
    request = reference_request(joint.card, 0, None)
    exported = export_model(
        card=joint.card,
        out=tmp_path / "export",
        state=state,
        joined=joined,
        role=EMA,
        lora=None,
        method="shrink",
        guidance=None,
        data="",
        metrics={},
        reference_latents=module.engine.run(request, module.roles.instance(EMA)).latents,
        reference_request=request,
        samples=[],
    )
    assert exported.latents_difference == 0
    assert set(exported.card.recipe.weights) == set(changes)
    assert exported.card.recipe.weights[LM] == weights_digest(exported.folder / LM)
    same = weights_digest(exported.folder / "transformer") == weights_digest(joint.folder / "transformer")
    assert same == frozen
    again = Engine().load(exported.folder)
    average = module.roles[OF_EMA]
    assert all(torch.equal(p, q) for p, q in zip(again.module(LM).parameters(), average.parameters(), strict=True))
    text = Request("a red circle", task="text", seed=1, max_tokens=6, temperature=1.0)
    ours = Engine().run(text, again).completion
    assert ours == module.engine.run(text, module.roles.instance(EMA)).completion
    assert json.loads((exported.folder / "model_index.json").read_text())["lm"] == ["transformers", "Qwen3ForCausalLM"]


def bytes_of(module: torch.nn.Module, *, buffers: bool = True) -> int:
    tensors = {id(t): t for t in (*module.parameters(), *(module.buffers() if buffers else ()))}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("frozen", [False, True])
def test_the_memory_plan_counts_what_each_optimizer_holds(joint: Any, frozen: bool) -> None:
    card: ModelCard = joint.card
    found = plan_memory(
        card,
        Shrink(ema=0.7, frozen=frozen),
        Single(),
        devices=1,
        clip=Clip(frames=9, height=32, width=32),
        max_rows=2,
        generates=False,
    )
    rows = {row.name: row for row in found.rows}
    lm, transformer = (bytes_of(joint.base().module(cid)) for cid in (LM, "transformer"))
    own, main = (bytes_of(joint.base().module(cid), buffers=False) for cid in (LM, "transformer"))
    assert (rows[LM].weights, rows[LM].gradients, rows[LM].optimizer) == (lm, own, 2 * own)
    held = (transformer, 0, 0) if frozen else (transformer, main, 2 * main)
    assert (rows[STUDENT].weights, rows[STUDENT].gradients, rows[STUDENT].optimizer) == held
    assert rows[EMA].weights == lm + (0 if frozen else transformer)
    assert (rows[REFERENCE].weights, rows[REFERENCE].gradients) == (lm, 0)
    assert "transformer" not in rows and "base" not in rows
    assert found.activations > 8 * 100 * 14 * 4  # the logits of a batch of text, at least
