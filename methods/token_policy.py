"""A language model as a policy: the texts of a rollout, and the same tokens evaluated anew with a gradient.

A rollout leaves its tokens (``loops.loop.TokenBehaviour``): what the model read, what it drew and how likely that was.
:func:`token_log_probs` takes any of them through the SAME ModelCall path, padded on the right and always with the
attention mask, at the weights of any instance. Its log-probs are the rollout's bit for bit where a text is alone in its
forward, as it was in the rollout; beside others they may round differently in the last bit of float32.

:func:`token_updates` is the language model's half of every method that trains one by policy gradient (UniRL-Zero, arXiv
2510.17937; PromptRL, arXiv 2602.01382). Knows nothing of rewards and of what the texts are for.

Legend: N texts, B rows of a forward, L tokens of the longest, prompt and drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import GateReport, tensor_difference
from inference.request import Request
from loops.ar_decode import log_prob_call
from loops.loop import Profile, TokenBehaviour
from methods.method import Update
from methods.world import World


@dataclass(frozen=True)
class TokenRows:
    """Texts side by side."""

    ids_BL: Tensor
    mask_BL: Tensor
    """1 for tokens, 0 for padding."""
    drawn_BL: Tensor
    """bool: the tokens that the model drew, up to the first end token and with it."""
    rolled_out_BL: Tensor
    """float64: the rollout's own log-probs of the drawn tokens, elsewhere 0."""
    temperature: float

    @classmethod
    def of(cls, texts: Sequence[TokenBehaviour], device: torch.device) -> TokenRows:
        """Texts that were drawn at one temperature."""
        (temperature,) = {text.temperature for text in texts}
        lengths = [len(text.prompt_ids) + len(text.token_ids) for text in texts]
        shape = (len(texts), max(lengths))
        ids_BL, mask_BL = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        drawn_BL, rolled_out_BL = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.float64)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            own = slice(len(text.prompt_ids), length)
            ids_BL[row, :length] = torch.cat([text.prompt_ids, text.token_ids])
            mask_BL[row, :length] = 1
            drawn_BL[row, own] = text.mask
            rolled_out_BL[row, own] = text.logprobs.masked_fill(~text.mask, 0)
        return cls(ids_BL.to(device), mask_BL.to(device), drawn_BL.to(device), rolled_out_BL.to(device), temperature)


def token_log_probs(instance: ModelInstance, component: str, rows: TokenRows, *, gradient: bool) -> Tensor:
    """(B, L) float64 log-probs of the drawn tokens at the weights of an instance's language model, elsewhere 0."""
    call = log_prob_call(component, rows.ids_BL, rows.mask_BL, rows.temperature)
    log_p_BL = instance.call(call, Profile.TRAIN if gradient else Profile.ROLLOUT)
    return log_p_BL.masked_fill(~rows.drawn_BL, 0)


def mean_over_drawn(values_BL: Tensor, drawn_BL: Tensor) -> Tensor:
    """(B,) mean over a row's drawn tokens; 0 for a row without any."""
    return (values_BL * drawn_BL).sum(1) / drawn_BL.sum(1).clamp(min=1)


