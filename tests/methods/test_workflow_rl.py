"""RL through two models on tiny random folders: what moves, what must not, and what is refused before weights load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cards.card import ModelCard
from fastvideo_train.build import load_others
from fastvideo_train.data.prompts import Prompt
from fastvideo_train.module import ParityError
from fastvideo_train.numerics import with_text_padding
from inference.engine import Engine
from inference.image_video import Film
from inference.load import card_of
from inference.parity.interleave import artifact_difference
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.roles import EMA, STUDENT, Roles
from methods.sde_policy import Paths, log_probs
from methods.workflow_rl import SECOND, WorkflowRL
from tests.support.tiny_i2v import write_i2v_folder

PROMPTS = [Prompt("a red circle"), Prompt("the blue square moves left")]
TEXTS = [prompt.text for prompt in PROMPTS]


class RednessReward(Reward):
    """Red less green of a clip: differs between samples. Keeps what it was shown."""

    name = "redness"
    version = "1"

    def __init__(self) -> None:
        self.seen: list[RewardBatch] = []

    def score(self, batch: RewardBatch) -> Scores:
        self.seen.append(batch)
        videos = [np.asarray(video, dtype=np.float64) for video in batch.videos_BFHWC]
        return Scores(values=np.array([v[..., 0].mean() - v[..., 1].mean() for v in videos]))


class ConstantReward(Reward):
    name = "constant"
    version = "1"

    def score(self, batch: RewardBatch) -> Scores:
        return Scores(values=np.full(len(batch.prompts), 0.7))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_i2v_folder(tmp_path_factory.mktemp("i2v"))


@pytest.fixture(scope="module")
def training(training: Any) -> Any:
    """Parts in folded text padding: an image to video model reads 512 tokens else."""
    own = copy.copy(training)
    own.card = with_text_padding(training.card, "folded")
    return own


@pytest.fixture(scope="module")
def make(clips: Path) -> Callable[..., WorkflowRL]:
    def method(**options: Any) -> WorkflowRL:
        settings: dict[str, Any] = {
            "second": {"name": "wan21_i2v", "size": "tiny", "source": str(clips)},
            "lr": 1e-2,
            "steps": 2,
            "batch_size": 2,
            "samples": 3,
            "rollout_steps": 3,
            "second_steps": 2,
            "weight_decay": 0.1,
        }
        return WorkflowRL(**(settings | options))

    return method


def others(method: WorkflowRL, training: Any) -> dict[str, Any]:
    return load_others(training.base(), method.role_cards(training.card))


def context(method: WorkflowRL, training: Any, reward: Reward | None = None) -> Any:
    return training.context(method, reward, others=others(method, training))


def weights(roles: Roles) -> dict[str, Tensor]:
    """Copies of all weights of all roles."""
    return {key: value.clone() for key, value in roles.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Roles of which a weight differs in any bit."""
    return {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}


# -- what moves


@pytest.mark.parametrize("second_lr", [None, 1e-2])
def test_a_constant_reward_moves_nothing(make: Any, training: Any, second_lr: float | None) -> None:
    """The control run: weights of both models and of the average, moments, schedules and versions as they were, though
    weight decay and momentum would move them in any step that was taken."""
    method = make(second_lr=second_lr, ema=0.5, lr_schedule="cosine")
    module = training.module(method, reward=ConstantReward(), others=others(method, training), parity_every=1)
    before, versions = weights(module.roles), version_of(module.roles)
    rows = training.fit(module, [PROMPTS, PROMPTS])
    assert [row["train/groups_without_signal"] for row in rows] == [1.0, 1.0]
    assert [row["train/reward"] for row in rows] == [pytest.approx(0.7)] * 2
    assert moved(before, weights(module.roles)) == set()
    assert all(not optimizer.state for optimizer in module.role_optimizers().values())
    assert all(schedule.last_epoch == 0 for schedule in module.role_schedules().values())
    assert version_of(module.roles) == versions and module.optimizer_steps == 0


