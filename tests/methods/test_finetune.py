"""The finetune loss against hand computation on a tiny random Wan, its randomness, and that it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from cards.errors import UserError
from cards.prediction import velocity_to_x0
from methods.finetune import Finetune, flow_loss
from methods.forward import encode_prompts
from methods.random import noise_like
from methods.roles import STUDENT

WORDS = ("a red circle", "the blue square moves left", "a green triangle moves right", "the red square")


def finetune(**options: Any) -> Finetune:
    settings: dict[str, Any] = {"lr": 1e-3, "steps": 4, "batch_size": 8, "caption_dropout": 0.0, "weight_decay": 0.0}
    return Finetune(**(settings | options))


def clips(count: int, seed: int = 0) -> dict[str, Any]:
    latents = torch.randn(count, 4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return {"latents": latents, "prompt": [WORDS[i % len(WORDS)] for i in range(count)], "index": torch.arange(count)}


@dataclass(frozen=True)
class Forward:
    """One call of the transformer."""

    latents: Tensor
    timestep: Tensor
    text: Tensor
    velocity: Tensor


def watch(ctx: Any) -> list[Forward]:
    """All calls of the student's transformer from now on."""
    calls: list[Forward] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        names = ("hidden_states", "timestep", "encoder_hidden_states")
        calls.append(Forward(*(kwargs[name] for name in names), output[0].detach()))

    ctx.roles[STUDENT].register_forward_hook(keep, with_kwargs=True)
    return calls


def descend(method: Finetune, batch: Any, ctx: Any, step: int = 0) -> float:
    """Backward of all losses of a step; their sum."""
    total = 0.0
    for update in method.updates(batch, step, ctx):
        assert update.loss is not None
        update.loss.backward()
        total += update.loss.item()
    return total


def weight_by_hand(kind: str, s: Tensor) -> Tensor:
    if kind == "sigma_sqrt":
        return 1 / s**2
    if kind == "cosmap":
        return 2 / (torch.pi * (1 - 2 * s + 2 * s * s))
    return torch.ones_like(s)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_the_loss_is_the_weighted_squared_error_of_the_velocity(training: Any, weighting: str) -> None:
    """Recomputed by hand from what reached the network: x_s = (1 - s) x0 + s e gives e back, t = 1000 s."""
    method = finetune(weighting=weighting, shift=3.0)
    ctx = training.context(method)
    calls = watch(ctx)
    batch = clips(8)
    loss = descend(method, batch, ctx)
    (call,) = calls
    s = (call.timestep / 1000).reshape(-1, 1, 1, 1, 1).double()
    x0, x_s = batch["latents"].double(), call.latents.double()
    noise = (x_s - (1 - s) * x0) / s
    per_clip = ((call.velocity.double() - (noise - x0)) ** 2).mean((1, 2, 3, 4))
    expected = (weight_by_hand(weighting, s.flatten()) * per_clip).mean().item()
    assert loss == pytest.approx(expected, rel=1e-4)


def test_the_network_sees_1000_s_in_float32_never_truncated(training: Any) -> None:
    method = finetune(batch_size=64, micro_batch=64, shift=5.0)
    ctx = training.context(method)
    calls = watch(ctx)
    descend(method, clips(64), ctx)
    timestep = calls[0].timestep
    assert timestep.dtype == torch.float32 and timestep.shape == (64,)
    assert (timestep != timestep.round()).all()
    # One sigma a clip: shifted uniform, whose CDF at s is s / (5 - 4 s).
    assert stats.kstest((timestep / 1000).numpy(), lambda s: s / (5 - 4 * s)).pvalue > 1e-3


def test_noise_is_standard_normal_and_each_clips_own(training: Any) -> None:
    method = finetune(batch_size=16)
    ctx = training.context(method)
    calls = watch(ctx)
    batch = clips(16)
    for step in (0, 1):
        descend(method, batch, ctx, step)
    noise = []
    for call in calls:
        s = (call.timestep / 1000).reshape(-1, 1, 1, 1, 1)
        noise.append(((call.latents - (1 - s) * batch["latents"]) / s).flatten(1))
    rows = torch.cat(noise)
    assert stats.kstest(rows[rows.abs() < 10].flatten().double().numpy(), "norm").pvalue > 1e-3
    correlation = torch.corrcoef(rows) - torch.eye(32)
    assert correlation.abs().max() < 0.2  # 768 independent normals a row: about 0.036


