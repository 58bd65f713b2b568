"""unirl: a prompt refiner and a generator under one reward (UniRL-Zero, arXiv 2510.17937; PromptRL, arXiv 2602.01382).

An iteration: of n samples an instruction, m are made of its own words and n - m of the language model's rewrites, drawn
at temperature 1. The reward sees the ORIGINAL instruction; a format reward of the rewrite is added to it. All n samples
share one advantage, which trains the language model on the tokens of its rewrites (``methods.token_policy``) and the
generator on the noisy steps of all samples (``methods.sde_policy``). No gradient crosses between the two, and each has
an optimizer of its own.

Written for experts by name, so that ``methods.joint_rl``, with several refiners, builds on it: :meth:`UniRL.credits`
says what advantage each of them gets.

Legend: G prompts (groups) of all ranks, K = n samples a group, N samples of this rank, group-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from cards.program import Node
from inference.artifact import Artifact
from inference.parity.interleave import GateReport
from inference.plain_request import plain_task
from inference.request import Request
from inference.resolve import refine_nodes
from loops.loop import SDE, Profile
from loops.sde import SDE_KINDS
from loops.solvers import SOLVERS
from methods.advantages import StdScope, drop_zero_groups, group_advantages
from methods.method import Context, Method, OptimizerSpec, Update
from methods.rewards.reward import mean_known
from methods.rewards.scoring import GroupRewards, score_groups
from methods.rewrites import Format, make_format
from methods.roles import REFERENCE, STUDENT, Roles
from methods.rollout import RolloutPlan, Sampled, rollout_seeds
from methods.sde_policy import PathLoss, Paths, log_prob_gate, path_updates
from methods.token_policy import TokenLoss, token_gate, token_updates
from methods.world import World

Mode = Literal["joint", "prompt_only", "generator_only"]
GATE_PROMPT = "a red circle moves left"
GATE_STEPS = 4


@dataclass(frozen=True)
class Credit:
    """What one expert learns from."""

    advantages_GK: NDArray[np.float64]
    valid_GK: NDArray[np.bool_]
    """False where the reward failed."""


class UniRL(Method):
    """See the module's docstring. ``batch_size`` counts prompts (groups) an iteration; ``lr``, ``clip`` and ``lora``
    are the generator's, ``betas`` and ``weight_decay`` everyone's.

    Args:
        mode: ``joint`` | ``prompt_only``, where the generator stays as it is and samples by its ODE |
            ``generator_only``, where the language model does.
        samples: n, samples a prompt.
        num_skip_refinement: m of them that use the prompt's own words; 0 refines all.
        temperature: of the rewrites in training.
        max_tokens: of a rewrite; None takes the card's.
        format: ``caption`` | ``ended`` | the dotted path of a function of the text, see ``methods.rewrites``.
        format_weight: of the format reward {0, 1}; originals get the mean of their group's rewrites.
        advantage_std: ``group`` | ``batch``.
        a_max: bound of the advantages.
        lm_lr, lm_clip: of the language model.
        lm_kl: weight of k3 against the language model that the run started from; 0 keeps no reference.
        lm_micro_batch: texts a forward.
        rollout_steps, solver, guidance: of the rollouts; noisy steps ask for euler.
        sde, level: kind and noise level a of the generator's noisy steps.
        num_sde: how many of its first steps are noisy, and trained.
        clip_range, kl, updates: of PPO on these, see ``methods.sde_policy.PathLoss``.
    """

    name = "unirl"
    needs_reward = True
    rolls_out = True
    refiners: tuple[str, ...] = ("llm",)
    """Components of the card that rewrite prompts, each by a node of its own; optimizers go by these names."""
    remedy = "use card=unified"
    """For a card that has others."""

    def __init__(
        self,
        *,
        lm_lr: float,
        mode: Mode = "joint",
        samples: int = 8,
        num_skip_refinement: int = 2,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        format: str = "caption",
        format_weight: float = 1.0,
        advantage_std: StdScope = "group",
        a_max: float = 5.0,
        lm_clip: float | None = 1.0,
        lm_kl: float = 0.01,
        lm_micro_batch: int = 64,
        rollout_steps: int = 10,
        solver: str = "euler",
        guidance: float = 1.0,
        sde: str = "flow",
        level: float = 0.8,
        num_sde: int = 4,
        clip_range: float = 1e-3,
        kl: float = 0.0,
        updates: int = 1,
        **common: Any,
    ):
        super().__init__(**common)
        if mode not in get_args(Mode):
            raise unknown_name("method mode", str(mode), get_args(Mode))
        if not lm_lr >= 0:
            raise UserError(f"method lm_lr: got {lm_lr}, expected a number >= 0")
        self.mode = mode
        self.samples = samples
        self.num_skip_refinement = num_skip_refinement
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.format = make_format(format)
        self.format_weight = format_weight
        self.advantage_std = advantage_std
        self.a_max = a_max
        self.lm_lr = lm_lr
        self.lm_clip = lm_clip
        self.lm_kl = lm_kl
        self.lm_micro_batch = lm_micro_batch
        self.rollout_steps = rollout_steps
        self.solver = solver
        self.guidance = guidance
        self.sde = sde
        self.level = level
        self.num_sde = num_sde
        self.clip_range = clip_range
        self.kl = kl
        self.inner_updates = updates

    # -- what a run is made of

    @property
    def trains_generator(self) -> bool:
        return self.mode != "prompt_only"

    @property
    def trained_refiners(self) -> tuple[str, ...]:
        return () if self.mode == "generator_only" else self.refiners

    def roles(self) -> tuple[str, ...]:
        return (REFERENCE,) if self.trains_generator and self.kl > 0 else ()

    def optimizer_steps(self) -> int:
        return self.steps * (self.inner_updates if self.trains_generator else 1)

    def optimizers(self) -> dict[str, OptimizerSpec]:
        generator = super().optimizers() if self.trains_generator else {}
        models = {
            component: OptimizerSpec(
                self.rate_of(component), self.betas, self.weight_decay, self.lm_clip, steps=self.steps
            )
            for component in self.trained_refiners
        }
        return {**generator, **models}

    def rate_of(self, component: str) -> float:
        """Learning rate of a refiner."""
        return self.lm_lr

    def format_of(self, component: str) -> Format:
        """What a refiner's texts are asked to look like."""
        return self.format

    def attach_heads(self, roles: Roles) -> None:
        for component in self.trained_refiners:
            roles.join(component, apart=True, roles=(REFERENCE,) if self.lm_kl > 0 else ())

    def rollout_guidance(self) -> float:
        return self.guidance

    def token_batches(self, card: ModelCard) -> dict[str, tuple[int, int]]:
        assert card.sampling.text is not None
        drawn = card.sampling.text.max_tokens if self.max_tokens is None else self.max_tokens
        # An instruction is hardly longer than its rewrite may be.
        tokens = min(2 * drawn, card.sampling.text.context)
        return dict.fromkeys(self.trained_refiners, (self.lm_micro_batch, tokens))

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        n, m = self.samples, self.num_skip_refinement
        most = n if self.mode == "generator_only" else n - 1
        checks = (
            (n >= 2, f"samples: got {n}, expected at least 2 (advantages compare them)"),
            (
                0 <= m <= most,
                f"num_skip_refinement: got {m}, expected 0 .. {most} with samples={n} and mode={self.mode}",
            ),
            (self.temperature > 0, f"temperature: got {self.temperature}, expected a number > 0 (0 draws nothing)"),
            (
                self.max_tokens is None or self.max_tokens >= 1,
                f"max_tokens: got {self.max_tokens}, expected at least 1",
            ),
            (self.format_weight >= 0, f"format_weight: got {self.format_weight}, expected a number >= 0"),
            (self.lm_kl >= 0, f"lm_kl: got {self.lm_kl}, expected a number >= 0"),
            (self.kl >= 0, f"kl: got {self.kl}, expected a number >= 0"),
            (self.a_max > 0, f"a_max: got {self.a_max}, expected a number > 0"),
            (self.lm_micro_batch >= 1, f"lm_micro_batch: got {self.lm_micro_batch}, expected at least 1"),
            (
                self.advantage_std in get_args(StdScope),
                f"advantage_std: got {self.advantage_std!r}, expected one of {', '.join(get_args(StdScope))}",
            ),
            (self.solver in SOLVERS, f"solver: got {self.solver!r}, expected one of {', '.join(sorted(SOLVERS))}"),
            (
                self.trains_generator or self.lora is None,
                "lora: adapts the generator, which mode=prompt_only leaves as it is; use lora=null",
            ),
        )
        found += [message for fine, message in checks if not fine]
        return found + (self._sde_problems() if self.trains_generator else []) + self._card_problems(card)

    def _sde_problems(self) -> list[str]:
        highest = 1.0 if self.sde == "cps" else float("inf")
        checks = (
            (self.sde in SDE_KINDS, f"sde: got {self.sde!r}, expected one of {', '.join(SDE_KINDS)}"),
            (
                0 < self.level <= highest,
                f"level: got {self.level}, expected a number > 0, at most {highest}",
            ),
            (self.solver == "euler", f"solver: got {self.solver!r}, expected euler, whose steps take noise"),
            (
                1 <= self.num_sde <= self.rollout_steps,
                f"num_sde: got {self.num_sde}, expected 1 .. rollout_steps = {self.rollout_steps}",
            ),
            (self.clip_range > 0, f"clip_range: got {self.clip_range}, expected a number > 0"),
            (
                self.inner_updates >= 1 and self.num_sde % max(1, self.inner_updates) == 0,
                f"updates: got {self.inner_updates}, expected a divisor of num_sde = {self.num_sde}",
            ),
        )
        return [message for fine, message in checks if not fine]

    def _card_problems(self, card: ModelCard) -> list[str]:
        """What is missing of the refiners that the method trains."""
        nodes = refiners_of(card)
        if tuple(nodes.values()) != self.refiners:
            return [
                f"card {card.name!r} has {', '.join(nodes.values()) or 'no language model'} to rewrite prompts, "
                f"expected {', '.join(self.refiners)}; {self.remedy}"
            ]
        if not all(card.loops[node].options.get("behaviour", False) for node in loops_of(card)):
            return [
                f"card {card.name!r}: its refinement keeps no log-probs of a rollout; set the loop option behaviour"
            ]
        return []

    def gates(self, ctx: Context) -> dict[str, GateReport]:
        """The ratio of tokens and of noisy steps, each by itself: 1 to the last bit."""
        student, found = ctx.roles.instance(STUDENT), {}
        base = Request(GATE_PROMPT, seed=ctx.seed, steps=GATE_STEPS, solver="euler", guidance=1.0, output="latents")
        for node, component in refiners_of(student.card).items():
            if component in self.trained_refiners:
                text = self.request(base, refine=True, steps=1)
                found[f"token_ratio_{node}"] = token_gate(student, text, node)
        if self.trains_generator:
            sde = SDE(self.sde, self.level, (0, min(self.num_sde, GATE_STEPS)))
            found["step_ratio"] = log_prob_gate(student, self.request(base, refine=False, sde=sde))
        return found

    # -- an iteration

    def updates(self, batch: Sequence[Any], step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: the step's ``batch_size`` prompts, the same list on every rank (text and metadata)."""
        share = ctx.world.share(len(batch), "batch_size")
        groups = range(*share.indices(len(batch)))
        mine = [batch[g] for g in groups for _ in range(self.samples)]
        plan = self.rollout_plan(batch, step, seed=ctx.seed, world=ctx.world)
        sampled = ctx.rollouts.roll_out(plan.requests, role=plan.role, step=step)
        credits, metrics = self._score(sampled.artifacts, mine, ctx)
        for node, component in refiners_of(ctx.card).items():
            if component in self.trained_refiners:
                yield from self._train_refiner(node, component, sampled, credits[component], share, step, ctx)
        if self.trains_generator:
            yield from self._train_generator(sampled, credits[STUDENT], share, step, ctx)
        yield Update(loss=None, step=False, metrics=metrics)

    def rollout_plan(self, batch: Sequence[Any], step: int, *, seed: int, world: World) -> RolloutPlan:
        """One request for each sample of the groups: of each, the first m keep the prompt's own words."""
        share = world.share(len(batch), "batch_size")
        groups = range(*share.indices(len(batch)))
        prompts = [batch[g].text for g in groups for _ in range(self.samples)]
        seeds = rollout_seeds(seed, step, groups, self.samples)
        sde = SDE(self.sde, self.level, (0, self.num_sde)) if self.trains_generator else None
        base = Request("", steps=self.rollout_steps, solver=self.solver, guidance=self.guidance, sde=sde)
        requests = (
            self.request(base, refine=i % self.samples >= self.num_skip_refinement, prompt=prompt, seed=seed)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        )
        return RolloutPlan(STUDENT, tuple(requests))

    def request(self, base: Request, *, refine: bool, **changes: Any) -> Request:
        """A rollout's request with its prompt as it is, or rewritten at the method's temperature."""
        text: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_tokens": self.max_tokens,
        }
        return replace(base, refine=refine, profile=Profile.ROLLOUT, **(text if refine else {}), **changes)

    def _score(
        self, artifacts: Sequence[Artifact], mine: Sequence[Any], ctx: Context
    ) -> tuple[dict[str, Credit], dict[str, float]]:
        assert ctx.reward is not None
        metadata = [prompt.metadata for prompt in mine]
        videos = np.stack([artifact.frames_FHWC() for artifact in artifacts])
        scored = score_groups(ctx.reward, videos, [prompt.text for prompt in mine], metadata, self.samples, ctx.world)
        seen = {
            name: ctx.world.gather(values.reshape(-1, self.samples))
            for name, values in self.observed(artifacts, metadata).items()
        }
        task_GK, m = scored.rewards_GK, self.num_skip_refinement
        metrics = dict(scored.metrics)
        for name, columns in (("original", task_GK[:, :m]), ("refined", task_GK[:, m:])):
            if columns.size:
                metrics[f"reward/{name}"] = mean_known(columns)
        if m < self.samples:
            metrics |= {name: mean_known(table_GK) for name, table_GK in seen.items()}
        credits = self.credits(scored, seen, ctx)
        metrics["train/groups_without_signal"] = float(
            np.mean(~drop_zero_groups(np.concatenate([c.advantages_GK for c in credits.values()])))
        )
        return credits, metrics

    def observed(self, artifacts: Sequence[Artifact], metadata: Sequence[Any]) -> dict[str, NDArray[np.float64]]:
        """Of the rewrites: their format, its mean where there are several, and the meaning of the last; NaN for a
        prompt in its own words."""
        formats, meanings = self.formats(artifacts), np.full(len(artifacts), np.nan)
        for i, artifact in enumerate(artifacts):
            if artifact.refined is not None:
                meanings[i] = self.format.keeps_meaning(artifact.refined, metadata[i])
        return {"refine/format": np.mean(list(formats.values()), axis=0), "refine/meaning": meanings}

    def formats(self, artifacts: Sequence[Artifact]) -> dict[str, NDArray[np.float64]]:
        """Refiner -> format reward of its texts, NaN for a prompt in its own words."""
        table = np.full((len(self.refiners), len(artifacts)), np.nan)
        for i, artifact in enumerate(artifacts):
            if artifact.refined is not None:
                texts = zip(self.refiners, artifact.completions.values(), strict=True)
                table[:, i] = [self.format_of(component).reward(text) for component, text in texts]
        return dict(zip(self.refiners, table, strict=True))

    def total(self, task_GK: NDArray[np.float64], format_GK: NDArray[np.float64]) -> NDArray[np.float64]:
        """R = task + weight * format; originals get the mean format of their group's rewrites."""
        rewritten = format_GK[:, self.num_skip_refinement :]
        mean_G1 = rewritten.mean(1, keepdims=True) if rewritten.size else np.zeros((len(format_GK), 1))
        return task_GK + self.format_weight * np.where(np.isnan(format_GK), mean_G1, format_GK)

    def credits(self, scored: GroupRewards, seen: Mapping[str, NDArray[np.float64]], ctx: Context) -> dict[str, Credit]:
        """Expert (a refiner's component or the student) -> what it learns from.

        ``seen``: the tables (G, K) of :meth:`observed`, of all ranks."""
        return self.credit(self.total(scored.rewards_GK, seen["refine/format"]), ctx)

    def credit(self, rewards_GK: NDArray[np.float64], ctx: Context) -> dict[str, Credit]:
        """One advantage for all."""
        shared = Credit(*group_advantages(rewards_GK, std=self.advantage_std))
        return dict.fromkeys((*self.refiners, STUDENT), shared)

    def _train_refiner(
        self, node: str, component: str, sampled: Sampled, credit: Credit, share: slice, step: int, ctx: Context
    ) -> Iterator[Update]:
        """On the tokens of the rewrites alone."""
        rewrites = [i for i, artifact in enumerate(sampled.artifacts) if node in artifact.tokens]
        yield from token_updates(
            [sampled.artifacts[i].tokens[node] for i in rewrites],
            credit.advantages_GK[share].reshape(-1)[rewrites],
            credit.valid_GK[share].reshape(-1)[rewrites],
            TokenLoss(kl=self.lm_kl, a_max=self.a_max, micro_batch=self.lm_micro_batch),
            component=component,
            student=ctx.roles.instance(STUDENT),
            reference=ctx.roles.instance(REFERENCE) if self.lm_kl > 0 else None,
            world=ctx.world,
            optimizer=component,
            off_policy=sampled.version < step,
            log_as="lm" if len(self.refiners) == 1 else component,
        )

    def _train_generator(
        self, sampled: Sampled, credit: Credit, share: slice, step: int, ctx: Context
    ) -> Iterator[Update]:
        """On the noisy steps of all samples, but for those of groups that all scored alike."""
        told_G = drop_zero_groups(credit.advantages_GK)
        yield from path_updates(
            Paths.of(sampled.artifacts),
            credit.advantages_GK[share].reshape(-1),
            (credit.valid_GK & told_G[:, None])[share].reshape(-1),
            PathLoss(
                clip_range=self.clip_range,
                kl=self.kl,
                a_max=self.a_max,
                updates=self.inner_updates,
                micro_batch=self.micro_batch,
            ),
            student=ctx.roles.instance(STUDENT),
            reference=ctx.roles.instance(REFERENCE) if self.kl > 0 else None,
            world=ctx.world,
            address=(ctx.seed, self.name, step),
            off_policy=sampled.version < step,
        )


def _refining(card: ModelCard) -> list[Node]:
    task = plain_task(card)
    return [node for node in card.programs[task].nodes if node.id in refine_nodes(card, task)]


def loops_of(card: ModelCard) -> list[str]:
    """Ids of the loops that rewrite a plain request's prompt."""
    return [node.loop for node in _refining(card) if node.loop is not None]


def refiners_of(card: ModelCard) -> dict[str, str]:
    """Node that rewrites a plain request's prompt -> its language model's component, in order."""
    return {node.id: card.loops[node.loop].components["lm"] for node in _refining(card) if node.loop is not None}