def version_of(roles: Roles) -> dict[str, int]:
    return {name: roles.instance(name).versions()["transformer"] for name in roles.names}


def test_a_reward_trains_the_first_model_and_leaves_the_second_alone(make: Any, training: Any) -> None:
    method = make(ema=0.5)
    module = training.module(method, reward=RednessReward(), others=others(method, training), parity_every=1)
    before, versions = weights(module.roles), version_of(module.roles)
    rows = training.fit(module, [PROMPTS, PROMPTS])
    assert moved(before, weights(module.roles)) == {STUDENT, EMA}
    assert version_of(module.roles)[SECOND] == versions[SECOND]
    assert version_of(module.roles)[STUDENT] == versions[STUDENT] + 2 == module.optimizer_steps
    assert not any(p.requires_grad for p in module.roles[SECOND].parameters())
    for row in rows:
        assert row["parity/c2_log_prob"] == row["parity/c2_second"] == 0.0
        assert row["parity/log_prob"] <= 1e-6
        assert "train/second_loss" not in row and row["train/grad_norm"] > 0


def test_a_reward_trains_both_each_by_its_optimizer(make: Any, training: Any) -> None:
    method = make(second_lr=2e-3, updates=2, rollout_steps=4)
    module = training.module(method, reward=RednessReward(), others=others(method, training), parity_every=1)
    before, versions = weights(module.roles), version_of(module.roles)
    rows = training.fit(module, [PROMPTS, PROMPTS])
    assert moved(before, weights(module.roles)) == {STUDENT, SECOND}
    assert {name: n - versions[name] for name, n in version_of(module.roles).items()} == {STUDENT: 4, SECOND: 4}
    for row in rows:
        assert row["train/lr"] == 1e-2 and row["train/second_lr"] == 2e-3
        assert row["parity/c2_log_prob"] == row["parity/c2_second_log_prob"] == 0.0
        assert row["parity/log_prob"] <= 1e-6 and row["parity/second_log_prob"] <= 1e-6
        assert row["train/grad_norm"] > 0 and row["train/second_grad_norm"] > 0
    owned = {name: {id(p) for p in module.roles.trained(name)} for name in (STUDENT, SECOND)}
    for name, optimizer in module.role_optimizers().items():
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == owned[name]
    assert not owned[STUDENT] & owned[SECOND]


def test_no_gradient_crosses_the_models(make: Any, training: Any) -> None:
    ctx = context(method := make(second_lr=1e-3), training, RednessReward())
    seen: set[str] = set()
    for update in method.updates(PROMPTS, 0, ctx):
        if update.loss is None:
            continue
        update.loss.backward()
        other = SECOND if update.optimizer == STUDENT else STUDENT
        assert all(p.grad is None for p in ctx.roles[other].parameters())
        assert any(p.grad is not None for p in ctx.roles[update.optimizer].parameters())
        for p in ctx.roles.parameters():
            p.grad = None
        seen.add(update.optimizer)
    assert seen == {STUDENT, SECOND}


def test_a_sync_of_one_model_leaves_what_the_other_cached(make: Any, training: Any) -> None:
    method = make()
    ctx = context(method, training)
    encoders = {name: ctx.roles.instance(name).module("text_encoder") for name in (STUDENT, SECOND)}
    calls: list[str] = []
    for name, encoder in encoders.items():
        encoder.register_forward_hook(lambda module, args, out, name=name: calls.append(name))
    method.roll_out(TEXTS, range(2), 0, ctx)
    assert sorted(set(calls)) == [SECOND, STUDENT]
    calls.clear()
    ctx.roles.changed(STUDENT)
    method.roll_out(TEXTS, range(2), 1, ctx)
    assert calls == []


# -- rollouts


def film_difference(a: Film, b: Film) -> float:
    return max(artifact_difference(a.picture, b.picture), artifact_difference(a.clip, b.clip))


