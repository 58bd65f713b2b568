"""UniRL on a tiny random Wan behind a tiny random Qwen3: who learns from what, and what stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cards.errors import UserError
from cards.unified.card import card_from_folder
from fastvideo_train.checkpoint import gather_roles, weight_change
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.evaluation import EvalItem, EvalSettings, evaluate
from fastvideo_train.export import export_model, reference_request
from fastvideo_train.memory_plan import TEXTS, Clip, plan_memory
from fastvideo_train.module import ParityError
from fastvideo_train.parallel.plan import Single
from inference.engine import Engine
from inference.load import card_of
from inference.request import Request
from loops.ar_decode import Completion
from methods.method import Context
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.rewrites import Caption, Ended, make_format
from methods.roles import REFERENCE, STUDENT
from methods.unirl import Credit, UniRL, refiners_of
from methods.world import World
from tests.support.tiny_unified import save_tiny_unified

LLM, OF_REFERENCE = "llm", "llm_of_reference"
PROMPTS = [Prompt("a red circle", {"meaning": "a red circle moves left"}), Prompt("the blue square moves left")]


class ByHand(Reward):
    """``values(sample of the step) -> reward``; keeps what it was asked."""

    name = "by hand"
    version = "1"

    def __init__(self, values: Callable[[int], float]):
        self.values = values
        self.seen: list[RewardBatch] = []

    def score(self, batch: RewardBatch) -> Scores:
        self.seen.append(batch)
        return Scores(values=np.array([self.values(i) for i in range(len(batch))], dtype=np.float64))


def rising() -> ByHand:
    """No two samples of a group score alike."""
    return ByHand(lambda i: float(i * i % 7))


def even(text: str) -> bool:
    """A format by dotted path."""
    return len(text) % 2 == 0


def unirl(**options: Any) -> UniRL:
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "lm_lr": 1e-3,
        "steps": 2,
        "batch_size": 2,
        "samples": 4,
        "num_skip_refinement": 1,
        "max_tokens": 6,
        "format": "ended",
        "format_weight": 0.0,
        "rollout_steps": 3,
        "num_sde": 2,
        "weight_decay": 0.0,
        "clip": None,
        "lm_clip": None,
        "micro_batch": 5,
        "lm_micro_batch": 4,
    }
    return UniRL(**(settings | options))


@pytest.fixture(scope="module")
def unified(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Training parts of a unified card."""
    made = copy.copy(training)
    made.folder = save_tiny_unified(
        training.folder, tmp_path_factory.mktemp("unified") / "card", initializer_range=0.1, tie_word_embeddings=True
    )
    card = card_from_folder(made.folder)
    made.card = card.model_copy(update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 12})})
    return made


def part(module: Any, name: str) -> dict[str, bytes]:
    """Every byte of a role's module."""
    return {key: value.numpy().tobytes() for key, value in module.roles[name].state_dict().items()}


def gradients(ctx: Context, *names: str) -> list[Tensor | None]:
    return [p.grad for name in names for p in ctx.roles[name].parameters()]


def step_by_step(method: UniRL, ctx: Context, step: int = 0) -> Iterator[str]:
    """Does the backward of each update, without a step; gives the optimizer's name."""
    for update in method.updates(PROMPTS, step, ctx):
        if update.loss is not None:
            update.loss.backward()
            yield update.optimizer


# -- who learns from what


def test_the_texts_of_a_rollout_share_forwards_and_leave_no_trace(unified: Any) -> None:
    """The trainer's engine has a pool for the language model; what texts before them left there changes no bit."""
    method = unirl(num_skip_refinement=0)
    module = unified.module(method, reward=rising())
    student, shapes = module.roles.instance(STUDENT), []
    handle = student.module(LLM).register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [Prompt("a red circle and a blue square " * 3)] * 2  # of several blocks, which a shared prefix would skip
    requests = method.rollout_plan(prompts, 0, seed=0, world=World()).requests
    first = module.engine.run_interleaved(requests, student)
    seen = list(shapes)
    assert max(rows for rows, _ in seen) >= 4
    assert len(seen) < sum(len(text.token_ids) for artifact in first for text in artifact.completions.values())
    module.engine.run_interleaved(method.rollout_plan(prompts, 1, seed=0, world=World()).requests, student)
    shapes.clear()
    again = module.engine.run_interleaved(requests, student)
    handle.remove()
    assert shapes == seen
    assert [artifact.refined for artifact in first] == [artifact.refined for artifact in again]
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.latents, b.latents)
        assert all(torch.equal(a.tokens[node].logprobs, b.tokens[node].logprobs) for node in a.tokens)


