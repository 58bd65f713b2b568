"""finetune: flow matching on encoded clips (Lipman et al. 2023, arXiv 2210.02747; Esser et al. 2024, arXiv 2403.03206).

Loss: mean over elements of w(s) |v_theta(x_s, 1000 s, text) - (e - x0)|^2 in float32. Each clip has its own sigma,
noise and caption dropout, drawn at the address (seed, step, row in the global batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.errors import unknown_name
from cards.prediction import add_noise, expand_to, velocity_target
from loops.flow import SAMPLERS, WEIGHTINGS, loss_weight, sample_sigmas
from methods.forward import encode_prompts, velocity
from methods.method import Context, Method, Update
from methods.random import generator_at, noise_like
from methods.roles import STUDENT


def flow_loss(predicted: Tensor, x0: Tensor, noise: Tensor, weight_B: Tensor) -> Tensor:
    """(B,) weighted mean squared error of the velocity, each over its sample's elements, in float32."""
    error = (predicted.float() - velocity_target(x0, noise).float()) ** 2
    return weight_B * error.flatten(1).mean(1)


def conditions_of(batch: Mapping[str, Any], part: slice) -> dict[str, Tensor]:
    """What a batch of clips holds beside latents for the forward, of some of its rows."""
    return {name: value[part] for name, value in batch.get("conditions", {}).items()}


class Finetune(Method):
    """Flow-matching finetune.

    Args:
        sampler: ``uniform`` | ``logit_normal`` (``logit_mean``, ``logit_std``) | ``mode``.
        shift: flow shift S of the sampled sigmas.
        weighting: ``none`` | ``sigma_sqrt`` | ``cosmap`` | ``bell``.
        caption_dropout: probability of training on the empty prompt, so that guidance keeps working.
    """

    name = "finetune"
    needs_clips = True
    takes_inputs = True

    def __init__(
        self,
        *,
        sampler: str = "uniform",
        logit_mean: float = 0.0,
        logit_std: float = 1.0,
        shift: float = 3.0,
        weighting: str = "none",
        caption_dropout: float = 0.1,
        **common: Any,
    ):
        super().__init__(**common)
        if sampler not in SAMPLERS:
            raise unknown_name("sigma sampler", sampler, SAMPLERS)
        if weighting not in WEIGHTINGS:
            raise unknown_name("loss weighting", weighting, WEIGHTINGS)
        self.sampler = sampler
        self.sampler_options = {"mean": logit_mean, "std": logit_std} if sampler == "logit_normal" else {}
        self.shift = shift
        self.weighting = weighting
        self.caption_dropout = caption_dropout

    def roles(self) -> tuple[str, ...]:
        return ()

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        found = super().problems(card, world_size)
        if not 0 <= self.caption_dropout <= 1:
            found.append(f"caption_dropout: got {self.caption_dropout}, expected 0 .. 1")
        if not self.shift > 0:
            found.append(f"shift: got {self.shift}, expected a number > 0")
        return found

    def updates(self, batch: Mapping[str, Any], step: int, ctx: Context) -> Iterator[Update]:
        latents_BCTHW: Tensor = batch["latents"]
        prompts: Sequence[str] = batch["prompt"]
        rows = range(*ctx.world.share(self.batch_size, "batch_size").indices(self.batch_size))
        for start in range(0, len(rows), self.micro_batch):
            part = slice(start, start + self.micro_batch)
            chunk = latents_BCTHW[part].to(ctx.device)
            addresses: list[tuple[int | str, ...]] = [(ctx.seed, "train", step, r) for r in rows[part]]
            losses_B = self.losses(chunk, prompts[part], addresses, ctx, **self.given(batch, part))
            yield Update(
                loss=losses_B.sum() / len(rows),
                step=start + self.micro_batch >= len(rows),
                metrics={"train/loss": losses_B.detach().sum().item() / len(rows)},
            )

    def given(self, batch: Mapping[str, Any], part: slice) -> dict[str, Any]:
        """What :meth:`losses` takes of a batch's rows beside latents and prompts."""
        return {"conditions": conditions_of(batch, part)}

    def sigma(self, address: tuple[int | str, ...]) -> float:
        """The sigma of a clip whose randomness is drawn at ``address``."""
        return self._draw_sigma(address)[0].item()

    def _draw_sigma(self, address: tuple[int | str, ...]) -> tuple[Tensor, torch.Generator]:
        """Sigma (1,) and the generator after the draw."""
        draw = generator_at(*address, "sigma")
        return sample_sigmas(self.sampler, 1, self.shift, draw, **self.sampler_options), draw

    def losses(
        self,
        x0_BCTHW: Tensor,
        prompts: Sequence[str],
        addresses: Sequence[tuple[int | str, ...]],
        ctx: Context,
        *,
        role: str = STUDENT,
        training: bool = True,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """(B,) losses of clips whose randomness is drawn at ``addresses``; ``training=False`` for validation.
        ``conditions``: see :func:`methods.forward.velocity`."""
        sigma, noise, texts = [], [], []
        for x0, prompt, address in zip(x0_BCTHW, prompts, addresses, strict=True):
            drawn, draw = self._draw_sigma(address)
            sigma.append(drawn)
            dropped = training and torch.rand(1, generator=draw).item() < self.caption_dropout
            texts.append("" if dropped else prompt)
            noise.append(noise_like(x0, *address, "noise"))
        sigma_B = torch.cat(sigma).to(x0_BCTHW.device)
        noise_BCTHW = torch.stack(noise)
        instance = ctx.roles.instance(role)
        x_s = add_noise(x0_BCTHW, noise_BCTHW, expand_to(sigma_B, x0_BCTHW))
        text_BLD = encode_prompts(ctx.engine, instance, texts)
        predicted = velocity(instance, x_s, sigma_B, text_BLD, gradient=training, conditions=conditions)
        return flow_loss(predicted, x0_BCTHW, noise_BCTHW, loss_weight(self.weighting, sigma_B))
