"""What the methods of a causal card share: its rollout loop, and what it must be."""

from __future__ import annotations

from cards.card import LoopSpec, ModelCard
from inference.request import Request
from inference.resolve import CHUNK_LOOP, denoise_spec


def rollout_spec(card: ModelCard) -> LoopSpec:
    """The loop that a plain request to the card runs."""
    return denoise_spec(card, Request.task)


def causal_problems(card: ModelCard) -> list[str]:
    """What keeps a card from being trained as a causal one."""
    spec = rollout_spec(card)
    if spec.kind == CHUNK_LOOP:
        return []
    return [f"card {card.name!r} runs {spec.kind}, expected a causal card, such as card=wan_causal"]