def test_a_group_is_of_originals_and_rewrites_and_is_judged_by_the_original(unified: Any) -> None:
    reward, method = rising(), unirl()
    ctx = unified.context(method, reward)
    list(method.updates(PROMPTS, 0, ctx))
    (batch,) = reward.seen
    assert batch.prompts == [PROMPTS[0].text] * 4 + [PROMPTS[1].text] * 4
    assert [dict(m) for m in batch.metadata] == [dict(PROMPTS[0].metadata)] * 4 + [{}] * 4
    requests = method.rollout_plan(PROMPTS, 0, seed=0, world=ctx.world).requests
    assert [r.refine for r in requests] == [False, True, True, True] * 2
    assert {r.temperature for r in requests if r.refine} == {1.0}
    assert len({r.seed for r in requests}) == 8
    assert all(r.sde is not None and r.sde.window == (0, 2) for r in requests)


@pytest.mark.parametrize("m", [0, 1, 2])
def test_only_rewrites_reach_the_language_model(unified: Any, m: int) -> None:
    """m = 0 refines every sample; every sample reaches the generator."""
    method = unirl(num_skip_refinement=m)
    ctx = unified.context(method, rising())
    tokens: list[int] = []
    steps: list[int] = []
    for module, seen in ((ctx.roles[LLM], tokens), (ctx.roles[STUDENT], steps)):
        module.register_forward_hook(
            lambda module, args, kwargs, output, seen=seen: (
                seen.append(len(kwargs["input_ids" if seen is tokens else "hidden_states"]))
                if torch.is_grad_enabled()
                else None
            ),
            with_kwargs=True,
        )
    list(method.updates(PROMPTS, 0, ctx))
    assert sum(tokens) == 2 * (4 - m)
    assert sum(steps) == 2 * 4 * 2


def test_no_gradient_crosses_the_models(unified: Any) -> None:
    method = unirl()
    ctx = unified.context(method, rising())
    seen = []
    for optimizer in step_by_step(method, ctx):
        reached = {name for name in (STUDENT, LLM, OF_REFERENCE) if any(g is not None for g in gradients(ctx, name))}
        assert reached == {optimizer}
        seen.append(optimizer)
        for name in (STUDENT, LLM):
            ctx.roles[name].zero_grad()
    assert set(seen) == {STUDENT, LLM}


class OriginalsAlone(UniRL):
    """Credit to the originals alone."""

    def credit(self, rewards_GK: Any, ctx: Context) -> dict[str, Credit]:
        advantages = np.zeros_like(rewards_GK)
        advantages[:, : self.num_skip_refinement] = 3.0
        return dict.fromkeys((LLM, STUDENT), Credit(advantages, np.ones_like(advantages, dtype=bool)))


def test_originals_contribute_no_gradient_to_the_language_model(unified: Any) -> None:
    method = unirl()
    method.__class__ = OriginalsAlone
    ctx = unified.context(method, rising())
    assert set(step_by_step(method, ctx)) == {STUDENT, LLM}
    assert all(gradient is not None and not gradient.any() for gradient in gradients(ctx, LLM))
    assert any(gradient.any() for gradient in gradients(ctx, STUDENT) if gradient is not None)


def test_equal_rewards_leave_only_the_pull_to_the_reference(unified: Any) -> None:
    """None at all where the language model still is its reference; the generator is left alone."""
    method = unirl(lm_kl=0.3)
    ctx = unified.context(method, ByHand(lambda i: 0.5))
    assert set(step_by_step(method, ctx)) == {LLM}
    assert all(gradient is not None and not gradient.any() for gradient in gradients(ctx, LLM))
    with torch.no_grad():
        for parameter in ctx.roles[LLM].parameters():
            parameter.mul_(1.02)
    ctx.roles.changed(LLM)
    found = []
    for kl in (0.3, 0.6):
        ctx.roles[LLM].zero_grad()
        method.lm_kl = kl
        list(step_by_step(method, ctx, step=1))
        found.append([gradient.clone() for gradient in gradients(ctx, LLM) if gradient is not None])
    assert any(gradient.any() for gradient in found[0])
    for once, twice in zip(*found, strict=True):  # nothing but the KL term is in it
        torch.testing.assert_close(2 * once, twice, rtol=1e-5, atol=1e-8)


