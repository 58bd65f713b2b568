"""joint_rl on a tiny random Wan behind three tiny random experts: who gets which credit, and who moves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cards.errors import UserError
from cards.unified.card import card_from_folder
from fastvideo_train.checkpoint import gather_roles
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.export import export_model, reference_request
from inference.engine import Engine
from inference.load import card_of
from methods.advantages import group_advantages
from methods.joint_rl import Expert, JointRL, answered_for
from methods.method import Context
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.rewards.scoring import GroupRewards
from methods.rewards.shape_eval import ShapeEvalReward
from methods.rewrites import Caption, Ended
from methods.roles import REFERENCE, STUDENT
from methods.unirl import UniRL
from tests.support.tiny_experts import tiny_chain
from tests.support.tiny_unified import save_tiny_unified

NAMES = ("colour", "shape", "motion")
EXPERTS = tuple(f"llm_{name}" for name in NAMES)
PROMPTS = [
    Prompt("a red circle", {"meaning": "a red circle moves left"}),
    Prompt("the blue square", {"meaning": "a blue square above a red circle"}),
]
NAN = float("nan")


class ByHand(Reward):
    """``values(sample of the step) -> reward``, and parts by name in the same way."""

    name = "by hand"
    version = "1"

    def __init__(self, values: Callable[[int], float], **parts: Callable[[int], float]):
        self.values = values
        self.parts = parts

    def part_names(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def score(self, batch: RewardBatch) -> Scores:
        def column(of: Callable[[int], float]) -> Any:
            return np.array([of(i) for i in range(len(batch))], dtype=np.float64)

        return Scores(column(self.values), {name: column(of) for name, of in self.parts.items()})


def rising() -> ByHand:
    """No two samples of a group score alike, and no part as another."""
    return ByHand(
        lambda i: float(i * i % 7),
        colour=lambda i: float(i * i % 5),
        shape=lambda i: float(3 * i % 8),
        motion=lambda i: float(5 * i % 8) if i < 4 else NAN,
        position=lambda i: float(i % 3) if i >= 4 else NAN,
    )


def listed(**of_motion: Any) -> list[dict[str, Any]]:
    return [
        {"component": "llm_colour", "parts": ["colour"]},
        {"component": "llm_shape", "parts": ["shape"]},
        {"component": "llm_motion", "parts": ["motion", "position"], **of_motion},
    ]


SMALL: dict[str, Any] = {
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


def joint(**options: Any) -> JointRL:
    return JointRL(**({"experts": listed(), "credit": "per_expert"} | SMALL | options))


def small(card: Any) -> Any:
    """Short prompts, for the generator and from the experts."""
    text = card.sampling.text.model_copy(update={"max_tokens": 6})
    return card.model_copy(
        update={"sampling": card.sampling.model_copy(update={"max_sequence_length": 12, "text": text})}
    )


@pytest.fixture(scope="module")
def chain(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Training parts of a card with three experts."""
    made = copy.copy(training)
    card = tiny_chain(
        training.folder, tmp_path_factory.mktemp("experts"), NAMES, initializer_range=0.1, tie_word_embeddings=True
    )
    made.card = small(card)
    return made


