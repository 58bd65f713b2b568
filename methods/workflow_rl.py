"""workflow_rl: RL through two models. One makes a picture of a prompt, the other a clip of the picture; the clip alone
is rewarded, and the reward trains the model of the pictures and, if wanted, that of the clips.

An iteration: K chains a prompt through one engine; a model that is trained samples with noise in its steps and keeps
its path, another follows the ODE; the clips' rewards become group advantages, which every model's noisy steps share;
then PPO's clipped loss on the steps of each trained model, by an optimizer of its own (Flow-GRPO, arXiv 2505.05470,
twice). Each model's weights have a version of their own. Where all rewards are equal nothing moves at all.

Legend: G prompts (groups), K chains a group, N = G K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from cards.card import ModelCard
from cards.errors import UserError
from cards.registry import family
from inference.image_video import Film, image_card, pair_problems, t2i_i2v
from inference.parity.behaviour import behaviour_gate
from inference.parity.interleave import GateReport
from inference.plain_request import plain_inputs, plain_task
from inference.request import Request
from inference.resolve import resolve
from inference.workflow import Ask
from loops.loop import SDE, Profile
from methods.advantages import StdScope, drop_zero_groups, group_advantages
from methods.method import Context, Method, OptimizerSpec, Update
from methods.random import address_seed
from methods.rewards.reward import RewardBatch
from methods.rewards.scoring import score_groups
from methods.roles import REFERENCE, STUDENT
from methods.rollout import rollout_seeds
from methods.sde_policy import PathLoss, Paths, log_prob_gate, path_updates
from methods.shapeworld.heldout import EVAL_SET
from methods.teacher import PLACE, known_keys

SECOND = "second"
"""Role of the model that makes clips."""
GATE_PROMPT = "a red circle moves left"
"""Of the C2 gates' seeded requests."""


