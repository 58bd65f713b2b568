"""dmd2: distribution matching distillation to a few steps (Yin et al. 2024, arXiv 2405.14867).

The student samples on a short ladder, as it will be served; its samples are lowered along the difference of two scores:
the critic's, which follows the student's own samples by flow matching, and the frozen teacher's, with guidance. The
critic is trained in every iteration, the student in every ``ttur``-th. A discriminator on the critic's features against
real clips is optional.

Legend: B rows, N samples of this rank, C latent channels, T latent frames, H W latent cells, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cards.card import ModelCard
from cards.prediction import add_noise, expand_to, velocity_to_x0
from loops.guidance import combine
from methods.collapse import CollapseWatch, contrast, motion
from methods.distribution_matching import dmd_gradient, dmd_loss, score_sigma
from methods.finetune import flow_loss
from methods.forward import encode_prompts, velocity
from methods.gan import Discriminator, features_of
from methods.ladder import exit_rung, ladder_card, ladder_of, ladder_sigmas, simulate
from methods.method import Baseline, Context, Method, OptimizerSpec, Update
from methods.random import address_seed, generator_at, noise_like
from methods.roles import CRITIC, STUDENT, TEACHER, Roles
from methods.teacher import PLACE, known_keys, teacher_card

HEAD = "gan_head"
"""The discriminator among the roles' modules."""


@dataclass(frozen=True, kw_only=True)
class GAN:
    """Weights of the discriminator's losses."""

    weight_g: float
    """Of the student's."""
    weight_d: float
    """Of the critic's."""


@dataclass(frozen=True)
class Rows:
    """What this rank trains on in an iteration: its slice of the global batch."""

    prompts: Sequence[str]
    indices: range
    """In the global batch."""
    text_NLD: Tensor
    """As the student and the critic read it."""
    teacher_text_NLD: Tensor
    negative_1LD: Tensor | None
    """The teacher's; None without guidance."""
    clips_NCTHW: Tensor | None
    """Real latents, for the discriminator."""