def token_policy_loss(
    log_p_BL: Tensor,
    reference_BL: Tensor | None,
    advantage_B: Tensor,
    drawn_BL: Tensor,
    *,
    kl: float,
    old_BL: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(B,) losses, the mean over a text's drawn tokens of ``-(exp(lp - old) A - kl k3)``, and its parts (B,).

    ``k3 = exp(ref - lp) - (ref - lp) - 1`` (Schulman's estimate of KL(model, reference), never negative). ``old_BL``
    None is ``lp`` without gradient: the ratio is exactly 1, and its gradient that of ``lp``.
    """
    ratio_BL = torch.exp(log_p_BL - (log_p_BL if old_BL is None else old_BL).detach())
    policy_B = -advantage_B * mean_over_drawn(ratio_BL, drawn_BL)
    parts = {"policy_loss": policy_B, "ratio_deviation": ((ratio_BL - 1).abs() * drawn_BL).amax(1)}
    if reference_BL is None:
        return policy_B, parts
    apart_BL = reference_BL - log_p_BL
    kl_B = mean_over_drawn(torch.expm1(apart_BL) - apart_BL, drawn_BL)
    return policy_B + kl * kl_B, {**parts, "kl": kl_B}


def token_gate(instance: ModelInstance, request: Request, node: str) -> GateReport:
    """C2 of a language model as a policy: what it drew in a rollout's node gives the rollout's log-probs again, with a
    gradient, when it is evaluated as a loss does. Same path, batch and dtype: the ratio is 1 to the last bit."""
    artifact = Engine(instance.device, cache_bytes=0).run(request, instance)
    text = artifact.tokens[node]
    component = instance.card.loops[node_loop(instance, request.task, node)].components["lm"]
    rows = TokenRows.of([text], instance.device_of(component))
    again_BL = token_log_probs(instance, component, rows, gradient=True)
    difference = tensor_difference(again_BL.detach(), rows.rolled_out_BL)
    if not again_BL.requires_grad:
        difference = math.inf
    what = f"{int(rows.drawn_BL.sum())} token log-probs of a rollout == training's, with gradient"
    return GateReport("C2", what, difference, 0.0)


def node_loop(instance: ModelInstance, task: str, node: str) -> str:
    """Id of the loop that a node of a task's program runs."""
    return next(n.loop for n in instance.card.programs[task].nodes if n.id == node and n.loop is not None)


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """How texts become updates."""

    kl: float = 0.01
    """Weight of k3 against a reference."""
    a_max: float = 5.0
    """Advantages are clamped to +- this."""
    micro_batch: int = 32
    """Rows of a forward."""


def token_updates(
    texts: Sequence[TokenBehaviour],
    advantages_N: Sequence[float] | np.ndarray,
    keep_N: Sequence[bool] | np.ndarray,
    settings: TokenLoss,
    *,
    component: str,
    student: ModelInstance,
    reference: ModelInstance | None,
    world: World,
    optimizer: str,
    off_policy: bool = False,
    log_as: str = "lm",
) -> Iterator[Update]:
    """One optimizer step of a language model: the mean of :func:`token_policy_loss` over the kept texts of all ranks;
    none at all when nothing is kept anywhere. Every rank has equally many texts.

    Logged under ``log_as``, where several are trained each under its own; how far the rollout's own log-probs are from
    training's as ``parity/token_log_prob``, and the largest |ratio - 1| between them as ``parity/token_ratio``.

    Args:
        keep_N: False leaves a text out: its reward failed.
        reference: for ``settings.kl`` > 0.
        off_policy: the texts are of other weights than the student has now: the ratio is to the rollouts' log-probs.
    """
    total = int(world.gather(np.array([int(np.sum(keep_N))])).sum())
    if total == 0:
        return
    device = student.device_of(component)
    clamped_N = torch.as_tensor(np.asarray(advantages_N), dtype=torch.float64).clamp(-settings.a_max, settings.a_max)
    weight_N = torch.as_tensor(np.asarray(keep_N), dtype=torch.float64) * world.size / total
    difference = ratio = 0.0
    for start in range(0, len(texts), settings.micro_batch):
        part = slice(start, start + settings.micro_batch)
        rows = TokenRows.of(texts[part], device)
        log_p_BL = token_log_probs(student, component, rows, gradient=True)
        fixed_BL = None
        if settings.kl > 0:
            assert reference is not None, "a KL term needs a reference"
            fixed_BL = token_log_probs(reference, component, rows, gradient=False)
        loss_B, parts = token_policy_loss(
            log_p_BL,
            fixed_BL,
            clamped_N[part].to(device),
            rows.drawn_BL,
            kl=settings.kl,
            old_BL=rows.rolled_out_BL if off_policy else None,
        )
        away_BL = log_p_BL.detach() - rows.rolled_out_BL
        difference = max(difference, away_BL.abs().max().item())
        ratio = max(ratio, torch.expm1(away_BL).abs().max().item())
        parts |= {"log_prob": mean_over_drawn(log_p_BL, rows.drawn_BL), "tokens": rows.drawn_BL.sum(1), "loss": loss_B}
        watched = {f"{log_as}/{name}": value for name, value in parts.items()} | {"train/loss": loss_B}
        weight_B = weight_N[part].to(device)
        yield Update(
            loss=(weight_B * loss_B).sum(),
            step=part.stop >= len(texts),
            metrics={name: (weight_B * value.detach()).sum().item() for name, value in watched.items()},
            optimizer=optimizer,
        )
    difference, ratio = world.gather(np.array([[difference, ratio]])).max(0).tolist()
    of = "" if log_as == "lm" else f"_{log_as}"
    metrics = {f"parity/token_log_prob{of}": difference, f"parity/token_ratio{of}": ratio}
    yield Update(loss=None, step=False, metrics=metrics)
