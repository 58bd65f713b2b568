"""causal_init: fits Wan's weights to block-causal attention, so that self_forcing starts from something sane.

Two ways. ``teacher_forcing``: flow matching on encoded clips; each chunk has a noise level of its own and sees clean
chunks before it (CausVid, arXiv 2412.07772, Sec. 4; Diffusion Forcing, arXiv 2407.01392). ``ode``: the bidirectional
teacher samples clips with guidance, and the student regresses their end from points on the way, at the rungs of its own
ladder (arXiv 2412.07772, Sec. 4.2), which gives it the few-step behaviour as well. Both run the teacher-forced forward:
a clean and a noisy clip at once.

Legend: B rows, J chunks a clip, C latent channels, T latent frames, H W latent cells, S steps of a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from cards.prediction import add_noise, expand_to, network_timestep, velocity_target
from inference.instance import ModelInstance
from inference.request import Request
from loops.chunk_rollout import ChunkOptions
from loops.flow import loss_weight, sample_sigmas
from loops.loop import ModelCall, Profile
from loops.options import read_options
from methods.causal import causal_problems, on_ladder, rollout_spec
from methods.finetune import Finetune
from methods.forward import encode_prompts
from methods.ladder import ladder_sigmas
from methods.method import Baseline, Context, Update
from methods.random import address_seed, generator_at, noise_like
from methods.roles import STUDENT, TEACHER, Roles, trainable_component
from methods.shapeworld.steer import ACTIONS as STEER_ACTIONS
from methods.shapeworld.steer import action_eval
from methods.teacher import teacher_card

WAYS = ("teacher_forcing", "ode")


def teacher_forced_velocity(
    instance: ModelInstance,
    noisy_BCTHW: Tensor,
    clean_BCTHW: Tensor,
    sigma_BJ: Tensor,
    text_BLD: Tensor,
    *,
    gradient: bool,
    actions: Sequence[Sequence[str]] | None = None,
) -> Tensor:
    """Velocity (B, C, T, H, W) in float32 of noisy chunks, each at its own sigma and with the clean ones before it.

    ``actions``: of each row, one a chunk, for a card that has actions; None is its first for all.
    """
    spec = rollout_spec(instance.card)
    options = read_options(ChunkOptions, spec, instance.card)
    component = trainable_component(instance.card)
    profile = Profile.TRAIN if gradient else Profile.ROLLOUT
    context_B = torch.full((len(noisy_BCTHW),), options.context_noise, device=noisy_BCTHW.device)
    tensors = {
        "latents": noisy_BCTHW,
        "clean": clean_BCTHW,
        "timestep": network_timestep(sigma_BJ),
        "clean_timestep": network_timestep(context_B),
        "text": text_BLD,
    }
    if options.actions:
        rows: Sequence[Sequence[str]] = [()] * len(noisy_BCTHW) if actions is None else actions
        ids_BJ = [options.action_ids(row, sigma_BJ.shape[1], instance.card.name) for row in rows]
        embed = ModelCall(spec.components["actions"], "embed", {"ids": torch.tensor(ids_BJ)})
        tensors["action"] = instance.call(embed, profile)
    call = ModelCall(
        component,
        "velocity_teacher_forced",
        tensors,
        {
            **instance.numerics(component),
            "chunk": options.chunk,
            "window": options.window,
            "sinks": options.sinks,
        },
    )
    return instance.call(call, profile).float()


def over_frames(values_BJ: Tensor, like_BCTHW: Tensor) -> Tensor:
    """One value a chunk, (B, J), as (B, 1, T, 1, 1)."""
    frames = like_BCTHW.shape[2] // values_BJ.shape[1]
    return values_BJ.repeat_interleave(frames, dim=1)[:, None, :, None, None]


class CausalInit(Finetune):
    """See the module's docstring; the arguments of :class:`methods.finetune.Finetune` and these.

    Args:
        way: ``teacher_forcing`` | ``ode``.
        teacher: card that samples the trajectories of ``ode``: {name, size, source, revision}.
        teacher_guidance, teacher_steps: of these samples, by Euler with the flow shift of the student's ladder.
        rungs, ladder_shift: the ladder that ``ode`` fits and the card stores, as in dmd2; None leaves the card's.
        reuse: updates from one batch of trajectories, each with other rungs.
        past_noise: of ``teacher_forcing``: largest sigma to which the clean past is noised, so that what a rollout gets
            wrong does not add up (GameNGen, arXiv 2408.14837, Sec. 3.2.1); 0 leaves it clean.
        first_weight: of ``teacher_forcing``: weight of a clip's first chunk in its loss, of 1 for each of the others. 0
            leaves how a world begins to the weights that the run starts from, such as those of a few-step student.
        actions_only: trains the action vectors of a card that has some, and leaves the transformer as it is.
        action_eval: worlds of ActionEval in every evaluation (``methods.shapeworld.steer``), for a card whose actions
            are those of the steerable ShapeWorld; 0 runs none.
    """

    name = "causal_init"

    def __init__(
        self,
        *,
        way: Literal["teacher_forcing", "ode"] = "teacher_forcing",
        teacher: Mapping[str, Any] | None = None,
        teacher_guidance: float = 3.0,
        teacher_steps: int = 20,
        rungs: Sequence[float] | None = None,
        ladder_shift: float = 1.0,
        reuse: int = 4,
        past_noise: float = 0.0,
        first_weight: float = 1.0,
        actions_only: bool = False,
        action_eval: int = 0,
        **common: Any,
    ):
        super().__init__(**common)
        if way not in WAYS:
            raise unknown_name("method way", str(way), WAYS)
        if way == "ode" and teacher is None:
            raise UserError("method teacher: got none, expected the card that way=ode samples: {name, size, source}")
        self.way = way
        self.teacher = teacher
        self.teacher_guidance = teacher_guidance
        self.teacher_steps = teacher_steps
        self.ladder = None if rungs is None else ladder_sigmas(rungs, ladder_shift)
        self.reuse = reuse
        self.past_noise = past_noise
        self.first_weight = first_weight
        self.actions_only = actions_only
        self.action_eval = action_eval
        self.needs_clips = way == "teacher_forcing"

    def roles(self) -> tuple[str, ...]:
        return () if self.way == "teacher_forcing" else (TEACHER,)

    def derive_card(self, card: ModelCard) -> ModelCard:
        """The causal card on this method's ladder, if it has one."""
        return card if self.ladder is None else on_ladder(card, self.ladder)

    def role_cards(self, card: ModelCard) -> dict[str, ModelCard]:
        if self.way == "teacher_forcing":
            return {}
        assert self.teacher is not None
        return {TEACHER: teacher_card(self.teacher, card)}

    def optimizer_steps(self) -> int:
        return self.steps * (1 if self.way == "teacher_forcing" else self.reuse)

    def baseline(self) -> Baseline | None:
        return None if self.way == "teacher_forcing" else Baseline(TEACHER, self.teacher_guidance)

    def rollout_guidance(self) -> float:
        return 1.0

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size) + causal_problems(card)
        if not causal_problems(card):
            found += self._action_problems(card)
        if not 0 <= self.past_noise < 1:
            found.append(f"past_noise: got {self.past_noise}, expected a sigma, 0 <= s < 1")
        if not 0 <= self.first_weight < math.inf:
            found.append(f"first_weight: got {self.first_weight}, expected a number, 0 <= w")
        if self.reuse < 1:
            found.append(f"reuse: got {self.reuse}, expected at least 1")
        if self.way == "ode" and not 1 <= self.teacher_steps <= 1000:
            found.append(f"teacher_steps: got {self.teacher_steps}, expected 1 .. 1000")
        return found

    def _action_problems(self, card: ModelCard) -> list[str]:
        names = read_options(ChunkOptions, rollout_spec(card), card).actions
        found = []
        if self.actions_only and not names:
            found.append(f"actions_only: card {card.name!r} has no actions; give it some: card.actions=[none,left,...]")
        if self.action_eval and names != STEER_ACTIONS:
            found.append(f"action_eval: got a card with the actions {list(names)}, expected {list(STEER_ACTIONS)}")
        return found

    def attach_heads(self, roles: Roles) -> None:
        embedder = rollout_spec(roles.instance(STUDENT).card).components.get("actions")
        if embedder is not None:
            roles.join(embedder)
            if self.actions_only:
                roles.module(STUDENT).requires_grad_(False)

    def evaluation(self, ctx: Context, role: str) -> dict[str, float]:
        if self.action_eval == 0 or role == TEACHER:
            return {}
        return action_eval(ctx.roles.instance(role), worlds=self.action_eval)

    def updates(self, batch: Any, step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: encoded clips and captions, or for ``ode`` the step's prompts, the same list on every rank."""
        if self.way == "teacher_forcing":
            yield from super().updates(batch, step, ctx)
        else:
            yield from self._regressions([prompt.text for prompt in batch], step, ctx)

    # -- teacher forcing

    def losses(  # type: ignore[override]  # what it takes of a batch is told by given()
        self,
        x0_BCTHW: Tensor,
        prompts: Sequence[str],
        addresses: Sequence[tuple[int | str, ...]],
        ctx: Context,
        *,
        role: str = STUDENT,
        training: bool = True,
        actions: Sequence[Sequence[str]] | None = None,
    ) -> Tensor:
        """(B,) losses of clips, a sigma for each chunk; as :meth:`methods.finetune.Finetune.losses`. ``actions``: of
        each clip, one a chunk."""
        instance = ctx.roles.instance(role)
        chunks = self._chunks(instance.card, x0_BCTHW)
        sigmas, noise, texts = [], [], []
        for x0, prompt, address in zip(x0_BCTHW, prompts, addresses, strict=True):
            draw = generator_at(*address, "sigma")
            sigmas.append(sample_sigmas(self.sampler, chunks, self.shift, draw, **self.sampler_options))
            dropped = training and torch.rand(1, generator=draw).item() < self.caption_dropout
            texts.append("" if dropped else prompt)
            noise.append(noise_like(x0, *address, "noise"))
        sigma_BJ = torch.stack(sigmas).to(x0_BCTHW.device)
        noise_BCTHW = torch.stack(noise)
        x_s = add_noise(x0_BCTHW, noise_BCTHW, over_frames(sigma_BJ, x0_BCTHW))
        past = self._past(x0_BCTHW, addresses) if training else x0_BCTHW
        if actions is not None:  # a clip that lost its tail lost the actions of that
            actions = [row[:chunks] for row in actions]
        text_BLD = encode_prompts(ctx.engine, instance, texts)
        predicted = teacher_forced_velocity(instance, x_s, past, sigma_BJ, text_BLD, gradient=training, actions=actions)
        error = (predicted - velocity_target(x0_BCTHW, noise_BCTHW).float()) ** 2
        weight_BJ = loss_weight(self.weighting, sigma_BJ) * self._chunk_weights(chunks).to(sigma_BJ.device)
        return (over_frames(weight_BJ, error) * error).flatten(1).mean(1)

    def _chunk_weights(self, chunks: int) -> Tensor:
        """(J,) of mean 1; a clip of one chunk is all first."""
        weights_J = torch.ones(chunks)
        if chunks > 1:
            weights_J[0] = self.first_weight
        return weights_J / weights_J.mean()

    def _past(self, x0_BCTHW: Tensor, addresses: Sequence[tuple[int | str, ...]]) -> Tensor:
        """What noisy chunks see of the clips: each noised to a sigma of its own, up to ``past_noise``."""
        if self.past_noise == 0:
            return x0_BCTHW
        draws = [torch.rand(1, generator=generator_at(*address, "past")).item() for address in addresses]
        sigma_B = self.past_noise * torch.tensor(draws, device=x0_BCTHW.device)
        noise = [noise_like(x0, *address, "past", "noise") for x0, address in zip(x0_BCTHW, addresses, strict=True)]
        return add_noise(x0_BCTHW, torch.stack(noise), expand_to(sigma_B, x0_BCTHW))

    def given(self, batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
        """The clips' actions, where they have some."""
        return {"actions": batch["actions"][part] if "actions" in batch else None}

    def _chunks(self, card: ModelCard, latents_BCTHW: Tensor) -> int:
        options = read_options(ChunkOptions, rollout_spec(card), card)
        frames = latents_BCTHW.shape[2]
        if frames % options.chunk:
            raise UserError(f"got clips of {frames} latent frames, expected a multiple of the chunk of {options.chunk}")
        return frames // options.chunk

    # -- ODE trajectories

    def _regressions(self, prompts: Sequence[str], step: int, ctx: Context) -> Iterator[Update]:
        share = ctx.world.share(len(prompts), "batch_size")
        rows = range(*share.indices(len(prompts)))
        mine = prompts[share]
        points_BSCTHW, sigmas_S, x0_BCTHW = self._trajectories(mine, rows, step, ctx)
        student = ctx.roles.instance(STUDENT)
        text_BLD = encode_prompts(ctx.engine, student, mine)
        rungs = self._visited(sigmas_S, student.card)
        chunks = self._chunks(student.card, x0_BCTHW)
        for use in range(self.reuse):
            picks = [
                rungs[torch.randint(len(rungs), (chunks,), generator=generator_at(ctx.seed, "ode", step, use, row))]
                for row in rows
            ]
            pick_BJ = torch.stack(picks)
            for start in range(0, len(rows), self.micro_batch):
                part = slice(start, min(start + self.micro_batch, len(rows)))
                x_s = _at(points_BSCTHW[part], pick_BJ[part])
                sigma_BJ = sigmas_S[pick_BJ[part]].to(x_s.device)
                losses_B = self._ode_losses(student, x_s, x0_BCTHW[part], sigma_BJ, text_BLD[part])
                yield Update(
                    loss=losses_B.sum() / len(rows),
                    step=part.stop >= len(rows),
                    metrics={"train/loss": losses_B.detach().sum().item() / len(rows) / self.reuse},
                )

    def _trajectories(
        self, prompts: Sequence[str], rows: range, step: int, ctx: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Points (B, S, C, T, H, W) that the teacher's sampler visits, their sigmas (S,), and its samples."""
        requests = [
            Request(
                prompt=prompt,
                seed=address_seed(ctx.seed, "ode", step, row),
                steps=self.teacher_steps,
                solver="euler",
                guidance=self.teacher_guidance,
                shift=rollout_spec(ctx.card).schedule.shift,
                output="latents",
                profile=Profile.ROLLOUT,
                capture=("trajectory",),
            )
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        artifacts = ctx.engine.run_interleaved(requests, ctx.roles.instance(TEACHER))
        points = []
        for artifact in artifacts:
            assert artifact.behaviour is not None and artifact.behaviour.trajectory is not None
            points.append(artifact.behaviour.trajectory)
        assert artifacts[0].behaviour is not None
        return torch.stack(points), artifacts[0].behaviour.sigmas, torch.stack([a.latents for a in artifacts])

    def _visited(self, sigmas_S: Tensor, card: ModelCard) -> Tensor:
        """Index of the visited sigma nearest to each rung of the student's ladder."""
        ladder = rollout_spec(card).schedule.ladder
        assert ladder is not None
        return torch.stack([(sigmas_S - rung).abs().argmin() for rung in ladder])

    def _ode_losses(
        self, student: ModelInstance, x_s: Tensor, x0: Tensor, sigma_BJ: Tensor, text_BLD: Tensor
    ) -> Tensor:
        """(B,) mean squared errors of the clean sample, ``(s (v - (x_s - x0) / s))^2``."""
        velocity = teacher_forced_velocity(student, x_s, x0, sigma_BJ, text_BLD, gradient=True)
        return (x_s - over_frames(sigma_BJ, x_s) * velocity - x0).square().flatten(1).mean(1)


def _at(points_BSCTHW: Tensor, pick_BJ: Tensor) -> Tensor:
    """(B, C, T, H, W): of each row's chunks, the point of its own index."""
    frames = points_BSCTHW.shape[3] // pick_BJ.shape[1]
    index_BT = pick_BJ.repeat_interleave(frames, dim=1).to(points_BSCTHW.device)
    rows = torch.arange(len(index_BT), device=index_BT.device)[:, None]
    times = torch.arange(index_BT.shape[1], device=index_BT.device)[None, :]
    return points_BSCTHW[rows, index_BT, :, times].permute(0, 2, 1, 3, 4)
