"""Token sampling as pure functions of one position's logits: temperature, top-k, top-p, the draw, the log-prob.

Filters in the order and with the meaning of transformers' warpers: temperature, then top-k, then top-p (nucleus
sampling, Holtzman et al. 2020, arXiv 1904.09751). The draw is by inverse distribution function from one number of the
request's own CPU generator, in float64, so that it depends neither on the device nor on what shared the forward.

Legend: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprob(logits_V: Tensor, token: int) -> Tensor:
    """log p(token), a float64 scalar on CPU, of the model's own distribution.

    Log-softmax of the raw logits in float64: temperature 1, no top-k, no top-p, whatever the token was drawn with.
    """
    return torch.log_softmax(logits_V.double(), dim=-1)[token].cpu()


def token_probabilities(logits_V: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(V,) float64 on CPU, summing to 1: what a draw at ``temperature`` > 0 takes a token with.

    Top-k keeps every token as likely as the k-th; top-p keeps the fewest of the most likely whose sum reaches
    ``top_p``, at least one.
    """
    scaled_V = logits_V.detach().cpu().double() / temperature
    if 0 < top_k < scaled_V.numel():
        kth = torch.topk(scaled_V, top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < kth, -torch.inf)
    if top_p < 1:
        ordered_V, order_V = torch.sort(scaled_V, descending=True, stable=True)
        p_V = torch.softmax(ordered_V, dim=-1)
        before_V = torch.cumsum(p_V, dim=-1) - p_V
        dropped_V = before_V >= top_p
        dropped_V[0] = False
        scaled_V = scaled_V.masked_fill(torch.zeros_like(dropped_V).scatter(0, order_V, dropped_V), -torch.inf)
    return torch.softmax(scaled_V, dim=-1)


def draw(p_V: Tensor, generator: torch.Generator) -> int:
    """The first token whose cumulative probability exceeds a uniform number in [0, 1); one number a call."""
    cumulative_V = torch.cumsum(p_V, dim=-1)
    u = torch.rand((), dtype=torch.float64, generator=generator)
    index = int(torch.searchsorted(cumulative_V, u * cumulative_V[-1], right=True))
    # u * total may round up to the total itself: the last token that has a probability is then the one.
    return min(index, int(torch.nonzero(p_V)[-1]))


def choose(logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """The next token id; temperature 0 takes the most likely and draws nothing.

    Raises ``FloatingPointError`` where the logits hold a NaN or no finite value.
    """
    if not bool(torch.isfinite(logits_V.max())):
        raise FloatingPointError("the logits of the next token are not finite: the model's weights or its input broke")
    if temperature == 0:
        return int(torch.argmax(logits_V, dim=-1))
    return draw(token_probabilities(logits_V, temperature=temperature, top_k=top_k, top_p=top_p), generator)


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """``text`` before the first stop string in it; None when it holds none."""
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(found)] if found else None