@pytest.fixture(scope="module")
def unified(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Training parts of a unified card: a chain of one."""
    made = copy.copy(training)
    made.folder = save_tiny_unified(
        training.folder, tmp_path_factory.mktemp("unified") / "card", initializer_range=0.1, tie_word_embeddings=True
    )
    made.card = small(card_from_folder(made.folder))
    return made


def weights(module: Any) -> dict[str, dict[str, bytes]]:
    """Every byte of what may be trained."""
    parts = {STUDENT: "transformer"} | {name: name for name in module.method.refiners}
    return {
        name: {key: value.numpy().tobytes() for key, value in module.base.module(cid).state_dict().items()}
        for name, cid in parts.items()
    }


def gradients(ctx: Context, name: str) -> list[Tensor | None]:
    return [p.grad for p in ctx.roles[name].parameters()]


def step_by_step(method: JointRL, ctx: Context, step: int = 0) -> Iterator[str]:
    """Does the backward of each update, without a step; gives the optimizer's name."""
    for update in method.updates(PROMPTS, step, ctx):
        if update.loss is not None:
            update.loss.backward()
            yield update.optimizer


# -- one expert is UniRL


@pytest.mark.parametrize("options", [{"format_weight": 1.0}, {"mode": "prompt_only", "num_skip_refinement": 2}])
def test_one_expert_with_shared_credit_is_unirl_bit_for_bit(unified: Any, options: dict[str, Any]) -> None:
    found = []
    for method in (
        UniRL(**(SMALL | options)),
        JointRL(**({"experts": [{"component": "llm"}], "credit": "shared"} | SMALL | options)),
    ):
        module = unified.module(method, reward=rising(), parity_every=1)
        before = weights_of_llm(module)
        rows = unified.fit(module, [PROMPTS] * 2)
        after = {name: part.numpy().tobytes() for name, part in module.roles.state_dict().items()}
        assert weights_of_llm(module) != before
        found.append((rows, after))
    (rows_u, after_u), (rows_j, after_j) = found
    assert after_u == after_j
    new = {"refine/format_llm", "refine/right_llm"}
    for ours, theirs in zip(rows_j, rows_u, strict=True):
        assert set(ours) - set(theirs) == new and set(theirs) <= set(ours)
        np.testing.assert_equal({name: ours[name] for name in theirs}, theirs)


def weights_of_llm(module: Any) -> list[bytes]:
    return [value.numpy().tobytes() for value in module.base.module("llm").state_dict().values()]


# -- credit


def scored(rewards_GK: Any, **parts_GK: Any) -> GroupRewards:
    return GroupRewards(np.array(rewards_GK, float), {}, {name: np.array(v, float) for name, v in parts_GK.items()})


PARTS: dict[str, Any] = {
    "colour": [[1, 0, 1, 0], [0, 0, 1, NAN]],
    "shape": [[0, 1, 1, 1], [1, 1, 1, NAN]],
    "motion": [[0, 0, 1, 1], [NAN, NAN, NAN, NAN]],
    "position": [[NAN] * 4, [1, 0, 0, NAN]],
}
TASK = [[0.5, 0.25, 1.0, 0.75], [1.0, 0.5, 0.5, NAN]]


def seen_formats(values: Mapping[str, Any]) -> dict[str, Any]:
    tables = {f"refine/format_llm_{name}": np.array(table, float) for name, table in values.items()}
    return tables | {"refine/format": np.mean(list(tables.values()), axis=0)}


FORMATS = seen_formats(
    {
        "colour": [[NAN, 1, 1, 0], [NAN, 1, 1, 1]],
        "shape": [[NAN, 1, 1, 1], [NAN, 0, 1, 0]],
        "motion": [[NAN, 0, 1, 1], [NAN, 0, 0, 0]],
    }
)


def expected(rewards_GK: list[list[float]]) -> Any:
    """A = (R - mean) / (std + 1e-4) over what is known of a group, else 0."""
    table = np.array(rewards_GK)
    mean, std = np.nanmean(table, 1, keepdims=True), np.nanstd(table, 1, keepdims=True)
    return np.nan_to_num((table - mean) / (std + 1e-4))


def test_per_expert_everyone_is_normalised_on_what_it_answers_for() -> None:
    method = joint(format_weight=0.5)
    credits = method.credits(scored(TASK, **PARTS), FORMATS, None)  # type: ignore[arg-type]
    assert set(credits) == {STUDENT, *EXPERTS}
    third, half = 1 / 3, 0.5
    by_hand = {
        STUDENT: TASK,
        # part + half the format; the original (first) has the mean format of its group's rewrites
        "llm_colour": [[1 + third, half, 1 + half, 0], [half, half, 1 + half, NAN]],
        "llm_shape": [[half, 1 + half, 1 + half, 1 + half], [1 + half * third, 1, 1 + half, NAN]],
        # motion where it is asked, position where that is
        "llm_motion": [[third, 0, 1 + half, 1 + half], [1, 0, 0, NAN]],
    }
    for name, rewards_GK in by_hand.items():
        np.testing.assert_allclose(credits[name].advantages_GK, expected(rewards_GK), atol=1e-12, err_msg=name)
        np.testing.assert_array_equal(credits[name].valid_GK, np.isfinite(TASK), err_msg=name)


def test_an_expert_that_nobody_asked_learns_nothing() -> None:
    parts = PARTS | {"position": [[NAN] * 4] * 2}
    credit = joint().credits(scored(TASK, **parts), FORMATS, None)["llm_motion"]  # type: ignore[arg-type]
    assert credit.valid_GK.tolist() == [[True] * 4, [False] * 4]
    assert not credit.advantages_GK[1].any() and credit.advantages_GK[0].any()


def test_parts_that_are_asked_together_are_averaged() -> None:
    both = Expert(component="x", parts=("a", "b"))
    table = scored([[1.0, 1.0, NAN]], a=[[1, 0, 1]], b=[[NAN, 1, 1]])
    np.testing.assert_array_equal(answered_for(both, table), [[1.0, 0.5, NAN]])


def test_shared_everyone_gets_the_samples_advantage() -> None:
    method = joint(credit="shared", format_weight=0.5)
    credits = method.credits(scored(TASK, **PARTS), FORMATS, None)  # type: ignore[arg-type]
    assert len({id(credit) for credit in credits.values()}) == 1 and set(credits) == {STUDENT, *EXPERTS}
    reward = method.total(np.array(TASK), FORMATS["refine/format"])
    np.testing.assert_array_equal(credits["llm_shape"].advantages_GK, group_advantages(reward, std="group")[0])
    # The format is the mean of the three.
    assert reward[0, 1] == pytest.approx(0.25 + 0.5 * 2 / 3)


# -- who moves


@pytest.mark.parametrize("credit", ["shared", "per_expert"])
def test_no_gradient_crosses_the_experts(chain: Any, credit: str) -> None:
    method = joint(credit=credit)
    ctx = chain.context(method, rising())
    models = (STUDENT, *EXPERTS)
    everyone = (*models, *(f"{name}_of_{REFERENCE}" for name in EXPERTS))
    seen = []
    for optimizer in step_by_step(method, ctx):
        reached = {name for name in everyone if any(g is not None and bool(g.any()) for g in gradients(ctx, name))}
        assert reached == {optimizer}
        seen.append(optimizer)
        for name in models:
            ctx.roles[name].zero_grad()
    assert list(dict.fromkeys(seen)) == [*EXPERTS, STUDENT]


@pytest.mark.parametrize(
    ("options", "moving"),
    [
        ({}, {STUDENT, *EXPERTS}),
        ({"lr": 0.0, "experts": listed(lr=0.0)}, {"llm_colour", "llm_shape"}),
        ({"lm_lr": 0.0, "experts": listed(lr=1e-3), "mode": "prompt_only"}, {"llm_motion"}),
        ({"mode": "generator_only"}, {STUDENT}),
    ],
    ids=["joint", "two of three", "the last alone", "generator only"],
)
def test_each_optimizer_moves_its_own_expert_alone(chain: Any, options: dict[str, Any], moving: set[str]) -> None:
    module = chain.module(joint(**options), reward=rising(), parity_every=2)
    before, versions = weights(module), module.base.versions()
    rows = chain.fit(module, [PROMPTS] * 2)
    after = weights(module)
    assert {name for name in before if before[name] != after[name]} == moving
    now = module.roles.instance(STUDENT).versions()
    optimized = set(module.optimizer_specs)
    parts = {STUDENT: "transformer"} | {name: name for name in EXPERTS}
    assert {n for n, cid in parts.items() if now[cid] == versions[cid] + 2} == optimized
    assert all(now[cid] == versions[cid] for cid in ("text_encoder", "vae"))
    for name in EXPERTS:
        assert (f"train/{name}_lr" in rows[0]) == (f"{name}/loss" in rows[0]) == (name in optimized)
        if name in optimized:
            assert rows[0][f"train/{name}_lr"] == module.method.rate_of(name)


def test_each_experts_ratios_and_losses_are_logged_apart(chain: Any) -> None:
    module = chain.module(joint(), reward=rising(), parity_every=1)
    rows = chain.fit(module, [PROMPTS] * 2)
    for row in rows:
        for name in NAMES:
            assert row[f"parity/token_ratio_refine_{name}"] == row[f"llm_{name}/ratio_deviation"] == 0
            assert row[f"parity/token_log_prob_llm_{name}"] <= 1e-6
    assert rows[0]["llm_shape/kl"] == 0 < rows[1]["llm_shape/kl"]
    assert len({rows[1][f"llm_{name}/loss"] for name in NAMES}) == 3


@pytest.mark.parametrize("credit", ["shared", "per_expert"])
def test_equal_rewards_leave_only_the_pull_to_the_reference(chain: Any, credit: str) -> None:
    method = joint(lm_kl=0.3, credit=credit)
    even = dict.fromkeys(("colour", "shape", "motion", "position"), lambda i: 1.0)
    ctx = chain.context(method, ByHand(lambda i: 0.5, **even))
    assert set(step_by_step(method, ctx)) == set(EXPERTS)
    for name in EXPERTS:
        assert all(gradient is not None and not gradient.any() for gradient in gradients(ctx, name))
    with torch.no_grad():
        for parameter in ctx.roles["llm_shape"].parameters():
            parameter.mul_(1.02)
    ctx.roles.changed("llm_shape")
    list(step_by_step(method, ctx, step=1))
    pulled = {name for name in EXPERTS if any(bool(g.any()) for g in gradients(ctx, name) if g is not None)}
    assert pulled == {"llm_shape"}


def test_only_rewrites_reach_the_experts(chain: Any) -> None:
    method = joint(num_skip_refinement=2)
    ctx = chain.context(method, rising())
    rows = dict.fromkeys(EXPERTS, 0)
    for name in EXPERTS:

        def count(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            rows[name] += len(kwargs["input_ids"]) if torch.is_grad_enabled() else 0

        ctx.roles[name].register_forward_hook(count, with_kwargs=True)
    list(method.updates(PROMPTS, 0, ctx))
    assert rows == dict.fromkeys(EXPERTS, 2 * 2)


# -- what is seen of the texts


def test_the_last_text_tells_how_much_of_its_own_each_expert_got_right() -> None:
    meaning = {"meaning": "a red circle left of a blue square, both moving up"}
    kept = Caption().parts_kept("a blue square is to the right of a red circle and both move up", meaning)
    assert kept == {"colour": 1, "shape": 1, "motion": 1, "position": 1}
    kept = Caption().parts_kept("a red circle left of a blue triangle", meaning)
    assert kept == {"colour": 1, "shape": 0, "motion": 0, "position": 1}
    kept = Caption().parts_kept("a red circle moves up", meaning)
    assert kept == {"colour": 0, "shape": 0, "motion": 1, "position": 0}
    assert set(Caption().parts_kept("gibberish", meaning).values()) == {0}
    counted = {"meaning": "three red circles"}
    assert Caption().parts_kept("two red circles", counted) == {"colour": 1, "shape": 1, "count": 0}
    assert Caption().parts_kept("two red circles", {}) == Ended().parts_kept("x", meaning) == {}


# -- export


def test_an_export_holds_every_expert_and_serves_the_trainers_latents(chain: Any, tmp_path: Path) -> None:
    module = chain.module(joint(lr=1e-2, lm_lr=1e-2), reward=rising())
    chain.fit(module, [PROMPTS])
    gathered = gather_roles(module)
    joined = {cid: gathered[name] for cid, name in module.roles.parts(STUDENT).items()}
    request = reference_request(module.card, 0, 1.0)
    latents = module.engine.run(request, module.roles.instance(STUDENT)).latents
    out = tmp_path / "export"
    exported = export_model(
        card=module.card,
        out=out,
        state=joined.pop("transformer"),
        joined=joined,
        role=STUDENT,
        lora=None,
        method="joint_rl",
        guidance=1.0,
        data="",
        metrics={},
        reference_latents=latents,
        reference_request=request,
        samples=[],
    )
    assert exported.latents_difference == 0 and set(exported.card.recipe.weights) == {*EXPERTS, "transformer"}
    served = Engine()
    assert torch.equal(served.run(request, served.load(out)).latents, latents)
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    for name in EXPERTS:
        assert AutoTokenizer.from_pretrained(out / name).chat_template is not None
        ours = module.roles[name].state_dict()
        plain = Qwen3ForCausalLM.from_pretrained(out / name).state_dict()
        assert all(torch.equal(ours[key], value) for key, value in plain.items())
    assert card_of(out).digest == exported.card.digest


def test_experts_of_one_source_are_exported_apart(training: Any, chain: Any, tmp_path: Path) -> None:
    """Three that begin as the same folder, and no longer are the same."""
    from cards.multi_expert.card import build_card

    source = chain.card.components["llm_shape"].source.location
    same = copy.copy(training)
    same.card = small(build_card("tiny", source=str(training.folder), experts=list(NAMES), refiners=source))
    module = same.module(joint(mode="prompt_only", lm_lr=1e-2), reward=rising())
    same.fit(module, [PROMPTS])
    request = reference_request(module.card, 0, 1.0)
    exported = export_model(
        card=module.card,
        out=tmp_path / "export",
        state=None,
        joined={name: gather_roles(module)[name] for name in EXPERTS},
        role=STUDENT,
        lora=None,
        method="joint_rl",
        guidance=1.0,
        data="",
        metrics={},
        reference_latents=module.engine.run(request, module.roles.instance(STUDENT)).latents,
        reference_request=request,
        samples=[],
    )
    assert exported.latents_difference == 0
    assert {exported.card.components[name].subfolder for name in EXPERTS} == set(EXPERTS)
    assert len(set(exported.card.recipe.weights.values())) == 3


# -- mistakes


def test_mistakes_are_named(chain: Any, unified: Any) -> None:
    assert joint().problems(chain.card, 1) == []
    with pytest.raises(UserError, match=r"'everyone'; expected one of: per_expert, shared"):
        joint(credit="everyone")
    with pytest.raises(UserError, match=r"key of method experts 'part'; expected one of: component, format, lr, parts"):
        joint(experts=[{"component": "llm", "part": ["colour"]}])
    with pytest.raises(UserError, match="expected a component in each entry"):
        joint(experts=[{"parts": ["colour"]}])
    with pytest.raises(UserError, match=r"got 'llm', expected a mapping with component, parts, lr, format"):
        joint(experts=["llm"])
    with pytest.raises(UserError, match="parts: got 'colour', expected a list of names"):
        joint(experts=[{"component": "llm", "parts": "colour"}])
    with pytest.raises(UserError, match="llm: lr: got -1, expected a number >= 0"):
        joint(experts=[{"component": "llm", "lr": -1}])
    with pytest.raises(UserError, match="'captoin'; expected one of: caption, ended"):
        joint(experts=[{"component": "llm", "format": "captoin"}])
    for experts in ([], [{"component": "llm"}] * 2):
        with pytest.raises(UserError, match="expected at least one component, each once"):
            joint(experts=experts)
    (problem,) = joint().problems(unified.card, 1)
    assert "has llm to rewrite prompts, expected llm_colour, llm_shape, llm_motion; name the card's own" in problem
    (problem,) = joint(experts=listed()[::-1]).problems(chain.card, 1)  # another order
    assert "expected llm_motion, llm_shape, llm_colour" in problem


def test_parts_that_the_reward_does_not_have_are_refused() -> None:
    shape_eval = ShapeEvalReward()
    assert joint().reward_problems(shape_eval) == []
    assert joint(credit="shared").reward_problems(ByHand(float)) == []
    found = joint().reward_problems(ByHand(float))
    assert len(found) == 3 and "llm_colour answers for colour, but reward 'by hand' has the parts (none)" in found[0]
    (problem,) = joint(experts=[*listed()[:2], {"component": "llm_motion"}]).reward_problems(shape_eval)
    assert "llm_motion answers for none, but reward 'shape_eval' has the parts valid, colour, shape" in problem