def test_a_failed_reward_is_left_out_of_both_halves(unified: Any) -> None:
    method = unirl(advantage_std="group", lm_kl=0.0)
    for failed in (None, 1):
        scores = [float("nan") if i == failed else float(i % 4) for i in range(8)]
        ctx = unified.context(method, ByHand(scores.__getitem__))
        rewards, valid = None, None
        credit = method.credit

        def watched(table: Any, ctx: Any, credit: Any = credit) -> Any:
            nonlocal rewards, valid
            made = credit(table, ctx)
            rewards, valid = made[LLM].advantages_GK, made[LLM].valid_GK
            return made

        method.credit = watched  # type: ignore[method-assign,assignment]
        updates = list(method.updates(PROMPTS, 0, ctx))
        method.credit = credit  # type: ignore[method-assign]
        assert rewards is not None and valid is not None
        assert valid.sum() == (8 if failed is None else 7)
        assert failed is None or (rewards[0, 1] == 0 and abs(rewards[0].sum()) < 1e-9)
        (last,) = [u.metrics for u in updates if "train/reward_failed" in u.metrics]
        assert last["train/reward_failed"] == (0 if failed is None else 1)


# -- rewards


def test_the_total_is_task_plus_format_and_originals_get_the_mean_format() -> None:
    method = unirl(samples=5, num_skip_refinement=2, format_weight=0.5)
    task = np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [1.0, 1.0, 0.0, np.nan, 0.0]])
    formats = np.array([[np.nan, np.nan, 1.0, 0.0, 1.0], [np.nan, np.nan, 0.0, 0.0, 0.0]])
    expected = task + 0.5 * np.array([[2 / 3, 2 / 3, 1.0, 0.0, 1.0], [0.0] * 5])
    np.testing.assert_allclose(method.total(task, formats), expected)
    # All n share one group: the mean over them is 0 after centring, whatever m is.
    advantages = method.credit(method.total(task, formats), None)[LLM].advantages_GK  # type: ignore[arg-type]
    assert abs(advantages[0].sum()) < 1e-9
    reference = expected[0] - expected[0].mean()
    np.testing.assert_allclose(advantages[0], reference / (expected[0].std() + 1e-4))


def completion(text: str, finish: str = "stop") -> Completion:
    return Completion(text=text, token_ids=(1,), prompt_tokens=1, finish=finish)  # type: ignore[arg-type]


def test_a_caption_is_well_formed_ends_and_may_keep_the_meaning() -> None:
    format = Caption()
    assert format.reward(completion("a red circle moves left")) == 1
    assert format.reward(completion("a red circle moves left", "length")) == 0
    assert format.reward(completion("a crimson ball drifting west")) == 0
    meaning = {"meaning": "a red circle left of a blue square"}
    assert format.keeps_meaning("a blue square is to the right of a red circle", meaning) == 1
    assert format.keeps_meaning("a blue square left of a red circle", meaning) == 0
    assert format.keeps_meaning("gibberish", meaning) == 0
    assert np.isnan(format.keeps_meaning("a red circle moves left", {}))


def test_formats_are_named_or_functions() -> None:
    assert Ended().reward(completion("anything")) == 1
    assert Ended().reward(completion(" ")) == 0
    by_path = make_format(f"{__name__}.even")
    assert [by_path.reward(completion(text)) for text in ("ab", "abc")] == [1, 0]
    with pytest.raises(UserError, match=r"'captoin'; expected one of: caption, ended"):
        make_format("captoin")
    with pytest.raises(UserError, match="no function to import"):
        make_format("no.such.function")


# -- what moves and what stays, under the trainer


def test_two_rates_two_optimizers_and_the_ratios_are_logged(unified: Any) -> None:
    module = unified.module(unirl(lr=1e-3, lm_lr=3e-3, kl=0.01), reward=rising(), parity_every=1)
    rows = unified.fit(module, [PROMPTS] * 2)
    for row in rows:
        assert (row["train/lr"], row["train/llm_lr"]) == (1e-3, 3e-3)
        assert row["parity/token_ratio_refine"] == row["parity/step_ratio"] == row["parity/c2"] == 0
        assert row["lm/ratio_deviation"] == row["train/ratio_deviation_max"] == 0
        assert max(row["parity/token_log_prob"], row["parity/log_prob"]) <= 1e-6
        assert row["parity/token_ratio"] <= 1e-5
    assert rows[0]["lm/kl"] == 0 < rows[1]["lm/kl"]
    assert rows[0]["train/kl"] == 0 < rows[1]["train/kl"]