def test_chains_interleaved_are_chains_in_turn_to_the_bit(make: Any, training: Any) -> None:
    """Behaviour records of both models too."""
    method = make(second_lr=1e-3, samples=2)
    ctx = context(method, training)
    together = method.roll_out(TEXTS, range(2), 5, replace(ctx, engine=Engine()))

    class OneByOne(Engine):
        def run_workflows(self, workflows: Any, listener: Any = None, *, serial: bool = False) -> Any:
            return super().run_workflows(workflows, listener, serial=True)

    alone = method.roll_out(TEXTS, range(2), 5, replace(ctx, engine=OneByOne()))
    assert max(film_difference(a, b) for a, b in zip(together, alone, strict=True)) == 0.0
    assert together[0].clip.behaviour is not None and together[0].clip.behaviour.sde_states is not None
    assert film_difference(together[0], together[1]) > 0


@pytest.mark.parametrize("which", [STUDENT, SECOND])
def test_log_probs_of_both_models_are_computed_again(make: Any, training: Any, which: str) -> None:
    method = make(second_lr=1e-3, guidance=2.0, second_guidance=2.0)
    ctx = context(method, training)
    films = method.roll_out(TEXTS, range(2), 0, ctx)
    paths = Paths.of([film.picture if which == STUDENT else film.clip for film in films])
    assert paths.steps == (3 if which == STUDENT else 2)
    pairs = [(n, k) for n in range(len(films)) for k in range(paths.steps)]
    for rows in (1, len(pairs)):
        parts = [pairs[i : i + rows] for i in range(0, len(pairs), rows)]
        again = torch.cat([log_probs(ctx.roles.instance(which), paths, part, gradient=False) for part in parts])
        assert (again - paths.rolled_out(pairs)).abs().max() <= 1e-6


def test_a_second_model_that_stays_follows_the_ode_from_one_noise_a_group(make: Any, training: Any) -> None:
    method = make()
    ctx = context(method, training)
    films = method.roll_out(TEXTS, range(2), 0, ctx)
    params = [film.clip.provenance.params for film in films]
    assert all(p.sde is None for p in params)
    assert [len({p.seed for p in group}) for group in (params[:3], params[3:])] == [1, 1]
    assert params[0].seed != params[3].seed
    assert len({film.picture.provenance.params.seed for film in films}) == len(films)
    trained = make(second_lr=1e-3)
    films = trained.roll_out(TEXTS, range(2), 0, context(trained, training))
    assert len({film.clip.provenance.params.seed for film in films}) == len(films)


def test_the_clip_starts_from_the_picture_and_is_what_is_judged(make: Any, training: Any) -> None:
    method, reward = make(), RednessReward()
    ctx = context(method, training, reward)
    list(method.updates(PROMPTS, 0, ctx))
    (shown,) = reward.seen
    assert list(shown.prompts) == [text for text in TEXTS for _ in range(3)]
    films = method.roll_out(TEXTS, range(2), 0, ctx)
    assert all(np.array_equal(f.clip.frames_FHWC(), v) for f, v in zip(films, shown.videos_BFHWC, strict=True))
    assert films[0].picture.frames_FHWC().shape == (1, 32, 32, 3) and shown.videos_BFHWC[0].shape == (9, 32, 32, 3)
    (digest,) = films[0].clip.provenance.inputs.values()
    assert digest != next(iter(films[1].clip.provenance.inputs.values()))


def test_an_evaluation_is_of_the_clips(make: Any, training: Any) -> None:
    method, reward = make(films=2), RednessReward()
    ctx = context(method, training, reward)
    found = method.evaluation(ctx, STUDENT)
    assert set(found) == {"reward"} and np.isfinite(found["reward"])
    assert [video.shape for video in reward.seen[0].videos_BFHWC] == [(9, 32, 32, 3)] * 2
    assert make(films=0).evaluation(ctx, STUDENT) == {}


# -- gates


