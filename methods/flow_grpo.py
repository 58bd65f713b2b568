"""flow_grpo: Flow-GRPO, online RL of a flow model by the policy gradient of its sampler (arXiv 2505.05470).

An iteration: the student rolls out K samples a prompt with noise in its steps; rewards become group advantages; every
noisy step of a kept sample is a decision whose log-prob PPO's clipped loss raises or lowers. Few steps are enough to
learn from (denoising reduction): rollouts have ``rollout_steps``, evaluation has the card's own number.

Legend: G prompts (groups), K samples a group, N = G K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from cards.card import ModelCard
from cards.errors import UserError
from inference.parity.interleave import GateReport
from inference.plain_request import plain_task
from inference.request import Request
from inference.resolve import resolve
from loops.loop import SDE, Profile
from methods.advantages import StdScope, drop_zero_groups, group_advantages
from methods.method import Context, Method, Update
from methods.rewards.scoring import score_groups
from methods.roles import REFERENCE, STUDENT
from methods.rollout import RolloutPlan, rollout_seeds
from methods.sde_policy import PathLoss, Paths, log_prob_gate, path_updates
from methods.world import World

GATE_PROMPT = "a red circle moves left"
"""Of the C2 gate's seeded request."""


class FlowGRPO(Method):
    """Flow-GRPO. ``batch_size`` counts prompts (groups) an iteration.

    Args:
        samples: K, samples a prompt.
        rollout_steps: of the rollouts' sampler, Euler with noise.
        guidance: of the rollouts; above 1 both branches are evaluated and trained.
        sde: ``flow`` | ``dance`` | ``cps``.
        level: a, how much noise.
        window: [start, stop) steps with noise, the others follow the ODE; None: all.
        same_latent: the samples of a prompt start at the same latents: what sets them apart are the noisy steps alone,
            which are what is trained. Else each starts at its own.
        clip_range: eps of PPO's clip; log-probs are means over dims, so that it is small.
        kl: weight of the exact KL divergence from the base; 0 has no reference role.
        a_max: bound of the advantages.
        advantage_std: ``batch`` | ``group``.
        updates: optimizer steps an iteration; each sees every sample at ``timesteps / updates`` of its noisy steps.
        timesteps: noisy steps trained on, per iteration; None: all.
    """

    name = "flow_grpo"
    needs_reward = True
    rolls_out = True

    def __init__(
        self,
        *,
        samples: int = 8,
        rollout_steps: int = 10,
        guidance: float = 1.0,
        sde: str = "flow",
        level: float = 0.7,
        window: Sequence[int] | None = None,
        same_latent: bool = False,
        clip_range: float = 1e-3,
        kl: float = 0.0,
        a_max: float = 5.0,
        advantage_std: Literal["batch", "group"] = "batch",
        updates: int = 1,
        timesteps: int | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        self.samples = samples
        self.rollout_steps = rollout_steps
        self.guidance = guidance
        steps: Any = tuple(window) if isinstance(window, list) else window
        self.sde = SDE(sde, level, steps)
        self.same_latent = same_latent
        self.advantage_std = advantage_std
        self.path_loss = PathLoss(
            clip_range=clip_range,
            kl=kl,
            a_max=a_max,
            updates=updates,
            timesteps=timesteps,
            micro_batch=self.micro_batch,
        )

    def roles(self) -> tuple[str, ...]:
        return (REFERENCE,) if self.path_loss.kl > 0 else ()

    def optimizer_steps(self) -> int:
        return self.steps * self.path_loss.updates

    def rollout_guidance(self) -> float:
        return self.guidance

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        loss = self.path_loss
        checks = (
            (self.samples >= 2, f"samples: got {self.samples}, expected at least 2 (advantages compare them)"),
            (loss.clip_range > 0, f"clip_range: got {loss.clip_range}, expected a number > 0"),
            (loss.kl >= 0, f"kl: got {loss.kl}, expected a number >= 0"),
            (loss.a_max > 0, f"a_max: got {loss.a_max}, expected a number > 0"),
            (
                self.advantage_std in get_args(StdScope),
                f"advantage_std: got {self.advantage_std!r}, expected one of {', '.join(get_args(StdScope))}",
            ),
            (
                self.guidance <= 1 or loss.updates == 1,
                f"updates: got {loss.updates} with guidance={self.guidance}, expected 1: a guided policy moves too far "
                "to be updated twice on the same rollouts",
            ),
        )
        found += [message for fine, message in checks if not fine]
        found += self._step_problems()
        if not card.programs[plain_task(card)].inputs:  # else there is nothing to ask with, which is said already
            try:
                resolve(self._request("", 0), card)
            except UserError as error:
                found.append(f"method {self.name}: its rollouts cannot run on card {card.name!r}: {error}")
        return found

    def _step_problems(self) -> list[str]:
        """What is wrong with how many noisy steps are trained on; a wrong window is the request's to tell."""
        loss = self.path_loss
        try:
            noisy = len(self.sde.steps(self.rollout_steps))
        except TypeError:
            return []
        count = noisy if loss.timesteps is None else loss.timesteps
        if not 1 <= count <= noisy:
            return [f"timesteps: got {loss.timesteps}, expected 1 .. {noisy}, the rollouts' steps with noise"]
        if loss.updates < 1 or count % loss.updates:
            return [f"updates: got {loss.updates}, expected a divisor of the {count} steps that are trained on"]
        return []

    def _request(self, prompt: str, seed: int) -> Request:
        return Request(
            prompt=prompt,
            seed=seed,
            steps=self.rollout_steps,
            solver="euler",
            guidance=self.guidance,
            sde=self.sde,
            profile=Profile.ROLLOUT,
        )

    def rollout_plan(self, batch: Sequence[Any], step: int, *, seed: int, world: World) -> RolloutPlan:
        share = world.share(len(batch), "batch_size")
        groups = range(*share.indices(len(batch)))
        prompts = [batch[g].text for g in groups for _ in range(self.samples)]
        seeds = rollout_seeds(seed, step, groups, self.samples)
        requests = tuple(map(self._request, prompts, seeds))
        if self.same_latent:
            requests = tuple(
                replace(request, seed=seeds[i - i % self.samples], sde=replace(self.sde, seed=request.seed))
                for i, request in enumerate(requests)
            )
        return RolloutPlan(STUDENT, requests)

    def gates(self, ctx: Context) -> dict[str, GateReport]:
        return {"c2_log_prob": log_prob_gate(ctx.roles.instance(STUDENT), self._request(GATE_PROMPT, ctx.seed))}

    def updates(self, batch: Sequence[Any], step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: the step's ``batch_size`` prompts, the same list on every rank (text and metadata)."""
        assert ctx.reward is not None
        share = ctx.world.share(len(batch), "batch_size")
        mine = [prompt for prompt in batch[share] for _ in range(self.samples)]
        plan = self.rollout_plan(batch, step, seed=ctx.seed, world=ctx.world)
        sampled = ctx.rollouts.roll_out(plan.requests, role=plan.role, step=step)
        scored = score_groups(
            ctx.reward,
            np.stack([artifact.frames_FHWC() for artifact in sampled.artifacts]),
            [prompt.text for prompt in mine],
            [prompt.metadata for prompt in mine],
            self.samples,
            ctx.world,
        )
        advantages_GK, valid_GK = group_advantages(scored.rewards_GK, std=self.advantage_std)
        signal_G = drop_zero_groups(advantages_GK)
        keep_GK = valid_GK & signal_G[:, None]
        yield from path_updates(
            Paths.of(sampled.artifacts),
            advantages_GK[share].reshape(-1),
            keep_GK[share].reshape(-1),
            self.path_loss,
            student=ctx.roles.instance(STUDENT),
            reference=ctx.roles.instance(REFERENCE) if self.path_loss.kl > 0 else None,
            world=ctx.world,
            address=(ctx.seed, step),
            off_policy=sampled.version != step,
        )
        metrics = {**scored.metrics, "train/groups_without_signal": float(np.mean(~signal_G))}
        yield Update(loss=None, step=False, metrics=metrics)
