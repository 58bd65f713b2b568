"""What a request that says nothing of its task asks of a card, and what it brings where it only checks something."""

from __future__ import annotations

import torch
from torch import Tensor

from cards.card import ModelCard
from inference.request import Request


def plain_task(card: ModelCard) -> str:
    """The task of a request for a clip: text to video, or the card's first where it has no such task."""
    return Request.task if Request.task in card.programs else next(iter(card.programs))


def as_it_is(card: ModelCard) -> bool | None:
    """``refine`` of a request whose prompt the generator is to get word for word."""
    return False if any(node.when == "refined" for node in card.programs[plain_task(card)].nodes) else None


def plain_inputs(card: ModelCard) -> dict[str, Tensor] | None:
    """Tensors as the plain task declares them, every value as likely, the same at every call; None where it has none.

    An axis of any length is as long as the card's clips where it is named as one of their sizes, else 1.
    """
    sampling = card.sampling.model_dump()
    generator = torch.Generator("cpu").manual_seed(0)
    inputs: dict[str, Tensor] = {}
    for declared in card.programs[plain_task(card)].inputs:
        shape = [axis if isinstance(axis, int) else sampling.get(axis, 1) for axis in declared.shape]
        values = torch.rand(shape, generator=generator) * (declared.high - declared.low) + declared.low
        inputs[declared.name] = values.to(getattr(torch, declared.dtype))
    return inputs if inputs else None