def test_the_true_velocity_gives_x0_back_and_no_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    x0, noise = (torch.randn(6, 4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    s = torch.linspace(0, 1, 6, dtype=torch.float64).reshape(-1, 1, 1)
    x_s = (1 - s) * x0 + s * noise
    torch.testing.assert_close(velocity_to_x0(x_s, noise - x0, s), x0, rtol=0, atol=1e-14)
    assert not flow_loss(noise - x0, x0, noise, torch.ones(6)).any()


@pytest.mark.parametrize(("dropout", "expected"), [(1.0, [""] * 8), (0.0, [WORDS[i % 4] for i in range(8)])])
def test_caption_dropout_of_one_drops_all_and_of_zero_none(training: Any, dropout: float, expected: list[str]) -> None:
    method = finetune(caption_dropout=dropout)
    ctx = training.context(method)
    calls = watch(ctx)
    descend(method, clips(8), ctx)
    assert torch.equal(calls[0].text, encode_prompts(ctx.engine, ctx.roles.instance(STUDENT), expected))


def test_caption_dropout_drops_its_share(training: Any) -> None:
    method = finetune(batch_size=200, micro_batch=200, caption_dropout=0.3)
    ctx = training.context(method)
    calls = watch(ctx)
    batch = clips(200)
    batch["prompt"] = ["a red circle"] * 200
    descend(method, batch, ctx)
    empty = encode_prompts(ctx.engine, ctx.roles.instance(STUDENT), [""])[0]
    dropped = sum(torch.equal(text, empty) for text in calls[0].text)
    assert stats.binomtest(dropped, 200, 0.3).pvalue > 1e-3


def test_micro_batches_give_the_gradient_of_the_whole_batch(training: Any) -> None:
    found = []
    for micro_batch in (3, 8):
        method = finetune(micro_batch=micro_batch, caption_dropout=0.3)
        ctx = training.context(method)
        calls = watch(ctx)
        loss = descend(method, clips(8), ctx)
        assert [len(call.latents) for call in calls] == ([3, 3, 2] if micro_batch == 3 else [8])
        found.append((loss, {key: p.grad for key, p in ctx.roles.parameters_of(STUDENT).items()}))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][key], rtol=0, atol=1e-6)


def test_two_ranks_draw_what_one_would(training: Any) -> None:
    """Rank r of 2 trains on rows [4 r, 4 r + 4) of the global batch, at those rows' own noise and sigmas."""
    from dataclasses import replace

    from methods.world import World

    method = finetune()
    ctx, batch = training.context(method), clips(8)
    calls = watch(ctx)
    descend(method, batch, ctx)
    for rank in (0, 1):
        rows = slice(4 * rank, 4 * rank + 4)
        mine = {"latents": batch["latents"][rows], "prompt": batch["prompt"][rows]}
        descend(method, mine, replace(ctx, world=World(rank, 2)))
    assert torch.equal(torch.cat([call.latents for call in calls[1:]]), calls[0].latents)
    assert torch.equal(torch.cat([call.timestep for call in calls[1:]]), calls[0].timestep)


def test_validation_repeats_draws_no_dropout_and_keeps_no_graph(training: Any) -> None:
    method = finetune(caption_dropout=1.0)
    ctx, batch = training.context(method), clips(4)
    calls = watch(ctx)
    addresses = [(0, "validation", row) for row in range(4)]
    first, second = (method.losses(batch["latents"], batch["prompt"], addresses, ctx, training=False) for _ in range(2))
    assert torch.equal(first, second) and not first.requires_grad
    assert torch.equal(calls[0].text, encode_prompts(ctx.engine, ctx.roles.instance(STUDENT), batch["prompt"]))
    s = (calls[0].timestep / 1000).reshape(-1, 1, 1, 1, 1)
    noise = torch.stack([noise_like(batch["latents"][0], *address, "noise") for address in addresses])
    torch.testing.assert_close(calls[0].latents, (1 - s) * batch["latents"] + s * noise, rtol=0, atol=1e-6)


def test_it_overfits_four_clips(training: Any) -> None:
    """Constant clips: the best velocity is known from x_s, so the loss can fall far below that of the random model."""
    method = finetune(batch_size=4, lr=3e-3)
    module = training.module(method)
    batch = clips(4)
    batch["latents"] = torch.ones(4, 4, 3, 8, 8) * torch.tensor([-1.0, 0.0, 0.5, 1.0]).reshape(-1, 1, 1, 1, 1)
    losses = [row["train/loss"] for row in training.fit(module, [batch] * 60)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


@pytest.mark.parametrize(("option", "message"), [("sampler", "sigma sampler 'x'"), ("weighting", "weighting 'x'")])
def test_unknown_names_are_listed(option: str, message: str) -> None:
    with pytest.raises(UserError, match=f"{message}; expected one of: .*none|{message}; expected one of: .*uniform"):
        finetune(**{option: "x"})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"caption_dropout": 1.5}, "caption_dropout: got 1.5"), ({"shift": 0.0}, "shift: got 0.0"), ({}, None)],
)
def test_bad_settings_are_named(training: Any, options: dict[str, Any], complaint: str | None) -> None:
    problems = finetune(**options).problems(training.card, 1)
    assert problems == [] if complaint is None else complaint in problems[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0, expected at least 1"),
        ({"micro_batch": 0}, "micro_batch: got 0"),
        ({"steps": -1}, "steps: got -1"),
        ({"lr": -1.0}, "lr: got -1.0"),
        ({"ema": 1.0}, r"ema: got 1.0, expected a decay in \[0, 1\)"),
        ({"lora": {"rank": 0}}, "expected a rank of at least 1"),
        ({"lora": {"rnk": 4}}, r"unknown key\(s\) rnk; expected alpha, rank, targets"),
    ],
)
def test_bad_common_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        finetune(**options)
