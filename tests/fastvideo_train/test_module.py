"""PostTrainingModule under Lightning's Trainer: steps, clipping, warmup, EMA, metrics and the C2 gate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastvideo_train.data.prompts import Prompt
from fastvideo_train.module import DivergedError, ParityError
from methods.diffusion_nft import DiffusionNFT
from methods.finetune import Finetune
from methods.rewards.callable_reward import CallableReward
from methods.roles import EMA, OLD, STUDENT


def red_minus_blue(videos: Any, prompts: Any, metadata: Any) -> list[float]:
    """A reward by dotted path."""
    return [float(np.mean(video[..., 0].astype(float) - video[..., 2])) for video in videos]


REWARD = f"{__name__}.red_minus_blue"


def finetune(**options: Any) -> Finetune:
    settings: dict[str, Any] = {"lr": 1e-3, "steps": 8, "batch_size": 4, "weight_decay": 0.0, "clip": None}
    return Finetune(**(settings | options))


def nft(**options: Any) -> DiffusionNFT:
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "steps": 4,
        "batch_size": 2,
        "samples": 3,
        "rollout_steps": 2,
        "timesteps": 2,
        "kl": 0.1,
        "updates": 2,
        "micro_batch": 4,
    }
    return DiffusionNFT(**(settings | options))


def clips(step: int) -> dict[str, Any]:
    latents = torch.randn(4, 4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
    return {"latents": latents, "prompt": ["a red circle", "the blue square", "a green triangle", ""]}


PROMPTS = [Prompt("a red circle"), Prompt("the blue square moves left")]


def weights(module: Any, role: str = STUDENT) -> dict[str, Tensor]:
    return {key: p.detach().clone() for key, p in module.roles.parameters_of(role).items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_step_is_adamw_on_the_summed_gradient_of_all_micro_batches(training: Any) -> None:
    """Against torch.optim.AdamW by hand on a second set of roles."""
    method = finetune(micro_batch=3, weight_decay=0.1, lr=1e-2, betas=(0.8, 0.9))
    module = training.module(method)
    training.fit(module, [clips(0), clips(1)])
    ctx = training.context(method)
    optimizer = torch.optim.AdamW(ctx.roles.trained(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    for step in (0, 1):
        for update in method.updates(clips(step), step, ctx):
            assert update.loss is not None
            update.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = ctx.roles.parameters_of(STUDENT)
    assert all(torch.equal(value, expected[key]) for key, value in weights(module).items())


def test_gradients_are_clipped_to_their_norm_and_the_norm_before_is_logged(training: Any) -> None:
    found: dict[float | None, float] = {}
    for clip in (None, 1e-3):
        module = training.module(finetune(clip=clip))
        norms: list[float] = []
        configure = module.configure_optimizers

        def configured(configure: Any = configure, norms: list[float] = norms) -> Any:
            made = configure()
            made["optimizer"].register_step_pre_hook(
                lambda optimizer, args, kwargs: norms.append(
                    torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm().item()
                )
            )
            return made

        module.configure_optimizers = configured
        (row,) = training.fit(module, [clips(0)])
        found[clip] = row["train/grad_norm"]
        assert norms == [pytest.approx(row["train/grad_norm"] if clip is None else clip, rel=1e-3)]
    assert found[None] == pytest.approx(found[1e-3]) and found[None] > 1e-2


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_reaches_the_weights(training: Any) -> None:
    module = training.module(finetune(clip=1.0))
    broken = clips(1)
    broken["latents"][0, 0, 0, 0, 0] = float("nan")
    states: list[dict[str, Tensor]] = []
    module.on_step = lambda step, metrics: states.append(weights(module))
    with pytest.raises(DivergedError, match="step 1: got a gradient norm of nan, expected a finite one"):
        training.fit(module, [clips(0), broken, clips(2)])
    assert len(states) == 1 and equal(weights(module), states[0])
    assert all(torch.isfinite(value).all() for value in weights(module).values())


def test_warmup_rises_linearly_in_optimizer_steps_and_the_logged_rate_is_the_one_used(training: Any) -> None:
    module = training.module(finetune(warmup=4, lr=1e-3))
    rows = training.fit(module, [clips(i) for i in range(6)])
    assert [row["train/lr"] for row in rows] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_the_cosine_schedule_falls_to_zero_over_all_optimizer_steps_of_the_run(training: Any) -> None:
    method = nft(lr_schedule="cosine", steps=3, updates=2, lr=1e-3)
    assert [method.lr_factor(n) for n in range(7)] == pytest.approx([1.0, 0.9330127, 0.75, 0.5, 0.25, 0.0669873, 0.0])
    module = training.module(method, reward=CallableReward(function=REWARD))
    rows = training.fit(module, [PROMPTS] * 3)
    # A row shows the rate of its last optimizer step.
    assert [row["train/lr"] for row in rows] == pytest.approx([0.9330127e-3, 0.5e-3, 0.0669873e-3])


def test_warmup_and_cosine_multiply() -> None:
    method = finetune(lr_schedule="cosine", steps=8, warmup=4)
    assert [method.lr_factor(n) for n in (0, 3, 4)] == pytest.approx([0.25, 0.5 * (1 + np.cos(np.pi * 3 / 8)), 0.5])


def test_a_rate_of_zero_moves_nothing(training: Any) -> None:
    module = training.module(finetune(lr=0.0))
    before = weights(module)
    (row,) = training.fit(module, [clips(0)])
    assert equal(weights(module), before) and row["train/grad_norm"] > 0


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["full", "lora"])
def test_ema_copies_until_its_start_and_then_averages(training: Any, lora: Any) -> None:
    module = training.module(finetune(ema=0.9, ema_start=2, lr=1e-2, lora=lora))
    students: list[dict[str, Tensor]] = []
    averages: list[dict[str, Tensor]] = []

    def keep(step: int, metrics: dict[str, float]) -> None:
        students.append(weights(module))
        averages.append(weights(module, EMA))

    module.on_step = keep
    training.fit(module, [clips(i) for i in range(5)])
    assert equal(averages[0], students[0]) and equal(averages[1], students[1])
    for step in (2, 3, 4):
        for key, value in averages[step].items():
            expected = 0.9 * averages[step - 1][key].double() + 0.1 * students[step][key].double()
            torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)
    assert not equal(averages[4], students[4])
    assert module.best_role == EMA


def test_without_an_average_the_student_is_what_leaves(training: Any) -> None:
    assert training.module(finetune()).best_role == STUDENT


def test_nft_counts_optimizer_steps_and_moves_versions(training: Any) -> None:
    reward = CallableReward(function=REWARD)
    module = training.module(nft(), reward=reward)
    before = {role: module.roles.instance(role).versions()["transformer"] for role in (STUDENT, OLD)}
    rows = training.fit(module, [PROMPTS] * 2)
    assert module.step_index == 2 and module.optimizer_steps == 4
    assert module.position == {"next": 2}
    assert module.roles.instance(STUDENT).versions()["transformer"] == before[STUDENT] + 4
    assert module.roles.instance(OLD).versions()["transformer"] == before[OLD] + 2
    for row in rows:
        assert {"train/loss", "train/policy_loss", "train/kl", "train/reward", "train/old_decay"} <= set(row)
        assert row["train/loss"] == pytest.approx(row["train/policy_loss"] + 0.1 * row["train/kl"], rel=1e-5)
    assert rows[0]["train/reward"] != rows[1]["train/reward"]  # fresh samples


def test_a_lora_run_leaves_the_base_bit_for_bit(training: Any) -> None:
    method = nft(lora={"rank": 4, "alpha": 8}, lr=1e-2)
    module = training.module(method, reward=CallableReward(function=REWARD))
    before = {key: value.clone() for key, value in module.roles[STUDENT].state_dict().items()}
    training.fit(module, [PROMPTS])
    changed = {key for key, value in module.roles[STUDENT].state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all(".lora_" in key and (".student." in key or ".old." in key) for key in changed)


def test_equal_rewards_leave_an_nft_student_where_it_was(training: Any) -> None:
    """No weight decay, no KL: Adam sees exact zeros and moves nothing, not even by rounding."""
    method = nft(kl=0.0, weight_decay=0.0, lr=1e-2)
    module = training.module(method, reward=CallableReward(function=f"{__name__}.the_same_for_all"))
    before = weights(module)
    training.fit(module, [PROMPTS] * 2)
    assert equal(weights(module), before)


def the_same_for_all(videos: Any, prompts: Any, metadata: Any) -> list[float]:
    return [0.25] * len(videos)


class Prepared(CallableReward):
    """Keeps where it was loaded."""

    devices: tuple[str, ...] = ()

    def prepare(self, device: str = "cpu") -> None:
        self.devices = (*self.devices, device)


def test_a_reward_is_loaded_on_the_runs_device_once_before_training(training: Any) -> None:
    reward = Prepared(function=REWARD)
    module = training.module(nft(), reward=reward)
    at_start: list[tuple[str, ...]] = []
    module.on_start = lambda: at_start.append(reward.devices)
    training.fit(module, [PROMPTS])
    assert at_start == [("cpu",)] and reward.devices == ("cpu",)


# -- the C2 gate


def test_the_gate_runs_before_the_first_update_and_at_its_interval(training: Any) -> None:
    module = training.module(finetune(), parity_every=2)
    rows = training.fit(module, [clips(i) for i in range(5)])
    assert [row.get("parity/c2") for row in rows] == [0.0, None, 0.0, None, 0.0]
    assert module.c2 is not None and module.c2.passed


@pytest.mark.parametrize("kind", ["finetune", "nft", "nft-lora"])
def test_a_model_that_trains_as_another_than_it_serves_is_stopped_before_it_moves(training: Any, kind: str) -> None:
    """A layer that scales its output in grad mode alone, as dropout or a training-only path would."""
    lora = {"rank": 4, "alpha": 8} if kind == "nft-lora" else None
    method = finetune() if kind == "finetune" else nft(lora=lora)
    module = training.module(method, reward=CallableReward(function=REWARD), parity_every=50)
    module.roles[STUDENT].blocks[1].register_forward_hook(
        lambda layer, args, output: output * 1.001 if torch.is_grad_enabled() else None
    )
    before = weights(module)
    with pytest.raises(ParityError, match=r"C2 gate broke at step 0: largest difference .*, allowed 0\.0e\+00"):
        training.fit(module, [clips(0) if kind == "finetune" else PROMPTS])
    assert equal(weights(module), before) and module.optimizer_steps == 0


def test_a_gate_that_breaks_later_stops_the_run_there(training: Any) -> None:
    module = training.module(finetune(), parity_every=2)
    broken: list[Any] = []

    def breaks(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            layer = module.roles[STUDENT].proj_out
            broken.append(
                layer.register_forward_hook(lambda m, a, out: out + 1e-3 if torch.is_grad_enabled() else None)
            )

    module.on_step = breaks
    with pytest.raises(ParityError, match="at step 4"):
        training.fit(module, [clips(i) for i in range(6)])
    assert broken and module.step_index == 4
