"""rft: best-of-N and rejection-sampling finetune (RAFT, Dong et al. 2023, arXiv 2304.06767).

An iteration: the policy rolls out N samples a prompt; a reward says which are kept; the student is finetuned on those
by flow matching, as ``methods.finetune`` does on clips. Nothing is pushed away and nothing holds the student near its
base: it can only become more like the best of what the policy already draws.

Legend: G prompts (groups) of all processes, K samples a group, N = samples of this process, B rows of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from cards.card import ModelCard
from cards.errors import unknown_name
from loops.solvers import SOLVERS
from methods.finetune import Finetune
from methods.ladder import ladder_of
from methods.method import Context, Update
from methods.rewards.scoring import score_groups
from methods.roles import OLD, STUDENT
from methods.rollout import RolloutPlan, rollout_requests, rollout_seeds, stacked
from methods.world import World

Keep = Literal["best", "top", "threshold"]


def kept_mask(
    rewards_GK: ArrayLike, *, keep: Keep, best: int = 1, share: float = 0.1, threshold: float = 0.0
) -> NDArray[np.bool_]:
    """Mask (G, K) of the samples that are finetuned on; one that failed to score is never among them.

    best: the ``best`` highest of each group. top: the ``share`` of all scored samples with the highest rewards, at
    least one. threshold: every sample whose reward is at least ``threshold``. Of equal rewards the earlier are kept.

    ``best`` and ``top`` compare, so they keep nothing where there is nothing to compare: in a group (a step, for
    ``top``) with fewer than two scored samples, or whose rewards are all equal.
    """
    rewards_GK = np.asarray(rewards_GK, dtype=np.float64)
    valid_GK = np.isfinite(rewards_GK)
    if keep == "threshold":
        return valid_GK & (np.where(valid_GK, rewards_GK, -np.inf) >= threshold)
    if keep == "top":
        count = max(1, math.ceil(round(share * int(valid_GK.sum()), 9)))
        return _highest(rewards_GK.reshape(-1), count).reshape(rewards_GK.shape)
    if keep == "best":
        return np.stack([_highest(rewards_K, best) for rewards_K in rewards_GK])
    raise unknown_name("keep of method rft", str(keep), get_args(Keep))


def _highest(rewards: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The ``count`` highest of a comparison; none where it has fewer than two different rewards."""
    kept = np.zeros(rewards.shape, dtype=bool)
    known = np.flatnonzero(np.isfinite(rewards))
    if np.unique(rewards[known]).size >= 2:
        kept[known[np.argsort(-rewards[known], kind="stable")[:count]]] = True
    return kept


