"""Where a card comes from, and how two cards differ: data alone, no tables.

A derived card holds only its parents' digests. Names come from cards that are at hand: those given, the exports beside
them, and the registered cards, each also in the numerics that a run may have trained it in (``precision`` and
``text_padding`` are part of a digest). A parent that none of them is stays a digest.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cards.card import CARD_FILE, ModelCard
from cards.errors import UserError
from cards.registry import FAMILIES

COMPUTE = ("float32", "bfloat16")
PADDINGS = ("full", "folded")
RUN_EXPORTS = f"*/export/{CARD_FILE}"
"""Of a folder of runs."""


@dataclass(frozen=True)
class Link:
    """One card of a chain; everything but the digest is empty where the card is not at hand."""

    digest: str
    name: str | None = None
    method: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    numerics: str | None = None
    """How its numerics differ from those of the card that was found, e.g. ``text_padding=folded``."""
    place: str | None = None
    """Folder that it was read from, or ``registered``."""


def chain(card: ModelCard, known: Mapping[str, Link]) -> list[Link]:
    """The card and its parents, nearest first; ``known`` from :func:`known_cards`."""
    return [known.get(digest, Link(digest)) for digest in (card.digest, *card.recipe.parents)]


def known_cards(given: Sequence[tuple[str, ModelCard]]) -> dict[str, Link]:
    """Digest -> link of all cards at hand; what was given, as (place, card), comes before what was found."""
    found = [*given, *_exports_beside(card.root for _, card in given), *_registered()]
    known: dict[str, Link] = {}
    for place, card in found:
        known.setdefault(card.digest, _link(card, card.digest, place, None))
    for place, card in found:
        for variant, numerics in _variants(card):
            known.setdefault(variant.digest, _link(card, variant.digest, place, numerics))
    return known


def _link(card: ModelCard, digest: str, place: str, numerics: str | None) -> Link:
    return Link(digest, card.name, card.recipe.method, card.recipe.metrics, numerics, place)


def _exports_beside(roots: Iterable[Path | None]) -> Iterator[tuple[str, ModelCard]]:
    """Cards of the runs beside ``<runs>/<run>/export`` and of ``outputs`` here; files that are no card are passed
    over, for nobody asked for them."""
    folders = [Path("outputs"), *(root.parent.parent for root in roots if root is not None)]
    for file in itertools.chain.from_iterable(sorted(folder.glob(RUN_EXPORTS)) for folder in dict.fromkeys(folders)):
        try:
            yield str(file.parent), ModelCard.load(file.parent)
        except (UserError, OSError, UnicodeDecodeError):
            continue


def _registered() -> Iterator[tuple[str, ModelCard]]:
    """The families' cards of every size that needs no source. No weights are read and nothing is fetched."""
    for entry in FAMILIES.values():
        for size in entry.sizes:
            with contextlib.suppress(UserError):
                yield "registered", entry.card(size)


def _variants(card: ModelCard) -> Iterator[tuple[ModelCard, str]]:
    """The card in the other numerics that a run's ``card.precision`` and ``method.text_padding`` make of it."""
    own = card.precision
    computes = [{"serve": own.serve, "train": own.train}, *({"serve": c, "train": c} for c in COMPUTE)]
    for compute, padding in itertools.product(computes, PADDINGS):
        precision = own.model_copy(update={**compute, "text_padding": padding})
        changed = {name: value for name, value in precision.model_dump().items() if value != getattr(own, name)}
        if changed:
            said = " ".join(f"{name}={value}" for name, value in changed.items())
            yield card.model_copy(update={"precision": precision}), said


@dataclass(frozen=True)
class Difference:
    """A field in which two cards differ; None where one has no such field, or has it empty."""

    field: str
    """Nested keys, joined by dots."""
    expected: Any
    got: Any


def differences(expected: ModelCard, got: ModelCard) -> list[Difference]:
    """What ``got`` says otherwise than ``expected``, field by field in the order of the cards."""
    left, right = (dict(_leaves(card.model_dump(mode="json"))) for card in (expected, got))
    return [
        Difference(name, left.get(name), right.get(name))
        for name in dict.fromkeys((*left, *right))
        if name not in left or name not in right or left[name] != right[name]
    ]


def _leaves(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(nested key, value); a list is one value unless it holds mappings, and an empty mapping is a value."""
    if isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        data = {str(i): item for i, item in enumerate(data)}
    if not isinstance(data, dict) or (name and not data):
        yield name, data
        return
    for key, value in data.items():
        yield from _leaves(value, f"{name}.{key}" if name else key)
