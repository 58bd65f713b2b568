"""DiffusionNFT against its closed forms (arXiv 2509.16117), alone and end to end on a tiny random Wan.

Legend: B rows, D elements of a row, G groups, K samples a group, N = G K.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cards.errors import UserError
from fastvideo_train.data.prompts import Prompt
from methods.diffusion_nft import DiffusionNFT, nft_loss, old_policy_decay
from methods.ladder import ladder_card
from methods.method import Update
from methods.rewards.reward import Reward, RewardBatch, Scores
from methods.roles import OLD, REFERENCE, STUDENT
from methods.rollout import roll_out, rollout_seeds

A_MAX = 5.0
PROMPTS = ("a red circle", "the blue square moves left", "a green triangle")


@dataclass(frozen=True)
class Rows:
    """Random rows of a loss, in float64."""

    x0: Tensor
    noise: Tensor
    sigma_B: Tensor
    v_old: Tensor

    @property
    def t(self) -> Tensor:
        return self.sigma_B.reshape(-1, 1, 1)

    @property
    def x_t(self) -> Tensor:
        return (1 - self.t) * self.x0 + self.t * self.noise

    @property
    def target(self) -> Tensor:
        return self.noise - self.x0

    def loss(self, v_theta: Tensor, r: float, mix: float) -> Tensor:
        r_B = torch.full_like(self.sigma_B, r)
        return nft_loss(v_theta, self.v_old, self.x_t, self.x0, self.sigma_B, r_B, mix=mix, a_max=A_MAX)

    def gradient(self, v_theta: Tensor, r: float, mix: float) -> Tensor:
        v = v_theta.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.loss(v, r, mix).sum(), v)
        return gradient


def rows(*, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Rows:
    """``scale``: of the old policy's error; a tiny one puts every normaliser on its floor: the loss is quadratic."""
    generator = torch.Generator().manual_seed(seed)
    x0, noise, error = (torch.randn(5, 3, 7, generator=generator, dtype=dtype) for _ in range(3))
    sigma_B = torch.tensor([0.05, 0.3, 0.5, 0.9, 1.0], dtype=dtype)
    return Rows(x0, noise, sigma_B, noise - x0 + scale * error)


# -- the loss


