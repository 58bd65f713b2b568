"""What the methods of a causal card share: its rollout loop, and what it must be."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue

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


def on_ladder(card: ModelCard, ladder: Sequence[float], **options: JsonValue) -> ModelCard:
    """The causal card with its rollouts on ``ladder`` (sigmas, descending) and with changed options of its loop."""
    spec = rollout_spec(card)
    name = next(lid for lid, loop in card.loops.items() if loop is spec)
    schedule = spec.schedule.model_copy(update={"ladder": tuple(ladder)})
    loop = spec.model_copy(update={"schedule": schedule, "options": {**spec.options, **options}})
    return card.model_copy(
        update={
            "loops": {**card.loops, name: loop},
            "sampling": card.sampling.model_copy(update={"steps": len(ladder)}),
        }
    )