class DMD2(Method):
    """Distribution matching distillation. ``batch_size`` counts samples an iteration, one a prompt.

    Args:
        rungs: timesteps of the ladder before the shift, of 1000, descending.
        ladder_shift: flow shift that turns them into the ladder's sigmas; the card stores the result.
        ttur: K; the student is trained in the iterations 0, K, 2 K, ..., the critic in all.
        critic_lr: of the critic (and the discriminator); ``critic_clip``: its largest gradient norm.
        teacher_guidance: standard convention; 1 is the conditional score alone.
        teacher: a card in place of the student's own base: {name, size, source, revision}; None is the base.
        score_shift: flow shift of the noise levels at which the scores are compared and the critic is trained.
        gan: {weight_g, weight_d} for a discriminator against real clips, which then also give the prompts; or None.
        watch_floor: share of the first iterations' contrast or motion below which samples count as collapsed.
        watch_patience: iterations in a row below it that bring the warning.
    """

    name = "dmd2"

    def __init__(
        self,
        *,
        rungs: Sequence[float] = (1000, 750, 500, 250),
        ladder_shift: float = 5.0,
        ttur: int = 5,
        critic_lr: float,
        critic_clip: float | None = 1.0,
        teacher_guidance: float = 3.0,
        teacher: Mapping[str, Any] | None = None,
        score_shift: float = 5.0,
        gan: Mapping[str, Any] | None = None,
        watch_floor: float = 0.25,
        watch_patience: int = 10,
        **common: Any,
    ):
        super().__init__(**common)
        self.ladder = ladder_sigmas(rungs, ladder_shift)
        self.ttur = ttur
        self.critic_lr = critic_lr
        self.critic_clip = critic_clip
        self.teacher_guidance = teacher_guidance
        self.teacher = None if teacher is None else known_keys("teacher", teacher, ("name", "size"), PLACE)
        self.score_shift = score_shift
        self.gan = None if gan is None else GAN(**known_keys("gan", gan, ("weight_g", "weight_d")))
        self.needs_clips = self.gan is not None
        self.watch = CollapseWatch(floor=watch_floor, patience=watch_patience)

    # -- what a run is made of

    def roles(self) -> tuple[str, ...]:
        return (TEACHER, CRITIC)

    def optimizer_steps(self) -> int:
        return -(-self.steps // self.ttur)

    def optimizers(self) -> dict[str, OptimizerSpec]:
        critic = OptimizerSpec(self.critic_lr, self.betas, self.weight_decay, self.critic_clip, steps=self.steps)
        return {**super().optimizers(), CRITIC: critic}

    def rollout_guidance(self) -> float:
        return 1.0

    def derive_card(self, card: ModelCard) -> ModelCard:
        return ladder_card(card, self.ladder)

    def baseline(self) -> Baseline:
        """The teacher as it samples on its own card: what the student is to reach."""
        return Baseline(TEACHER, self.teacher_guidance)

    def role_cards(self, card: ModelCard) -> dict[str, ModelCard]:
        return {} if self.teacher is None else {TEACHER: teacher_card(self.teacher, card)}

    def attach_heads(self, roles: Roles) -> None:
        if self.gan is not None:
            roles.attach(HEAD, Discriminator.for_model(roles.module(CRITIC)), CRITIC)

    def state(self) -> dict[str, Any]:
        return {"watch": self.watch.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.watch = CollapseWatch.restored(state["watch"])

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        checks = (
            (self.ttur >= 1, f"ttur: got {self.ttur}, expected at least 1"),
            (self.critic_lr >= 0, f"critic_lr: got {self.critic_lr}, expected a number >= 0"),
            (self.teacher_guidance >= 0, f"teacher_guidance: got {self.teacher_guidance}, expected a number >= 0"),
            (self.score_shift > 0, f"score_shift: got {self.score_shift}, expected a number > 0"),
            (0 <= self.watch.floor < 1, f"watch_floor: got {self.watch.floor}, expected a share in [0, 1)"),
            (self.watch.patience >= 1, f"watch_patience: got {self.watch.patience}, expected at least 1"),
            (
                self.gan is None or (self.gan.weight_g >= 0 and self.gan.weight_d >= 0),
                f"gan: got {self.gan}, expected weights >= 0",
            ),
        )
        return found + [message for fine, message in checks if not fine] + self.card_problems(card)

    def card_problems(self, card: ModelCard) -> list[str]:
        """What makes the card that the run starts from unfit to be the student."""
        if ladder_of(card) is None:
            return []
        return [f"card {card.name!r} runs the ladder {ladder_of(card)} already; distil the card that it came from"]

    # -- an iteration

    def updates(self, batch: Any, step: int, ctx: Context) -> Iterator[Update]:
        """``batch``: the step's ``batch_size`` prompts, the same list on every rank; with a discriminator this rank's
        encoded clips and their captions. ``train/loss`` sums what an iteration descends."""
        rows = self._rows(batch, ctx)
        exit_at = exit_rung(len(self.ladder), ctx.seed, step)
        if step % self.ttur == 0:
            yield from self._student_updates(rows, step, exit_at, ctx)
        yield from self._critic_updates(rows, step, exit_at, ctx)

    def _rows(self, batch: Any, ctx: Context) -> Rows:
        share = ctx.world.share(self.batch_size, "batch_size")
        if self.gan is None:
            prompts, clips = [prompt.text for prompt in batch[share]], None
        else:
            prompts, clips = list(batch["prompt"]), batch["latents"].to(ctx.device)
        student, teacher = ctx.roles.instance(STUDENT), ctx.roles.instance(TEACHER)
        negative = [teacher.card.sampling.negative_prompt]
        return Rows(
            prompts=prompts,
            indices=range(*share.indices(self.batch_size)),
            text_NLD=encode_prompts(ctx.engine, student, prompts),
            teacher_text_NLD=encode_prompts(ctx.engine, teacher, prompts),
            negative_1LD=encode_prompts(ctx.engine, teacher, negative) if self.teacher_guidance != 1 else None,
            clips_NCTHW=clips,
        )

    def _chunks(self, rows: Rows) -> Iterator[slice]:
        for start in range(0, len(rows.indices), self.micro_batch):
            yield slice(start, min(start + self.micro_batch, len(rows.indices)))

    def _samples(
        self, what: str, rows: Rows, part: slice, step: int, exit_at: int, ctx: Context, *, gradient: bool
    ) -> Tensor:
        """The student's samples (B, C, T, H, W) of some rows, from noise of their own for each use of them."""
        seeds = [address_seed(ctx.seed, "dmd2", what, step, row) for row in rows.indices[part]]
        return simulate(ctx.roles.instance(STUDENT), rows.text_NLD[part], seeds, exit_at, gradient=gradient)

    def _noised(self, what: str, x0: Tensor, rows: Rows, part: slice, step: int, ctx: Context) -> tuple[Tensor, ...]:
        """(noise, sigma (B,), x_s) of samples, each at an address of its own row."""
        addresses = [(ctx.seed, "dmd2", what, step, row) for row in rows.indices[part]]
        sigma_B = torch.cat([score_sigma(self.score_shift, generator_at(*a, "sigma")) for a in addresses]).to(x0.device)
        noise = torch.stack([noise_like(x, *a, "noise") for x, a in zip(x0, addresses, strict=True)])
        return noise, sigma_B, add_noise(x0, noise, expand_to(sigma_B, x0))

    # -- the student

    def _student_updates(self, rows: Rows, step: int, exit_at: int, ctx: Context) -> Iterator[Update]:
        for part in self._chunks(rows):
            x0 = self._samples("student", rows, part, step, exit_at, ctx, gradient=True)
            loss, parts = self._student_loss(x0, rows, part, step, ctx)
            weight = 1 / len(rows.indices)
            yield Update(
                loss=loss * weight,
                step=part.stop >= len(rows.indices),
                metrics={name: value * weight for name, value in parts.items()},
            )

    def _student_loss(
        self, x0: Tensor, rows: Rows, part: slice, step: int, ctx: Context
    ) -> tuple[Tensor, dict[str, float]]:
        """Sum of the losses of samples with gradient, and the sums of their figures."""
        with torch.no_grad():
            _, sigma_B, x_s = self._noised("score", x0, rows, part, step, ctx)
            sigma = expand_to(sigma_B, x_s)
            v_fake = velocity(ctx.roles.instance(CRITIC), x_s, sigma_B, rows.text_NLD[part], gradient=False)
            v_real = self._teacher_velocity(x_s, sigma_B, rows, part, ctx)
            gradient = dmd_gradient(x0, velocity_to_x0(x_s, v_fake, sigma), velocity_to_x0(x_s, v_real, sigma))
        losses_B = dmd_loss(x0, gradient)
        total = losses_B.sum()
        figures = {
            "train/dmd_loss": losses_B.detach().sum().item(),
            "train/dmd_gradient": gradient.square().flatten(1).mean(1).sqrt().sum().item(),
        }
        if self.gan is not None:
            value_B, direction = self._adversarial(x0, rows, part, step, ctx)
            # The critic's weights must get no gradient here: its part of the chain is behind us already.
            total = total + self.gan.weight_g * (x0 * direction).sum()
            figures["train/gan_g_loss"] = value_B.sum().item()
            # Comparable with dmd_gradient, which is divided by the elements in the loss.
            scale = x0[0].numel() * self.gan.weight_g
            figures["train/gan_gradient"] = (scale * direction).square().flatten(1).mean(1).sqrt().sum().item()
        figures["train/loss"] = figures["train/dmd_loss"] + (
            0.0 if self.gan is None else self.gan.weight_g * figures["train/gan_g_loss"]
        )
        return total, figures

    def _teacher_velocity(
        self, x_s: Tensor, sigma_B: Tensor, rows: Rows, part: slice, ctx: Context, *, gradient: bool = False
    ) -> Tensor:
        """Guided velocity (B, C, T, H, W) of the teacher."""
        teacher = ctx.roles.instance(TEACHER)
        conditional = velocity(teacher, x_s, sigma_B, rows.teacher_text_NLD[part], gradient=gradient)
        if rows.negative_1LD is None:
            return conditional
        negative = rows.negative_1LD.expand(len(x_s), -1, -1)
        unconditional = velocity(teacher, x_s, sigma_B, negative, gradient=gradient)
        return combine(conditional, unconditional, self.teacher_guidance)

    def _adversarial(self, x0: Tensor, rows: Rows, part: slice, step: int, ctx: Context) -> tuple[Tensor, Tensor]:
        """``softplus(-D(fake))`` (B,) and its gradient by the samples."""
        leaf = x0.detach().requires_grad_(True)
        with torch.enable_grad(), ctx.roles.backward_of(CRITIC):
            _, sigma_B, x_s = self._noised("score", leaf, rows, part, step, ctx)
            value_B = F.softplus(-self._logits(x_s, sigma_B, rows, part, ctx)[0])
            (direction,) = torch.autograd.grad(value_B.sum(), leaf)
        return value_B.detach(), direction

    def _logits(self, x_s: Tensor, sigma_B: Tensor, rows: Rows, part: slice, ctx: Context) -> tuple[Tensor, Tensor]:
        """(D (B,), the critic's velocity) at noised samples, of one forward with gradient."""
        critic = ctx.roles.instance(CRITIC)
        with features_of(ctx.roles.module(CRITIC)) as kept:
            predicted = velocity(critic, x_s, sigma_B, rows.text_NLD[part], gradient=True)
        # The velocity stays in D's graph, with no weight: FSDP2 gathers the outermost weights for a backward that comes
        # through the model's output, and the first layers are among them.
        whole = 0 * predicted.flatten(1).sum(1)
        return ctx.roles[HEAD](kept[-1]) + whole, predicted

    # -- the critic

    def _critic_updates(self, rows: Rows, step: int, exit_at: int, ctx: Context) -> Iterator[Update]:
        weight, figures = 1 / len(rows.indices), {"collapse/contrast": 0.0, "collapse/motion": 0.0}
        for part in self._chunks(rows):
            with torch.no_grad():
                x0 = self._samples("critic", rows, part, step, exit_at, ctx, gradient=False)
            figures["collapse/contrast"] += contrast(x0) * len(x0) * weight
            figures["collapse/motion"] += motion(x0) * len(x0) * weight
            losses_B, parts = self._critic_losses(x0, rows, part, step, ctx)
            yield Update(
                loss=losses_B.sum() * weight,
                step=part.stop >= len(rows.indices),
                metrics={name: value * weight for name, value in parts.items()},
                optimizer=CRITIC,
            )
        figures = ctx.world.mean(figures)
        self.watch.observe(step, f"rung {exit_at}", figures)
        yield Update(loss=None, step=False, metrics={**figures, "train/exit_rung": float(exit_at)})

    def _critic_losses(
        self, x0: Tensor, rows: Rows, part: slice, step: int, ctx: Context
    ) -> tuple[Tensor, dict[str, float]]:
        """(B,) losses on the student's samples, and the sums of their parts."""
        noise, sigma_B, x_s = self._noised("denoise", x0, rows, part, step, ctx)
        ones = torch.ones_like(sigma_B)
        if self.gan is None:
            predicted = velocity(ctx.roles.instance(CRITIC), x_s, sigma_B, rows.text_NLD[part], gradient=True)
            flow_B = flow_loss(predicted, x0, noise, ones)
            value = flow_B.detach().sum().item()
            return flow_B, {"train/critic_loss": value, "train/loss": value}
        assert rows.clips_NCTHW is not None
        fake_B, predicted = self._logits(x_s, sigma_B, rows, part, ctx)
        flow_B = flow_loss(predicted, x0, noise, ones)
        _, sigma_real_B, real_s = self._noised("real", rows.clips_NCTHW[part], rows, part, step, ctx)
        real_B, _ = self._logits(real_s, sigma_real_B, rows, part, ctx)
        adversarial_B = F.softplus(fake_B) + F.softplus(-real_B)
        losses_B = flow_B + self.gan.weight_d * adversarial_B
        return losses_B, {
            "train/loss": losses_B.detach().sum().item(),
            "train/critic_loss": flow_B.detach().sum().item(),
            "train/gan_d_loss": adversarial_B.detach().sum().item(),
            "train/gan_real": (real_B.detach() > 0).float().sum().item(),
            "train/gan_fake": (fake_B.detach() > 0).float().sum().item(),
        }