@pytest.mark.parametrize("mix", [0.05, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("r", [0.0, 0.2, 0.5, 0.83, 1.0])
def test_on_policy_gradient_is_its_closed_form_whatever_the_mix(r: float, mix: float) -> None:
    """A_max (2r - 1) 2 t^2 (v_old - v*) / (D w), w = t mean|v* - v_old|."""
    a = rows()
    w = a.t * (a.target - a.v_old).abs().mean((1, 2), keepdim=True)
    expected = A_MAX * (2 * r - 1) * 2 * a.t**2 * (a.v_old - a.target) / (21 * w)
    torch.testing.assert_close(a.gradient(a.v_old, r, mix), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mix", [0.05, 0.1, 0.3, 1.0, 3.0])
def test_on_policy_gradient_at_a_half_is_zero_to_the_last_bit_in_float32(mix: float) -> None:
    """Adam divides by the gradient's own size: a rounding error would become a step of full length."""
    a = rows(dtype=torch.float32)
    assert torch.equal(a.gradient(a.v_old, 0.5, mix), torch.zeros_like(a.v_old))


def test_on_policy_value_does_not_depend_on_r_though_the_gradient_does() -> None:
    a = rows()
    values = [a.loss(a.v_old, r, 0.1) for r in (0.0, 0.5, 1.0)]
    w = a.sigma_B * (a.target - a.v_old).abs().mean((1, 2))
    expected = A_MAX / 0.1 * (a.t**2 * (a.target - a.v_old) ** 2).mean((1, 2)) / w
    for value in values:
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert torch.allclose(a.gradient(a.v_old, 0.0, 0.1), -a.gradient(a.v_old, 1.0, 0.1), rtol=1e-9)
    assert a.gradient(a.v_old, 1.0, 0.1).abs().max() > 1e-3


@pytest.mark.parametrize("mix", [0.1, 1.0])
@pytest.mark.parametrize("r", [0.0, 0.3, 0.9])
def test_off_policy_gradient_is_that_of_the_loss_with_its_normalisers_held(r: float, mix: float) -> None:
    """Central differences of a plain numpy loss whose normalisers stay at the point of differentiation."""
    a = rows()
    generator = torch.Generator().manual_seed(3)
    v = a.v_old + 0.7 * torch.randn(a.v_old.shape, generator=generator, dtype=torch.float64)
    x_t, x0, t, v_old = (x.numpy() for x in (a.x_t, a.x0, a.t, a.v_old))

    def errors(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        plus, minus = mix * v + (1 - mix) * v_old, (1 + mix) * v_old - mix * v
        return (x_t - t * plus) - x0, (x_t - t * minus) - x0

    held = [np.abs(e).mean((1, 2)) for e in errors(v.numpy())]

    def loss(v: np.ndarray) -> np.ndarray:
        plus, minus = ((e**2).mean((1, 2)) / h for e, h in zip(errors(v), held, strict=True))
        return A_MAX * (r * plus + (1 - r) * minus) / mix

    torch.testing.assert_close(a.loss(v, r, mix), torch.from_numpy(loss(v.numpy())), rtol=1e-12, atol=0)
    gradient, h = a.gradient(v, r, mix), 1e-5
    for i, j in ((0, 0), (1, 4), (2, 6)):
        moved = np.zeros_like(x0)
        moved[:, i, j] = h
        difference = (loss(v.numpy() + moved) - loss(v.numpy() - moved)) / (2 * h)
        np.testing.assert_allclose(gradient[:, i, j].numpy(), difference, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mix", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("r", [0.0, 0.25, 0.5, 1.0])
def test_unweighted_minimiser_is_the_old_velocity_moved_by_2r_minus_1_over_b(r: float, mix: float) -> None:
    """With both normalisers on their floor the loss is unweighted: its gradient vanishes at the minimiser alone."""
    a = rows(scale=1e-7)
    best = a.v_old + (2 * r - 1) / mix * (a.target - a.v_old)
    aside = best + 1e-7 * torch.randn(best.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert a.gradient(best, r, mix).abs().max() < 1e-6 * a.gradient(aside, r, mix).abs().max()
    assert (a.loss(aside, r, mix) > a.loss(best, r, mix)).all()


def test_at_a_half_the_loss_is_a_pure_pull_to_the_old_policy() -> None:
    """On the floor 1e-5: A_max b 2 t^2 (v_theta - v_old) / (D 1e-5), with nothing of the sample in it."""
    a, mix = rows(scale=1e-7), 0.3
    away = 1e-7 * torch.randn(a.v_old.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = A_MAX * mix * 2 * a.t**2 * away / (21 * 1e-5)
    gradient = a.gradient(a.v_old + away, 0.5, mix)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


def test_r_1_and_b_1_is_the_self_normalised_x0_loss() -> None:
    a = rows()
    v = a.v_old + 0.5 * torch.randn(a.v_old.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    error = (a.x_t - a.t * v) - a.x0
    expected = A_MAX * (error**2).mean((1, 2)) / error.abs().mean((1, 2))
    torch.testing.assert_close(a.loss(v, 1.0, 1.0), expected, rtol=1e-12, atol=0)


def test_a_perfect_student_gives_a_finite_loss() -> None:
    a = rows(scale=0.0)
    assert torch.isfinite(a.gradient(a.target, 1.0, 0.1)).all()


def test_the_negative_loss_cannot_be_switched_off() -> None:
    """A worst sample (r = 0) pushes the student away from it under any setting, and no argument says otherwise."""
    a = rows()
    for mix in (0.01, 1.0, 10.0):
        away = (a.gradient(a.v_old, 0.0, mix) * (a.v_old - a.target)).sum((1, 2))
        assert (away < 0).all()
    assert not [name for name in inspect.signature(DiffusionNFT).parameters if "neg" in name or "pos" in name]


# -- the old policy's schedule


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (0, {0: 0.0, 1: 0.0, 10_000: 0.0}),
        (1, {0: 0.0, 1: 0.001, 250: 0.25, 500: 0.5, 501: 0.5, 10_000: 0.5}),
        (2, {0: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 10_000: 0.999}),
    ],
)
def test_decay_schedules(kind: int, table: dict[int, float]) -> None:
    assert {n: old_policy_decay(kind, n) for n in table} == pytest.approx(table, abs=1e-12)


def test_an_unknown_decay_is_named() -> None:
    with pytest.raises(UserError, match="'3'; expected one of: 0, 1, 2"):
        old_policy_decay(3, 0)


# -- end to end


class TableReward(Reward):
    """Scores by a table: value i for sample i of a step. Keeps what it was shown."""

    name = "table"
    version = "1"

    def __init__(self, values: Any):
        self.values = np.asarray(values, dtype=np.float64).reshape(-1)
        self.seen: list[RewardBatch] = []

    def score(self, batch: RewardBatch) -> Scores:
        self.seen.append(batch)
        return Scores(values=self.values, reasons=("no face found",) if np.isnan(self.values).any() else ())


class BrightnessReward(Reward):
    """Mean pixel of a clip: differs between samples."""

    name = "brightness"
    version = "1"

    def score(self, batch: RewardBatch) -> Scores:
        return Scores(values=np.array([np.mean(video) for video in batch.videos_BFHWC], dtype=np.float64))


@dataclass
class Forward:
    """One forward of a transformer, and the gradient that its output got."""

    latents: Tensor
    timestep: Tensor
    text: Tensor
    output: Tensor
    with_gradient: bool
    gradient: Tensor | None = None


@dataclass
class Trace:
    """All forwards of a module from now on."""

    forwards: list[Forward] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Trace:
        trace = cls()
        module.register_forward_hook(trace._keep, with_kwargs=True)
        return trace

    def _keep(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        forward = Forward(
            kwargs["hidden_states"],
            kwargs["timestep"],
            kwargs["encoder_hidden_states"],
            output[0].detach(),
            output[0].requires_grad,
        )
        self.forwards.append(forward)
        if output[0].requires_grad:
            output[0].register_hook(lambda gradient: setattr(forward, "gradient", gradient))

    def training(self) -> list[Forward]:
        return [f for f in self.forwards if f.with_gradient]


def nft(**options: Any) -> DiffusionNFT:
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "steps": 4,
        "batch_size": 2,
        "samples": 4,
        "rollout_steps": 3,
        "timesteps": 3,
        "kl": 0.0,
        "micro_batch": 5,
        "weight_decay": 0.0,
    }
    return DiffusionNFT(**(settings | options))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(PROMPTS[i % len(PROMPTS)]) for i in range(count)]


def descend(method: DiffusionNFT, batch: Any, step: int, ctx: Any) -> list[Update]:
    """Backward of every loss of a step, without any optimizer."""
    updates = []
    for update in method.updates(batch, step, ctx):
        if update.loss is not None:
            update.loss.backward()
        updates.append(update)
    return updates


def gradients(ctx: Any) -> dict[str, Tensor]:
    found = {key: p.grad for key, p in ctx.roles.parameters_of(STUDENT).items() if p.requires_grad}
    assert all(gradient is not None for gradient in found.values())
    return found


def move(ctx: Any, role: str, seed: int = 7, scale: float = 0.05) -> None:
    """Makes a role's weights others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ctx.roles.parameters_of(role).values():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    ctx.roles.changed(role)


def test_every_velocity_gets_the_closed_form_gradient_of_its_own_reward(training: Any) -> None:
    """From rewards, failed ones among them, to dL/dv of each (sample, timestep), through rollouts and micro-batches."""
    method = nft(advantage_std="group")
    nan = math.nan
    table = np.array([[0.1, 0.9, 0.4, 0.3], [2.0, nan, 5.0, nan]])
    ctx = training.context(method, TableReward(table))
    trace = Trace.of(ctx.roles[STUDENT])
    descend(method, prompts(2), 3, ctx)

    r_N = np.full((2, 4), 0.5)
    for g in range(2):
        known = ~np.isnan(table[g])
        a = (table[g][known] - table[g][known].mean()) / (table[g][known].std() + 1e-4)
        r_N[g][known] = np.clip(0.5 + 0.5 * np.clip(a, -5, 5) / 5, 0, 1)
    texts = [p.text for p in prompts(2) for _ in range(4)]
    old = ctx.roles.instance(OLD)
    seeds = rollout_seeds(0, 3, range(2), 4)
    x0_N = roll_out(ctx.engine, old, texts, seeds, steps=3, solver="euler", guidance=1.0).x0_NCTHW

    rows = [
        (f.latents[i], f.timestep[i], f.output[i], f.gradient[i])
        for f in trace.training()
        for i in range(len(f.latents))
    ]
    assert len(rows) == 8 * 3
    for index, (x_t, timestep, v_old, gradient) in enumerate(rows):
        n = index % 8
        t = timestep.item() / 1000
        target = (x_t - x0_N[n]) / t
        w = t * (target - v_old).abs().mean()
        expected = A_MAX * (2 * r_N.flat[n] - 1) * 2 * t**2 * (v_old - target) / (v_old.numel() * w) / 24
        torch.testing.assert_close(
            gradient, expected.float(), rtol=2e-3, atol=1e-3 * expected.abs().max().item() + 1e-12
        )
        if np.isnan(table.flat[n]):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_equal_rewards_move_nothing_at_all(training: Any) -> None:
    method = nft()
    ctx = training.context(method, TableReward(np.full(8, 0.4)))
    updates = descend(method, prompts(2), 0, ctx)
    assert updates[0].loss is not None and updates[0].loss.item() > 0
    assert all(not gradient.any() for gradient in gradients(ctx).values())


def test_a_failed_group_weighs_as_one_without_signal(training: Any) -> None:
    """Masked, not scored: the gradient equals that of r = 1/2 for its rows, bit for bit."""
    found = []
    for second in (math.nan, 1.0):
        method = nft(advantage_std="group")
        ctx = training.context(method, TableReward([0.0, 1.0, 0.2, 0.5, *[second] * 4]))
        updates = descend(method, prompts(2), 0, ctx)
        assert updates[-1].metrics["train/reward_failed"] == (4 if math.isnan(second) else 0)
        found.append(gradients(ctx))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
    assert any(gradient.any() for gradient in found[0].values())


def test_a_step_on_which_every_reward_failed_stops_with_the_reason(training: Any) -> None:
    method = nft()
    ctx = training.context(method, TableReward(np.full(8, math.nan)))
    with pytest.raises(UserError, match=r"'table' failed on all 8 samples.*no face found"):
        descend(method, prompts(2), 0, ctx)


def test_kl_pulls_the_student_to_the_reference(training: Any) -> None:
    """With equal rewards on-policy lambda mean|v_theta - v_ref|^2 is left: 2 lambda (v_theta - v_ref) / D a row."""
    method = nft(kl=0.3)
    ctx = training.context(method, TableReward(np.full(8, 0.4)))
    move(ctx, REFERENCE)
    trace = Trace.of(ctx.roles[STUDENT])
    updates = descend(method, prompts(2), 0, ctx)
    squares = []
    for forward in trace.training():
        with torch.no_grad():
            (v_ref,) = ctx.roles[REFERENCE](forward.latents, forward.timestep, forward.text, return_dict=False)
        difference = forward.output - v_ref
        squares.append((difference**2).flatten(1).mean(1))
        expected = 0.3 * 2 * difference / difference[0].numel() / 24
        torch.testing.assert_close(forward.gradient, expected, rtol=1e-4, atol=1e-9)
    kl = sum(update.metrics.get("train/kl", 0.0) for update in updates)
    assert kl == pytest.approx(torch.cat(squares).mean().item(), rel=1e-4)


def test_no_reference_is_kept_without_kl() -> None:
    assert nft(kl=0.0).roles() == (OLD,)
    assert nft(kl=1e-4).roles() == (OLD, REFERENCE)


def test_rollouts_are_the_old_policys_without_guidance(training: Any) -> None:
    """Against ``diffusers.WanPipeline`` with the old policy's transformer, Euler, guidance 1."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    method = nft(samples=2, batch_size=2)
    reward = TableReward([0.0, 1.0, 2.0, 3.0])
    ctx = training.context(method, reward)
    move(ctx, STUDENT, seed=1)
    move(ctx, OLD, seed=2)
    student, old = Trace.of(ctx.roles[STUDENT]), Trace.of(ctx.roles[OLD])
    descend(method, prompts(2), 5, ctx)
    assert sum(len(f.latents) for f in old.forwards) == 4 * 3 + 4 * 3  # rollout steps, then one a loss term
    assert len(student.training()) == len(student.forwards)  # the student never samples

    pipe = WanPipeline.from_pretrained(training.folder, transformer=ctx.roles[OLD], dtype=torch.float32)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe.set_progress_bar_config(disable=True)
    seeds = rollout_seeds(0, 5, range(2), 2)
    for index, seed in enumerate(seeds):
        frames_FHWC = pipe(
            prompts(2)[index // 2].text,
            height=32,
            width=32,
            num_frames=9,
            num_inference_steps=3,
            guidance_scale=1.0,
            max_sequence_length=12,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="np",
        ).frames[0]
        seen = reward.seen[0].videos_BFHWC[index]
        assert np.abs(seen - np.clip(frames_FHWC, 0, 1) * 255).max() < 0.51  # rounded to uint8


def test_each_prompt_is_encoded_once_while_its_weights_stand(training: Any) -> None:
    method = nft(batch_size=4, samples=2, micro_batch=3)
    ctx = training.context(method, TableReward(np.arange(8)))
    encoded: list[int] = []
    encoder = ctx.roles.instance(STUDENT).module("text_encoder")
    encoder.register_forward_hook(lambda module, args, output: encoded.append(len(args[0])))
    descend(method, prompts(4), 0, ctx)
    assert sum(encoded) == 3  # four prompts, one of them twice
    ctx.roles.changed(STUDENT)
    ctx.roles.copy(OLD)
    descend(method, prompts(4), 1, ctx)
    assert sum(encoded) == 3


def test_training_timesteps_are_the_samplers_own_shuffled_for_each_sample_with_fresh_noise(training: Any) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    method = nft(rollout_steps=6, timesteps=6, updates=3, samples=3)
    ctx = training.context(method, TableReward(np.arange(6)))
    trace = Trace.of(ctx.roles[STUDENT])
    updates = descend(method, prompts(2), 0, ctx)
    assert sum(update.step for update in updates) == 3
    forwards = trace.training()
    t_TN = torch.cat([f.timestep for f in forwards]).reshape(6, 6)
    x_TN = torch.cat([f.latents for f in forwards]).reshape(6, 6, -1)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    assert t_TN.dtype == torch.float32 and (t_TN != t_TN.round()).any()
    for n in range(6):  # every sample sees each of the sampler's timesteps once
        torch.testing.assert_close(t_TN[:, n].sort(descending=True).values, scheduler.timesteps)
    assert len({tuple(t_TN[:, n].tolist()) for n in range(6)}) > 1
    x0 = roll_out(
        ctx.engine,
        ctx.roles.instance(OLD),
        [p.text for p in prompts(2) for _ in range(3)],
        rollout_seeds(0, 0, range(2), 3),
        steps=6,
        solver="euler",
        guidance=1.0,
    ).x0_NCTHW.flatten(1)
    s = (t_TN / 1000).unsqueeze(-1)
    noise = ((x_TN - (1 - s) * x0) / s).flatten(0, 1)
    assert noise.mean().abs() < 0.05 and abs(noise.std().item() - 1) < 0.05
    # Independent draws: rows of 768 normals correlate by about 1 / sqrt(768) = 0.036.
    correlation = torch.corrcoef(noise) - torch.eye(36)
    assert correlation.abs().max() < 0.2


def test_micro_batches_do_not_change_the_gradient(training: Any) -> None:
    found = []
    for micro_batch in (5, 64):
        method = nft(micro_batch=micro_batch)
        ctx = training.context(method, TableReward([0, 1, 2, 3, 4, 9, 1, 0]))
        updates = descend(method, prompts(2), 0, ctx)
        assert [u.step for u in updates if u.loss is not None][-1]
        found.append(gradients(ctx))
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-6)


def test_no_decay_leaves_the_old_policy_equal_to_the_student(training: Any) -> None:
    method = nft(decay=0, updates=3)
    module = training.module(method, reward=BrightnessReward())
    first = module.roles.parameters_of(OLD)["proj_out.weight"].clone()
    training.fit(module, [prompts(2)])
    student, old = module.roles.parameters_of(STUDENT), module.roles.parameters_of(OLD)
    assert all(torch.equal(student[key], old[key]) for key in student)
    assert not torch.equal(old["proj_out.weight"], first)


def test_the_old_policy_follows_by_the_schedule_in_optimizer_steps(training: Any) -> None:
    method = nft(decay=1, updates=3)
    module = training.module(method, reward=BrightnessReward())
    expected = {key: p.detach().clone().double() for key, p in module.roles.parameters_of(OLD).items()}
    students: list[dict[str, Tensor]] = []
    module.on_step = lambda step, metrics: students.append(
        {key: p.detach().clone().double() for key, p in module.roles.parameters_of(STUDENT).items()}
    )
    metrics = training.fit(module, [prompts(2)] * 3)
    assert [row["train/old_decay"] for row in metrics] == pytest.approx([0.003, 0.006, 0.009])  # 3 steps an iteration
    assert module.optimizer_steps == 9
    for eta, student in zip((0.003, 0.006, 0.009), students, strict=True):
        expected = {key: eta * expected[key] + (1 - eta) * student[key] for key in expected}
    old = module.roles.parameters_of(OLD)
    for key, value in expected.items():
        torch.testing.assert_close(old[key].double(), value, rtol=0, atol=1e-6)
    apart = max((old[key] - p).abs().max().item() for key, p in module.roles.parameters_of(STUDENT).items())
    assert apart > 1e-6


def test_a_constant_eta_takes_the_place_of_the_schedule(training: Any) -> None:
    module = training.module(nft(decay=0, eta=0.75), reward=BrightnessReward())
    first = {key: p.detach().clone() for key, p in module.roles.parameters_of(OLD).items()}
    metrics = training.fit(module, [prompts(2)])
    assert [row["train/old_decay"] for row in metrics] == [0.75]
    student, old = module.roles.parameters_of(STUDENT), module.roles.parameters_of(OLD)
    for key in first:
        torch.testing.assert_close(old[key], 0.75 * first[key] + 0.25 * student[key], rtol=0, atol=1e-6)


def test_nft_raises_the_reward(training: Any) -> None:
    """Brightness of a random model's clips, fresh samples each iteration."""
    method = nft(batch_size=2, samples=8, rollout_steps=4, timesteps=2, updates=2, lr=1e-2)
    module = training.module(method, reward=BrightnessReward())
    metrics = training.fit(module, [prompts(2)] * 15)
    rewards = [row["train/reward"] for row in metrics]
    spread = np.mean([row["train/reward_std"] for row in metrics])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.5 * spread


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"samples": 1}, "samples: got 1"),
        ({"solver": "heun"}, "solver: got 'heun', expected one of dpm2, euler, lcm, unipc"),
        ({"mix": 0.0}, "mix: got 0.0"),
        ({"kl": -1.0}, "kl: got -1.0"),
        ({"a_max": 0.0}, "a_max: got 0.0"),
        ({"eta": 1.0}, "eta: got 1.0, expected a number in [0, 1), or null"),
        ({"decay": 3}, "decay: got 3, expected 0, 1 or 2"),
        ({"timesteps": 4}, "timesteps: got 4, expected 1 .. rollout_steps = 3"),
        ({"updates": 2}, "updates: got 2, expected a divisor of timesteps = 3"),
        ({"updates": 0}, "updates: got 0"),
    ],
)
def test_bad_settings_are_named_before_weights_load(training: Any, options: dict[str, Any], complaint: str) -> None:
    assert any(complaint in problem for problem in nft(**options).problems(training.card, 1))


def test_a_distilled_card_is_refused_before_weights_load(training: Any) -> None:
    (problem,) = nft().problems(ladder_card(training.card, (1.0, 0.5)), 1)
    assert "ladder (1.0, 0.5)" in problem


def test_groups_must_divide_over_the_devices(training: Any) -> None:
    assert nft(batch_size=4).problems(training.card, 2) == []
    assert any("batch_size: got 3" in problem for problem in nft(batch_size=3).problems(training.card, 2))