@contextmanager
def other_when_training(module: torch.nn.Module) -> Iterator[None]:
    """The module gives another result wherever a gradient is wanted."""
    handle = module.register_forward_hook(lambda m, args, out: (out[0] * 1.001,) if torch.is_grad_enabled() else None)
    yield
    handle.remove()


@pytest.mark.parametrize("second_lr", [None, 1e-3])
@pytest.mark.parametrize("which", [STUDENT, SECOND])
def test_a_gate_that_breaks_stops_the_run(make: Any, training: Any, which: str, second_lr: float | None) -> None:
    method = make(second_lr=second_lr)
    module = training.module(method, reward=ConstantReward(), others=others(method, training), parity_every=1)
    with other_when_training(module.roles[which]), pytest.raises(ParityError, match="C2 gate broke at step 0"):
        training.fit(module, [PROMPTS])


# -- before weights load


def test_the_card_of_a_run_makes_one_frame_of_the_clips_size(make: Any, training: Any, clips: Path) -> None:
    card = make().derive_card(training.card)
    s = card_of(clips).sampling
    assert (card.sampling.frames, card.sampling.height, card.sampling.width) == (1, s.height, s.width)
    second = make(second_guidance=2.5).role_cards(training.card)[SECOND]
    assert second.precision == training.card.precision
    assert [loop.guidance.scale for loop in second.loops.values()] == [2.5]


def problems_of(method: WorkflowRL, card: ModelCard) -> str:
    return "\n".join(method.problems(card, 1))


def test_nothing_is_wrong_with_what_fits(make: Any, training: Any) -> None:
    assert make().problems(training.card, 1) == []
    assert make(second_lr=1e-3, kl=0.1, window=[0, 2]).problems(training.card, 1) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 1}, "samples: got 1"),
        ({"second_lr": -1.0}, "second_lr: got -1.0"),
        ({"films": 1000}, "films: got 1000"),
        ({"updates": 2}, "updates: got 2, expected a divisor of the 3"),
        ({"updates": 2, "rollout_steps": 2, "guidance": 2.0}, "updates: got 2 with guidance"),
        ({"timesteps": 3, "second_lr": 1e-3}, "timesteps: got 3, expected 1 .. 2, the noisy steps of card 'wan21-i2v"),
        ({"window": [2, 9]}, "window"),
        ({"sde": "brown"}, "brown"),
        ({"second_steps": 0}, "steps: got 0"),
    ],
)
def test_wrong_values(make: Any, training: Any, options: dict[str, Any], said: str) -> None:
    assert said in problems_of(make(**options), training.card)


def test_a_second_card_that_takes_no_first_frame(make: Any, training: Any) -> None:
    second = {"name": "wan21", "size": "tiny", "source": str(training.folder)}
    assert "takes no first frame, expected a card that takes an image" in problems_of(
        make(second=second), training.card
    )


def test_a_first_card_that_takes_one(make: Any, clips: Path) -> None:
    found = problems_of(make(), card_of(clips))
    assert "takes image with every request, expected one that makes a picture of a prompt alone" in found


def test_pictures_of_another_size_than_the_clips(make: Any, training: Any, clips: Path) -> None:
    """A first card of cells of 24 pixels cannot make the 32 pixels of the clips."""
    geometry = training.card.geometry.model_copy(update={"spatial": 12})
    found = problems_of(make(), training.card.model_copy(update={"geometry": geometry}))
    assert "cannot make the first frame of the 32x32 clips of card 'wan21-i2v-tiny'" in found and "height" in found


def test_a_wrong_description_of_the_second_card(make: Any, training: Any) -> None:
    from cards.errors import UserError

    with pytest.raises(UserError, match=r"method second: no size, unknown key sise; expected name, size, source"):
        make(second={"name": "wan21_i2v", "sise": "tiny"})
    with pytest.raises(UserError, match="wan21_i3v"):
        make(second={"name": "wan21_i3v", "size": "tiny"}).role_cards(training.card)