@pytest.mark.parametrize(
    ("options", "moving"),
    [
        ({}, {STUDENT, LLM}),
        ({"lr": 0.0}, {LLM}),
        ({"lm_lr": 0.0}, {STUDENT}),
        ({"mode": "prompt_only", "weight_decay": 0.1, "ema": 0.5}, {LLM}),
        ({"mode": "generator_only", "weight_decay": 0.1, "num_skip_refinement": 2}, {STUDENT}),
    ],
    ids=["joint", "no rate for the generator", "no rate for the model", "prompt only", "generator only"],
)
def test_what_is_not_trained_keeps_every_byte(unified: Any, options: dict[str, Any], moving: set[str]) -> None:
    module = unified.module(unirl(**options), reward=rising(), parity_every=2)
    base = module.base
    before = {name: _bytes(base, cid) for name, cid in ((STUDENT, "transformer"), (LLM, LLM))}
    versions = base.versions()
    rows = unified.fit(module, [PROMPTS] * 2)
    after = {name: _bytes(base, cid) for name, cid in ((STUDENT, "transformer"), (LLM, LLM))}
    assert {name for name in before if before[name] != after[name]} == moving
    if options.get("mode") == "prompt_only":
        assert "train/lr" not in rows[0] and "train/policy_loss" not in rows[0]
        plan = module.method.rollout_plan(PROMPTS, 0, seed=0, world=module.context().world)
        assert all(request.sde is None for request in plan.requests)  # the ODE
        assert module.roles.instance(STUDENT).versions()["transformer"] == versions["transformer"]
    if options.get("mode") == "generator_only":
        assert "train/llm_lr" not in rows[0] and "lm/loss" not in rows[0]
        assert set(module.roles) == {STUDENT}
    others = {cid: module.roles.instance(STUDENT).versions()[cid] for cid in ("text_encoder", "vae")}
    assert others == {cid: versions[cid] for cid in others}


def _bytes(base: Any, component: str) -> list[bytes]:
    return [value.numpy().tobytes() for value in base.module(component).state_dict().values()]


def test_a_language_model_that_trains_as_another_than_it_writes_is_stopped(unified: Any) -> None:
    module = unified.module(unirl(), reward=rising(), parity_every=1)
    module.roles[LLM].lm_head.register_forward_hook(
        lambda layer, args, output: output * 1.001 if torch.is_grad_enabled() else None
    )
    before = part(module, LLM)
    with pytest.raises(ParityError, match="token log-probs of a rollout == training's"):
        unified.fit(module, [PROMPTS])
    assert part(module, LLM) == before


def test_lora_adapts_the_generator_alone(unified: Any) -> None:
    module = unified.module(unirl(lora={"rank": 2, "alpha": 4}), reward=rising())
    unified.fit(module, [PROMPTS])
    assert all(".lora_" in name for name, p in module.roles[STUDENT].named_parameters() if p.requires_grad)
    assert all(p.requires_grad for p in module.roles[LLM].parameters())


# -- evaluation and export


def test_an_evaluation_asks_as_it_is_served_and_reads_the_rewrites(unified: Any) -> None:
    method = unirl(format="caption")
    module = unified.module(method, reward=rising())
    seen: list[Any] = []
    module.on_start = lambda: seen.append(
        evaluate(
            module,
            EvalSettings((EvalItem("a red circle", 1, {"meaning": "a red circle moves left"}),), rising(), steps=2),
            [],
            lambda *_: None,
        )
    )
    unified.fit(module, [PROMPTS])
    assert seen[0].metrics["refine/format"] == seen[0].metrics["refine/meaning"] == 0  # of a random model
    student = module.roles.instance(STUDENT)
    requests = [Request("a red circle", seed=seed, steps=1, output="latents") for seed in (1, 2)]
    words = {artifact.refined for artifact in Engine().run_interleaved(requests, student)}
    assert len(words) == 1  # greedy: no seed in it