class WorkflowRL(Method):
    """RL of a chain of two models; the run's card makes the pictures. ``batch_size`` counts prompts an iteration.

    Args:
        second: the card that makes clips of the pictures: {name, size, source, revision}. Pictures have the size of
            its clips.
        second_lr: of the second model; None leaves it as it is, and it then follows the ODE.
        second_clip: largest norm of its gradient.
        samples: K, chains a prompt. Of a second model that is not trained all have one noise, so that they differ by
            their pictures alone.
        rollout_steps, second_steps: Euler steps of the rollouts.
        guidance, second_guidance: of rollouts and evaluation.
        sde, level: noise of a trained model's steps: ``flow`` | ``dance`` | ``cps``, and how much (a).
        window: [start, stop) steps of the first model with noise, the others follow the ODE; None: all.
        clip_range: eps of PPO's clip.
        kl: weight of the exact KL divergence of the first model from what it started as; 0 has no reference role.
        a_max: bound of the advantages.
        advantage_std: ``batch`` | ``group``.
        updates: optimizer steps of each trained model an iteration, each on ``timesteps / updates`` noisy steps of
            every sample.
        timesteps: noisy steps of each trained model that are trained on, per iteration; None: all.
        films: chains that an evaluation makes, of ShapeWorld's evaluation prompts, by the cards' own solvers and steps,
            judged by the run's reward; 0 makes none.
    """

    name = "workflow_rl"
    needs_reward = True
    judges_itself = True

    def __init__(
        self,
        *,
        second: Mapping[str, Any],
        second_lr: float | None = None,
        second_clip: float | None = 1.0,
        samples: int = 8,
        rollout_steps: int = 8,
        second_steps: int = 8,
        guidance: float = 1.0,
        second_guidance: float = 1.0,
        sde: str = "flow",
        level: float = 0.7,
        window: Sequence[int] | None = None,
        clip_range: float = 1e-3,
        kl: float = 0.0,
        a_max: float = 5.0,
        advantage_std: Literal["batch", "group"] = "batch",
        updates: int = 1,
        timesteps: int | None = None,
        films: int = 64,
        **common: Any,
    ):
        super().__init__(**common)
        self.second = {"source": None, "revision": None, **known_keys("second", second, ("name", "size"), PLACE)}
        self.second_lr = second_lr
        self.second_clip = second_clip
        self.samples = samples
        self.rollout_steps = rollout_steps
        self.second_steps = second_steps
        self.guidance = guidance
        self.second_guidance = second_guidance
        steps: Any = tuple(window) if isinstance(window, list) else window
        self.sde = SDE(sde, level, steps)
        self.advantage_std = advantage_std
        self.films = films
        self.path_loss = PathLoss(
            clip_range=clip_range,
            kl=kl,
            a_max=a_max,
            updates=updates,
            timesteps=timesteps,
            micro_batch=self.micro_batch,
        )

    # -- what a run is made of

    @property
    def trains_second(self) -> bool:
        return self.second_lr is not None

    def roles(self) -> tuple[str, ...]:
        return (SECOND, REFERENCE) if self.path_loss.kl > 0 else (SECOND,)

    def optimizer_steps(self) -> int:
        return self.steps * self.path_loss.updates

    def optimizers(self) -> dict[str, OptimizerSpec]:
        first = super().optimizers()
        if self.second_lr is None:
            return first
        spec = OptimizerSpec(
            self.second_lr, self.betas, self.weight_decay, self.second_clip, steps=self.optimizer_steps()
        )
        return {**first, SECOND: spec}

    def rollout_guidance(self) -> float:
        return self.guidance

    def derive_card(self, card: ModelCard) -> ModelCard:
        """The card of pictures: one frame of the size of the clips."""
        return image_card(card, self._second_card(card))

    def role_cards(self, card: ModelCard) -> dict[str, ModelCard]:
        return {SECOND: self._second_card(card)}

    def _second_card(self, card: ModelCard) -> ModelCard:
        chosen = self.second
        second = family(chosen["name"]).card(str(chosen["size"]), chosen["source"], chosen["revision"])
        loops = {
            name: loop.model_copy(
                update={"guidance": loop.guidance.model_copy(update={"scale": float(self.second_guidance)})}
            )
            for name, loop in second.loops.items()
        }
        second = second.model_copy(update={"precision": card.precision, "loops": loops})
        second.validate()
        return second

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        loss, rate = self.path_loss, self.second_lr
        guided = self.guidance > 1 or (self.trains_second and self.second_guidance > 1)
        checks = (
            (self.samples >= 2, f"samples: got {self.samples}, expected at least 2 (advantages compare them)"),
            (
                rate is None or rate >= 0,
                f"second_lr: got {rate}, expected a number >= 0, or null to leave it untrained",
            ),
            (loss.clip_range > 0, f"clip_range: got {loss.clip_range}, expected a number > 0"),
            (loss.kl >= 0, f"kl: got {loss.kl}, expected a number >= 0"),
            (loss.a_max > 0, f"a_max: got {loss.a_max}, expected a number > 0"),
            (0 <= self.films <= len(EVAL_SET), f"films: got {self.films}, expected 0 .. {len(EVAL_SET)}"),
            (
                self.advantage_std in get_args(StdScope),
                f"advantage_std: got {self.advantage_std!r}, expected one of {', '.join(get_args(StdScope))}",
            ),
            (
                not guided or loss.updates == 1,
                f"updates: got {loss.updates} with guidance above 1, expected 1: a guided policy moves too far to be "
                "updated twice on the same rollouts",
            ),
        )
        found += [message for fine, message in checks if not fine]
        try:
            second = self._second_card(card)
        except UserError:
            return found  # told where the role's card is built
        pair = pair_problems(card, second)
        return found + pair + ([] if pair else self._request_problems(card, second))

    def _request_problems(self, card: ModelCard, second: ModelCard) -> list[str]:
        """What is wrong with the rollouts' requests, and with how many of their steps are trained on."""
        found = []
        picture, clip = self._requests("", 0, 0, image_card(card, second), second)
        for request, of in ((picture, image_card(card, second)), (replace(clip, inputs=plain_inputs(second)), second)):
            try:
                resolve(request, of)
            except UserError as error:
                found.append(f"method {self.name}: its rollouts cannot run on card {of.name!r}: {error}")
                continue
            if request.sde is None:
                continue
            assert request.steps is not None
            noisy, loss = len(request.sde.steps(request.steps)), self.path_loss
            count = noisy if loss.timesteps is None else loss.timesteps
            if not 1 <= count <= noisy:
                found.append(f"timesteps: got {count}, expected 1 .. {noisy}, the noisy steps of card {of.name!r}")
            elif loss.updates < 1 or count % loss.updates:
                found.append(
                    f"updates: got {loss.updates}, expected a divisor of the {count} steps that are trained on"
                )
        return found

    # -- rollouts

    def _requests(
        self, prompt: str, seed: int, second_seed: int, card: ModelCard, second: ModelCard
    ) -> tuple[Request, Request]:
        """Of a rollout: for the picture, and for the clip, which lacks its first frame."""
        picture = Request(
            prompt=prompt,
            task=plain_task(card),
            seed=seed,
            steps=self.rollout_steps,
            solver="euler",
            guidance=self.guidance,
            sde=self.sde,
            profile=Profile.ROLLOUT,
        )
        clip = Request(
            prompt=prompt,
            task=plain_task(second),
            seed=second_seed,
            steps=self.second_steps,
            solver="euler",
            sde=replace(self.sde, window=None) if self.trains_second else None,
            profile=Profile.ROLLOUT,
        )
        return picture, clip

    def roll_out(self, prompts: Sequence[str], groups: Sequence[int], step: int, ctx: Context) -> list[Film]:
        """``samples`` chains of each prompt of the global ``groups``, group-major."""
        first, second = ctx.roles.instance(STUDENT), ctx.roles.instance(SECOND)
        chained = [prompt for prompt in prompts for _ in range(self.samples)]
        seeds = rollout_seeds(ctx.seed, step, groups, self.samples)
        if self.trains_second:
            seconds = rollout_seeds(address_seed(ctx.seed, SECOND), step, groups, self.samples)
        else:
            seconds = [address_seed(ctx.seed, SECOND, step, group) for group in groups for _ in range(self.samples)]
        chains = []
        for prompt, seed, second_seed in zip(chained, seeds, seconds, strict=True):
            picture, clip = self._requests(prompt, seed, second_seed, first.card, second.card)
            chains.append(t2i_i2v(Ask(picture, first), Ask(clip, second)))
        return ctx.engine.run_workflows(chains)

    # -- an iteration

    def updates(self, batch: Sequence[Any], step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: the step's ``batch_size`` prompts, the same list on every rank (text and metadata)."""
        assert ctx.reward is not None
        share = ctx.world.share(len(batch), "batch_size")
        mine = batch[share]
        films = self.roll_out([prompt.text for prompt in mine], range(*share.indices(len(batch))), step, ctx)
        scored = score_groups(
            ctx.reward,
            np.stack([film.clip.frames_FHWC() for film in films]),
            [prompt.text for prompt in mine for _ in range(self.samples)],
            [prompt.metadata for prompt in mine for _ in range(self.samples)],
            self.samples,
            ctx.world,
        )
        advantages_GK, valid_GK = group_advantages(scored.rewards_GK, std=self.advantage_std)
        signal_G = drop_zero_groups(advantages_GK)
        keep_GK = valid_GK & signal_G[:, None]
        settings: dict[str, Any] = {"world": ctx.world, "address": (ctx.seed, step)}
        signal = (advantages_GK[share].reshape(-1), keep_GK[share].reshape(-1))
        yield from path_updates(
            Paths.of([film.picture for film in films]),
            *signal,
            self.path_loss,
            student=ctx.roles.instance(STUDENT),
            reference=ctx.roles.instance(REFERENCE) if self.path_loss.kl > 0 else None,
            **settings,
        )
        if self.trains_second:
            for update in path_updates(
                Paths.of([film.clip for film in films]),
                *signal,
                replace(self.path_loss, kl=0.0),
                student=ctx.roles.instance(SECOND),
                reference=None,
                optimizer=SECOND,
                **settings,
            ):
                yield replace(update, metrics={_of_second(name): value for name, value in update.metrics.items()})
        metrics = {**scored.metrics, "train/groups_without_signal": float(np.mean(~signal_G))}
        yield Update(loss=None, step=False, metrics=metrics)

    def gates(self, ctx: Context) -> dict[str, GateReport]:
        """Of both models: the log-probs of each that is trained, the velocities of a second one that is not."""
        first, second = ctx.roles.instance(STUDENT), ctx.roles.instance(SECOND)
        picture, clip = self._requests(GATE_PROMPT, ctx.seed, ctx.seed, first.card, second.card)
        reports = {"c2_log_prob": log_prob_gate(first, picture)}
        if self.trains_second:
            clip = replace(clip, inputs=plain_inputs(second.card))
            return {**reports, "c2_second_log_prob": log_prob_gate(second, clip)}
        gate = behaviour_gate(second, prompt=GATE_PROMPT, seed=ctx.seed, solver="euler")
        return {**reports, "c2_second": gate}

    def evaluation(self, ctx: Context, role: str) -> dict[str, float]:
        """The reward and its parts over clips of the evaluation's prompts, whose pictures are of ``role``."""
        if self.films == 0:
            return {}
        assert ctx.reward is not None
        first, second = ctx.roles.instance(role), ctx.roles.instance(SECOND)
        items, chains = EVAL_SET[: self.films], []
        for item in items:
            picture = Request(prompt=item.prompt, task=plain_task(first.card), seed=item.seed, guidance=self.guidance)
            clip = replace(picture, task=plain_task(second.card), guidance=None)
            chains.append(t2i_i2v(Ask(picture, first), Ask(clip, second)))
        films = ctx.engine.run_workflows(chains)
        clips = [film.clip.frames_FHWC() for film in films]
        scores = ctx.reward.score(RewardBatch(clips, [item.prompt for item in items], [{} for _ in items]))
        columns = {"reward": scores.values, **scores.parts}
        return {name: float(np.nanmean(c)) for name, c in columns.items() if np.isfinite(c).any()}


def _of_second(metric: str) -> str:
    """``train/loss`` -> ``train/second_loss``."""
    room, name = metric.split("/", 1)
    return f"{room}/{SECOND}_{name}"
