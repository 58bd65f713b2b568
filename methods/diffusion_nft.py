"""diffusion_nft: DiffusionNFT, likelihood-free online RL on the forward process (arXiv 2509.16117).

An iteration: the OLD policy rolls out K samples a prompt without guidance; rewards become advantages and these an
optimality probability r; for the sampler's own timesteps the clean samples are noised afresh and the student's
velocity is drawn towards (r) and away from (1 - r) them; the old policy then follows the student. Where rollouts run a
step ahead, v_old is of the policy that sampled them, not of the old policy of now.

Legend: G prompts (groups), K samples a group, N = G K, B rows of a forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import unknown_name
from cards.prediction import add_noise, expand_to, velocity_to_x0
from inference.instance import ModelInstance
from loops.solvers import SOLVERS
from methods.advantages import group_advantages, optimality_probability
from methods.forward import encode_prompts, velocity
from methods.ladder import ladder_of
from methods.method import Context, Method, Update
from methods.random import generator_at, noise_like
from methods.rewards.scoring import score_groups
from methods.roles import OLD, REFERENCE, STUDENT
from methods.rollout import RolloutPlan, rollout_requests, rollout_seeds, stacked
from methods.world import World

NORMALISER_FLOOR = 1e-5


def nft_loss(
    v_theta: Tensor, v_old: Tensor, x_t: Tensor, x0: Tensor, sigma_B: Tensor, r_B: Tensor, *, mix: float, a_max: float
) -> Tensor:
    """(B,) losses ``A_max [r l+ + (1 - r) l-] / b`` (arXiv 2509.16117, Eq. 9 and its self-normalised form).

    ``v+ = b v_theta + (1 - b) v_old``, ``v- = (1 + b) v_old - b v_theta``, ``e+- = (x_t - t v+-) - x0``,
    ``l+- = mean(e+-^2) / stopgrad(max(mean |e+-|, 1e-5))``, means over a sample's elements, in float32.

    Written by the difference to the old policy, so that v+ and v- are the same bits where the student equals it and
    the gradient at r = 0.5 is exactly zero: Adam would blow a rounding error up to a full step.
    """
    t = expand_to(sigma_B, x_t)
    lean = mix * (v_theta - v_old)
    v_plus = v_old + lean
    v_minus = v_old - lean
    positive = _self_normalised(velocity_to_x0(x_t, v_plus, t) - x0)
    negative = _self_normalised(velocity_to_x0(x_t, v_minus, t) - x0)
    return a_max * (r_B * positive + (1 - r_B) * negative) / mix


def _self_normalised(error: Tensor) -> Tensor:
    """(B,) ``mean(e^2) / stopgrad(max(mean |e|, floor))``."""
    flat = error.flatten(1)
    return (flat**2).mean(1) / flat.detach().abs().mean(1).clamp_min(NORMALISER_FLOOR)


def old_policy_decay(kind: int, optimizer_steps: int) -> float:
    """eta of ``old <- eta old + (1 - eta) student`` after ``n`` optimizer steps so far.

    0: always 0 | 1: min(0.001 n, 0.5) | 2: 0 until n = 75, then min(0.0075 (n - 75), 0.999).
    """
    n = optimizer_steps
    if kind == 0:
        return 0.0
    if kind == 1:
        return min(0.001 * n, 0.5)
    if kind == 2:
        return 0.0 if n < 75 else min(0.0075 * (n - 75), 0.999)
    raise unknown_name("old policy decay", str(kind), ("0", "1", "2"))


class DiffusionNFT(Method):
    """DiffusionNFT. ``batch_size`` counts prompts (groups) an iteration.

    Args:
        samples: K, samples a prompt.
        rollout_steps, solver: of the rollouts' ODE sampler.
        guidance: of the rollouts; the method wants 1.
        mix: b, how far the implicit policies lean on the student.
        kl: lambda, weight of |v_theta - v_ref|^2; 0 has no reference role.
        a_max: bound of the advantages.
        advantage_std: ``batch`` | ``group``.
        updates: optimizer steps an iteration; each sees every sample at ``timesteps / updates`` of its timesteps.
        timesteps: timesteps trained on, per sample and iteration, out of ``rollout_steps``.
        decay: schedule of the old policy, 0 | 1 | 2, see :func:`old_policy_decay`.
        eta: a constant in [0, 1) in place of the schedule; None follows ``decay``.
    """

    name = "diffusion_nft"
    needs_reward = True
    rolls_out = True

    def __init__(
        self,
        *,
        samples: int = 8,
        rollout_steps: int = 10,
        solver: str = "euler",
        guidance: float = 1.0,
        mix: float = 0.1,
        kl: float = 1e-4,
        a_max: float = 5.0,
        advantage_std: Literal["batch", "group"] = "batch",
        updates: int = 1,
        timesteps: int = 10,
        decay: int = 1,
        eta: float | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        self.samples = samples
        self.rollout_steps = rollout_steps
        self.solver = solver
        self.guidance = guidance
        self.mix = mix
        self.kl = kl
        self.a_max = a_max
        self.advantage_std = advantage_std
        self.inner_updates = updates
        self.timesteps = timesteps
        self.decay = decay
        self.eta = eta

    def roles(self) -> tuple[str, ...]:
        return (OLD, REFERENCE) if self.kl > 0 else (OLD,)

    def optimizer_steps(self) -> int:
        return self.steps * self.inner_updates

    def rollout_guidance(self) -> float:
        return self.guidance

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        checks = (
            (self.samples >= 2, f"samples: got {self.samples}, expected at least 2 (advantages compare them)"),
            (self.solver in SOLVERS, f"solver: got {self.solver!r}, expected one of {', '.join(sorted(SOLVERS))}"),
            (self.mix > 0, f"mix: got {self.mix}, expected a number > 0"),
            (self.kl >= 0, f"kl: got {self.kl}, expected a number >= 0"),
            (self.a_max > 0, f"a_max: got {self.a_max}, expected a number > 0"),
            (self.eta is None or 0 <= self.eta < 1, f"eta: got {self.eta}, expected a number in [0, 1), or null"),
            (self.decay in (0, 1, 2), f"decay: got {self.decay}, expected 0, 1 or 2"),
            (
                1 <= self.timesteps <= self.rollout_steps,
                f"timesteps: got {self.timesteps}, expected 1 .. rollout_steps = {self.rollout_steps}",
            ),
            (
                self.inner_updates >= 1 and self.timesteps % max(1, self.inner_updates) == 0,
                f"updates: got {self.inner_updates}, expected a divisor of timesteps = {self.timesteps}",
            ),
        )
        found += [message for fine, message in checks if not fine]
        ladder = ladder_of(card)
        if ladder is not None:
            found.append(
                f"card {card.name!r} samples on the ladder {ladder} alone, method {self.name} rolls out along a whole "
                "trajectory; train the card that it was distilled from"
            )
        return found

    def rollout_plan(self, batch: Sequence[Any], step: int, *, seed: int, world: World) -> RolloutPlan:
        share = world.share(len(batch), "batch_size")
        groups = range(*share.indices(len(batch)))
        prompts = [batch[g].text for g in groups for _ in range(self.samples)]
        seeds = rollout_seeds(seed, step, groups, self.samples)
        requests = rollout_requests(
            prompts, seeds, steps=self.rollout_steps, solver=self.solver, guidance=self.guidance
        )
        return RolloutPlan(OLD, requests)

    def updates(self, batch: Sequence[Any], step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: the step's ``batch_size`` prompts, the same list on every rank (text and metadata)."""
        share = ctx.world.share(len(batch), "batch_size")
        groups = range(*share.indices(len(batch)))
        mine = [batch[g] for g in groups for _ in range(self.samples)]
        plan = self.rollout_plan(batch, step, seed=ctx.seed, world=ctx.world)
        sampled = ctx.rollouts.roll_out(plan.requests, role=plan.role, step=step)
        assert sampled.role is not None  # no optimizer moves the old policy
        rollouts, old = stacked(sampled.artifacts), ctx.roles.instance(sampled.role)
        r_N, metrics = self._score(rollouts.videos_NFHWC, mine, share, ctx)
        text_NLD = encode_prompts(ctx.engine, old, rollouts.prompts)
        sigmas_NT = self._timesteps(rollouts.sigmas, step, groups, ctx)
        per_update = self.timesteps // self.inner_updates
        for update in range(self.inner_updates):
            columns = range(update * per_update, (update + 1) * per_update)
            pairs = [(n, c) for c in columns for n in range(len(mine))]
            for start in range(0, len(pairs), self.micro_batch):
                chunk = pairs[start : start + self.micro_batch]
                loss, parts = self._loss(chunk, rollouts.x0_NCTHW, text_NLD, sigmas_NT, r_N, step, groups, ctx, old)
                weight = 1 / len(pairs)
                yield Update(
                    loss=loss * weight,
                    step=start + self.micro_batch >= len(pairs),
                    metrics={name: value * weight / self.inner_updates for name, value in parts.items()},
                )
        yield Update(loss=None, step=False, metrics=metrics)

    def _score(
        self, videos: np.ndarray, mine: Sequence[Any], share: slice, ctx: Context
    ) -> tuple[Tensor, dict[str, float]]:
        """r (N,) of our samples with 0.5 where a reward failed, from advantages over the whole batch of groups."""
        assert ctx.reward is not None
        prompts, metadata = [prompt.text for prompt in mine], [prompt.metadata for prompt in mine]
        scored = score_groups(ctx.reward, videos, prompts, metadata, self.samples, ctx.world)
        advantages_GK, valid_GK = group_advantages(scored.rewards_GK, std=self.advantage_std)
        r_GK = optimality_probability(advantages_GK, a_max=self.a_max)
        r_GK = np.where(valid_GK, r_GK, 0.5)
        metrics = {**scored.metrics, "train/groups_without_signal": float(np.mean(np.all(advantages_GK == 0, axis=1)))}
        r_N = torch.from_numpy(r_GK[share].reshape(-1)).to(ctx.device, torch.float32)
        return r_N, metrics

    def _timesteps(self, sigmas: Tensor, step: int, groups: Sequence[int], ctx: Context) -> Tensor:
        """(N, timesteps) the sampler's sigmas, shuffled for each sample."""
        rows = []
        for group in groups:
            for k in range(self.samples):
                order = torch.randperm(len(sigmas), generator=generator_at(ctx.seed, "timesteps", step, group, k))
                rows.append(sigmas[order[: self.timesteps]])
        return torch.stack(rows).to(ctx.device)

    def _loss(
        self,
        pairs: Sequence[tuple[int, int]],
        x0_NCTHW: Tensor,
        text_NLD: Tensor,
        sigmas_NT: Tensor,
        r_N: Tensor,
        step: int,
        groups: Sequence[int],
        ctx: Context,
        old: ModelInstance,
    ) -> tuple[Tensor, dict[str, float]]:
        """Sum of the losses of (sample, timestep) pairs, and the sums of its parts."""
        rows = torch.tensor([n for n, _ in pairs], device=ctx.device)
        x0, text, r_B = x0_NCTHW[rows], text_NLD[rows], r_N[rows]
        sigma_B = sigmas_NT[rows, torch.tensor([c for _, c in pairs], device=ctx.device)]
        noise = torch.stack(
            [
                noise_like(x0_NCTHW[n], ctx.seed, "nft", step, groups[n // self.samples], n % self.samples, c)
                for n, c in pairs
            ]
        )
        x_t = add_noise(x0, noise, expand_to(sigma_B, x0))
        v_old = velocity(old, x_t, sigma_B, text, gradient=False)
        v_theta = velocity(ctx.roles.instance(STUDENT), x_t, sigma_B, text, gradient=True)
        policy_B = nft_loss(v_theta, v_old, x_t, x0, sigma_B, r_B, mix=self.mix, a_max=self.a_max)
        moved = (v_theta.detach() - v_old).square().flatten(1).mean(1)
        parts = {
            "train/policy_loss": policy_B.detach().sum().item(),
            "train/old_distance": moved.sum().item(),
        }
        total = policy_B.sum()
        if self.kl > 0:
            v_ref = velocity(ctx.roles.instance(REFERENCE), x_t, sigma_B, text, gradient=False)
            kl_B = (v_theta - v_ref).square().flatten(1).mean(1)
            total = total + self.kl * kl_B.sum()
            parts["train/kl"] = kl_B.detach().sum().item()
        parts["train/loss"] = total.detach().item()
        return total, parts

    def after_step(self, step: int, optimizer_steps: int, ctx: Context) -> dict[str, float]:
        """The old policy follows the student."""
        eta = old_policy_decay(self.decay, optimizer_steps) if self.eta is None else self.eta
        ctx.roles.blend(OLD, eta)
        return {"train/old_decay": eta}
