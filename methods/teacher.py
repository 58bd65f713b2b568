"""The teacher of a distillation, where it is a card of its own: read from a method's options, checked, not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cards.card import ModelCard
from cards.errors import UserError
from cards.registry import family
from methods.latent_space import check_latent_space

PLACE = ("source", "revision")


def teacher_card(options: Mapping[str, Any], card: ModelCard) -> ModelCard:
    """The checked card of ``{name, size, source, revision}`` as a teacher of ``card``."""
    chosen = {"source": None, "revision": None, **known_keys("teacher", options, ("name", "size"), PLACE)}
    teacher = family(chosen["name"]).card(str(chosen["size"]), chosen["source"], chosen["revision"])
    teacher = teacher.model_copy(update={"precision": card.precision})
    teacher.validate()
    check_latent_space(card, teacher)
    return teacher


def known_keys(
    what: str, options: Mapping[str, Any], required: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """``options`` as a dict; raises ``UserError`` that names keys which are missing or unknown."""
    missing = [key for key in required if key not in options]
    unknown = sorted(set(options) - {*required, *optional})
    if missing or unknown:
        wrong = [f"no {key}" for key in missing] + [f"unknown key {key}" for key in unknown]
        raise UserError(f"method {what}: {', '.join(wrong)}; expected {', '.join((*required, *optional))}")
    return dict(options)