@pytest.mark.parametrize("mode", ["joint", "prompt_only"])
def test_an_export_holds_both_models_and_serves_the_trainers_latents(unified: Any, tmp_path: Path, mode: str) -> None:
    module = unified.module(unirl(mode=mode, lr=1e-2, lm_lr=1e-2), reward=rising())
    unified.fit(module, [PROMPTS])
    card, out = module.card, tmp_path / "first"
    for again in range(2):
        gathered = gather_roles(module)
        joined = {cid: gathered[name] for cid, name in module.roles.parts(STUDENT).items()}
        state = joined.pop("transformer", None)
        assert (weight_change(card, state, STUDENT, None, joined)[LLM] > 1e-3) == (again == 0)
        request = reference_request(card, 0, 1.0)
        expected = module.engine.run(request, module.roles.instance(STUDENT))
        exported = export_model(
            card=card,
            out=out,
            state=state,
            joined=joined,
            role=STUDENT,
            lora=None,
            method="unirl",
            guidance=1.0,
            data="",
            metrics={},
            reference_latents=expected.latents,
            reference_request=request,
            samples=[],
        )
        assert exported.latents_difference == 0
        assert set(exported.card.recipe.weights) == ({LLM} if mode == "prompt_only" else {LLM, "transformer"})
        assert exported.card.components[LLM].subfolder == exported.card.components["llm_tokenizer"].subfolder == LLM
        served = Engine()
        artifact = served.run(request, served.load(out))
        assert artifact.refined == expected.refined and torch.equal(artifact.latents, expected.latents)
        from diffusers import WanPipeline
        from transformers import AutoTokenizer, Qwen3ForCausalLM

        WanPipeline.from_pretrained(out)
        assert "rewritten first, by the language model in `llm/`" in (out / "README.md").read_text()
        assert AutoTokenizer.from_pretrained(out / LLM).chat_template is not None
        plain = Qwen3ForCausalLM.from_pretrained(out / LLM)
        ours = module.roles[LLM].state_dict()
        assert all(torch.equal(ours[key], value) for key, value in plain.state_dict().items())
        card, out = card_of(out), tmp_path / "second"  # an export of the export


# -- mistakes


def test_mistakes_are_named(unified: Any) -> None:
    card = unified.card
    assert unirl().problems(card, 1) == []

    def one(match: str, **options: Any) -> None:
        (problem,) = unirl(**options).problems(card, 1)
        assert match in problem, problem

    one("num_skip_refinement: got 5, expected 0 .. 3 with samples=4 and mode=joint", num_skip_refinement=5)
    one("num_skip_refinement: got 4, expected 0 .. 3", num_skip_refinement=4)
    one("num_skip_refinement: got -1", num_skip_refinement=-1)
    one("temperature: got 0", temperature=0)
    one("max_tokens: got 0", max_tokens=0)
    one("num_sde: got 4, expected 1 .. rollout_steps = 3", num_sde=4)
    one("solver: got 'unipc', expected euler", solver="unipc")
    one("updates: got 3, expected a divisor of num_sde = 2", updates=3)
    one("lora: adapts the generator, which mode=prompt_only leaves", mode="prompt_only", lora={"rank": 2})
    assert unirl(mode="generator_only", num_skip_refinement=4).problems(card, 1) == []
    assert unirl(mode="prompt_only", solver="unipc").problems(card, 1) == []
    with pytest.raises(UserError, match=r"'prompts'; expected one of: generator_only, joint, prompt_only"):
        unirl(mode="prompts")
    with pytest.raises(UserError, match="lm_lr: got -1"):
        unirl(lm_lr=-1)


def test_a_card_that_rewrites_no_prompts_is_refused(unified: Any, training: Any) -> None:
    (problem,) = unirl().problems(training.card, 1)
    assert "has no language model to rewrite prompts, expected llm; use card=unified" in problem
    loops = unified.card.loops
    silent = loops["refine"].model_copy(update={"options": {}})
    card = unified.card.model_copy(update={"loops": {**loops, "refine": silent}})
    (problem,) = unirl().problems(card, 1)
    assert "keeps no log-probs of a rollout" in problem
    assert refiners_of(unified.card) == {"refine": LLM} and refiners_of(training.card) == {}


def test_the_memory_plan_counts_both_models(unified: Any) -> None:
    options: dict[str, Any] = {
        "devices": 1,
        "clip": Clip(frames=9, height=32, width=32),
        "max_rows": 2,
        "generates": True,
    }
    found = {
        mode: {row.name: row for row in plan_memory(unified.card, unirl(mode=mode), Single(), **options).rows}
        for mode in ("joint", "prompt_only", "generator_only")
    }
    assert found["joint"][LLM].optimizer > 0 and found["joint"][STUDENT].optimizer > 0
    assert found["joint"][REFERENCE].weights == found["joint"][LLM].weights
    assert found["prompt_only"][LLM] == found["joint"][LLM]
    assert found["prompt_only"][STUDENT].optimizer == 0
    assert found["joint"][TEXTS].weights > 0
    assert found["generator_only"][LLM].optimizer == 0 and REFERENCE not in found["generator_only"]
