"""Options of a loop kind: the part of a card's loop spec that this kind alone reads, as checked data.

Knows how options are parsed and how a mistake is reported; each kind says in its own file what they are.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cards.card import LoopSpec, ModelCard
from cards.errors import UserError


class LoopOptions(BaseModel):
    """Options of a kind that has none; others derive from it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def check(self, spec: LoopSpec, card: ModelCard) -> None:
        """Raises ``UserError`` where the options, each valid by itself, do not fit the rest of the spec or the card."""

    def check_params(self, params: Any, spec: LoopSpec, card: ModelCard) -> None:
        """Raises ``UserError`` for a request's settled ``params`` that the kind cannot run."""


Options = TypeVar("Options", bound=LoopOptions)


def read_options(kind: type[Options], spec: LoopSpec, card: ModelCard) -> Options:
    """The spec's options; raises ``UserError`` that names every unknown, missing or wrong one."""
    try:
        options = kind.model_validate_json(json.dumps(spec.options))
    except ValidationError as error:
        rows = [f"{'.'.join(map(str, e['loc']))}: got {e['input']!r}, {e['msg']}" for e in error.errors()]
        known = ", ".join(kind.model_fields) if kind.model_fields else "none"
        raise UserError(
            f"card {card.name!r}, loop kind {spec.kind!r}: wrong options: {'; '.join(rows)} (its options: {known})"
        ) from None
    options.check(spec, card)
    return options