class RFT(Finetune):
    """Rejection-sampling finetune. ``batch_size`` counts prompts (groups) an iteration.

    Args:
        samples: K, samples a prompt.
        rollout_steps, solver, guidance: of the rollouts.
        keep: ``best`` | ``top`` | ``threshold``, see :func:`kept_mask`, with ``best``, ``share`` and ``threshold``.
        eta: the policy follows the student as old <- eta old + (1 - eta) student after every iteration; 0 rolls out
            with the student itself and has no old policy.
        updates: optimizer steps an iteration, each on all that was kept.
        draws: noise levels, and as many noises, that a kept sample is trained at in each of them.
        sampler, logit_mean, logit_std, shift, weighting, caption_dropout: as ``finetune``'s.
    """

    name = "rft"
    needs_clips = False
    needs_reward = True
    takes_inputs = False
    rolls_out = True

    def __init__(
        self,
        *,
        samples: int = 8,
        rollout_steps: int = 10,
        solver: str = "euler",
        guidance: float = 1.0,
        keep: Keep = "best",
        best: int = 1,
        share: float = 0.1,
        threshold: float = 0.0,
        eta: float = 0.0,
        updates: int = 2,
        draws: int = 8,
        **finetune: Any,
    ):
        super().__init__(**finetune)
        self.samples = samples
        self.rollout_steps = rollout_steps
        self.solver = solver
        self.guidance = guidance
        self.keep = keep
        self.best = best
        self.share = share
        self.threshold = threshold
        self.eta = eta
        self.inner_updates = updates
        self.draws = draws

    def roles(self) -> tuple[str, ...]:
        return (OLD,) if self.eta > 0 else ()

    def optimizer_steps(self) -> int:
        return self.steps * self.inner_updates

    def rollout_guidance(self) -> float:
        return self.guidance

    def cautions(self, card: ModelCard) -> list[str]:
        if card.recipe.method != "diffusion_nft":
            return []
        return [
            f"card {card.name!r} was made by diffusion_nft, whose velocity is not that of the clips it draws: flow "
            "matching on them destroyed such a model within 20 iterations (docs/decisions/0022); start from the card "
            "that diffusion_nft started from"
        ]

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        least = 1 if self.keep == "threshold" else 2
        checks = (
            (self.samples >= least, f"samples: got {self.samples}, expected at least {least} with keep={self.keep}"),
            (self.solver in SOLVERS, f"solver: got {self.solver!r}, expected one of {', '.join(sorted(SOLVERS))}"),
            (self.rollout_steps >= 1, f"rollout_steps: got {self.rollout_steps}, expected at least 1"),
            (self.keep in get_args(Keep), f"keep: got {self.keep!r}, expected one of {', '.join(get_args(Keep))}"),
            (
                self.keep != "best" or 1 <= self.best < self.samples,
                f"best: got {self.best}, expected 1 .. samples - 1 = {self.samples - 1}",
            ),
            (
                self.keep != "top" or 0 < self.share < 1,
                f"share: got {self.share}, expected a number between 0 and 1",
            ),
            (math.isfinite(self.threshold), f"threshold: got {self.threshold}, expected a finite number"),
            (0 <= self.eta < 1, f"eta: got {self.eta}, expected a number in [0, 1)"),
            (self.inner_updates >= 1, f"updates: got {self.inner_updates}, expected at least 1"),
            (self.draws >= 1, f"draws: got {self.draws}, expected at least 1"),
        )
        found += [message for fine, message in checks if not fine]
        ladder = ladder_of(card)
        if ladder is not None:
            found.append(
                f"card {card.name!r} samples on the ladder {ladder} alone, method {self.name} finetunes at every noise "
                "level; train the card that it was distilled from"
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
        return RolloutPlan(OLD if self.eta > 0 else STUDENT, requests)

    def updates(self, batch: Any, step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: the step's ``batch_size`` prompts, the same list on every rank (text and metadata)."""
        assert ctx.reward is not None
        share = ctx.world.share(len(batch), "batch_size")
        mine = [prompt for prompt in batch[share] for _ in range(self.samples)]
        plan = self.rollout_plan(batch, step, seed=ctx.seed, world=ctx.world)
        rollouts = stacked(ctx.rollouts.roll_out(plan.requests, role=plan.role, step=step).artifacts)
        scored = score_groups(
            ctx.reward, rollouts.videos_NFHWC, rollouts.prompts, [p.metadata for p in mine], self.samples, ctx.world
        )
        kept_GK = kept_mask(
            scored.rewards_GK, keep=self.keep, best=self.best, share=self.share, threshold=self.threshold
        )
        total = int(kept_GK.sum())
        if total > 0:
            first = share.start * self.samples
            rows, weight = self._rows(kept_GK, ctx.world)
            for update in range(self.inner_updates):
                for start in range(0, len(rows), self.micro_batch):
                    chunk, part = rows[start : start + self.micro_batch], weight[start : start + self.micro_batch]
                    losses_B = self.losses(
                        rollouts.x0_NCTHW[[n for n, _ in chunk]].to(ctx.device),
                        [rollouts.prompts[n] for n, _ in chunk],
                        [(ctx.seed, "rft", step, update, first + n, draw) for n, draw in chunk],
                        ctx,
                    )
                    loss = (losses_B * torch.tensor(part, device=losses_B.device)).sum()
                    yield Update(
                        loss=loss * ctx.world.size / (total * self.draws),
                        step=start + self.micro_batch >= len(rows),
                        metrics={
                            "train/loss": loss.detach().item()
                            * ctx.world.size
                            / (total * self.draws * self.inner_updates)
                        },
                    )
        kept = scored.rewards_GK[kept_GK]
        metrics = {
            **scored.metrics,
            "train/kept": float(total),
            "train/reward_kept": float(kept.mean()) if total else float("nan"),
            "train/groups_without_signal": float(np.mean(~kept_GK.any(axis=1))),
        }
        yield Update(loss=None, step=False, metrics=metrics)

    def _rows(self, kept_GK: NDArray[np.bool_], world: World) -> tuple[list[tuple[int, int]], list[float]]:
        """(sample, draw) rows of this process and their weights. Every process has as many, since a sharded forward is
        everyone's: one that kept fewer repeats a row of its own with weight 0."""
        kept_RN = kept_GK.reshape(world.size, -1)
        mine = np.flatnonzero(kept_RN[world.rank]).tolist()
        rows = [(n, draw) for draw in range(self.draws) for n in mine]
        short = self.draws * int(kept_RN.sum(axis=1).max()) - len(rows)
        fill = rows[0] if rows else (0, 0)
        return rows + [fill] * short, [1.0] * len(rows) + [0.0] * short

    def after_step(self, step: int, optimizer_steps: int, ctx: Context) -> dict[str, float]:
        """The old policy follows the student."""
        if self.eta > 0:
            ctx.roles.blend(OLD, self.eta)
        return {}
