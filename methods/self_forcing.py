"""self_forcing: a causal student trained on its own rollouts (Huang et al. 2025, arXiv 2506.08009).

The student rolls a clip out chunk by chunk on its own keys and values, as it serves; one exit rung an iteration, the
same for every chunk and rank, and gradient there alone. The whole clip is then judged as in dmd2: a critic that follows
the student's clips and a frozen bidirectional teacher, by distribution matching or by the SiD loss; a discriminator is
optional.

Legend: B rows, N samples of this rank, C latent channels, T latent frames, H W latent cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from cards.card import LoopSpec, ModelCard
from cards.errors import UserError, unknown_name
from cards.prediction import expand_to, velocity_to_x0
from loops.chunk_rollout import ChunkOptions, rollout, rollout_noises
from loops.options import read_options
from methods.causal import causal_problems, on_ladder, rollout_spec
from methods.distribution_matching import sid_loss
from methods.dmd2 import DMD2, Rows
from methods.forward import velocity
from methods.method import Context
from methods.random import address_seed
from methods.roles import CRITIC, STUDENT, TEACHER
from methods.teacher import teacher_card

LOSSES = ("dmd", "sid")


class SelfForcing(DMD2):
    """Self forcing; the arguments of :class:`methods.dmd2.DMD2` and these.

    Args:
        loss: ``dmd`` | ``sid`` (score identity distillation, arXiv 2404.04057: gradient through both scores too).
        sid_alpha: a of the SiD loss.
        context_noise: sigma of the pass that keeps a finished chunk's keys and values; None leaves the card's.
        rollout_frames: latent frames of a rollout; None takes the card's clip. Of a longer one the last clip's length
            carries gradient and is judged.
    """

    name = "self_forcing"

    def __init__(
        self,
        *,
        teacher: Mapping[str, Any],
        loss: Literal["dmd", "sid"] = "dmd",
        sid_alpha: float = 1.0,
        context_noise: float | None = None,
        rollout_frames: int | None = None,
        **common: Any,
    ):
        super().__init__(teacher=teacher, **common)
        if loss not in LOSSES:
            raise unknown_name("method loss", str(loss), LOSSES)
        self.loss = loss
        self.sid_alpha = sid_alpha
        self.context_noise = context_noise
        self.rollout_frames = rollout_frames

    def derive_card(self, card: ModelCard) -> ModelCard:
        """The causal card on this method's ladder."""
        if self.context_noise is None:
            return on_ladder(card, self.ladder)
        return on_ladder(card, self.ladder, context_noise=self.context_noise)

    def role_cards(self, card: ModelCard) -> dict[str, ModelCard]:
        assert self.teacher is not None
        return {TEACHER: teacher_card(self.teacher, card)}

    def card_problems(self, card: ModelCard) -> list[str]:
        found = causal_problems(card)
        if found or self.rollout_frames is None:
            return found
        chunk, clip = self._chunk(card), clip_shape(card)[1]
        if self.rollout_frames < clip or self.rollout_frames % chunk:
            found.append(
                f"rollout_frames: got {self.rollout_frames}, expected a multiple of the chunk of {chunk} latent frames "
                f"from {clip} (the card's clip) on"
            )
        return found

    def _chunk(self, card: ModelCard) -> int:
        return read_options(ChunkOptions, rollout_spec(card), card).chunk

    def _samples(
        self, what: str, rows: Rows, part: slice, step: int, exit_at: int, ctx: Context, *, gradient: bool
    ) -> Tensor:
        """The last clip's length (B, C, T, H, W) of rollouts, each from noise of its own address."""
        student = ctx.roles.instance(STUDENT)
        spec, chunk = rollout_spec(student.card), self._chunk(student.card)
        channels, clip, height, width = clip_shape(student.card)
        frames = clip if self.rollout_frames is None else self.rollout_frames
        seeds = [address_seed(ctx.seed, self.name, what, step, row) for row in rows.indices[part]]
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        draws = self._draws(spec, exit_at, student.card)
        shape = (len(seeds), channels, frames, height, width)
        first = (frames - clip) // chunk
        rolled = rollout(
            student,
            spec,
            rows.text_NLD[part],
            rollout_noises(shape, chunk, draws, generators),
            exit=exit_at,
            gradient=lambda index: gradient and index >= first,
        )
        return rolled.latents[:, :, frames - clip :]

    def _draws(self, spec: LoopSpec, exit_at: int, card: ModelCard) -> int:
        """Noises of a chunk that exits at a rung."""
        return exit_at + 1 + (read_options(ChunkOptions, spec, card).context_noise > 0)

    def _student_loss(
        self, x0: Tensor, rows: Rows, part: slice, step: int, ctx: Context
    ) -> tuple[Tensor, dict[str, float]]:
        if self.loss == "dmd":
            return super()._student_loss(x0, rows, part, step, ctx)
        leaf = x0.detach().requires_grad_(True)
        with torch.enable_grad(), ctx.roles.backward_of(CRITIC):
            _, sigma_B, x_s = self._noised("score", leaf, rows, part, step, ctx)
            sigma = expand_to(sigma_B, x_s)
            v_fake = velocity(ctx.roles.instance(CRITIC), x_s, sigma_B, rows.text_NLD[part], gradient=True)
            v_real = self._teacher_velocity(x_s, sigma_B, rows, part, ctx, gradient=True)
            losses_B = sid_loss(
                leaf, velocity_to_x0(x_s, v_fake, sigma), velocity_to_x0(x_s, v_real, sigma), alpha=self.sid_alpha
            )
            # By the samples alone: the critic's weights must get no gradient here.
            (direction,) = torch.autograd.grad(losses_B.sum(), leaf)
        value = losses_B.detach().sum().item()
        return (x0 * direction).sum(), {"train/loss": value, "train/sid_loss": value}


def clip_shape(card: ModelCard) -> tuple[int, int, int, int]:
    """(C, T, H, W) of the latents of the card's default clip."""
    s = card.sampling
    shape = card.geometry.latent_shape(s.frames, s.height, s.width)
    if len(shape) != 4:
        raise UserError(f"card {card.name!r}: got latents of {shape}, expected (C, T, H, W)")
    return shape
