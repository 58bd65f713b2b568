"""The numerics of a run: what a method's choice makes of a card, and what the card may then still promise."""

from __future__ import annotations

from cards.card import ModelCard

FOLDED_TOLERANCE = 1e-3
"""Of C0 and C1 against the library, on latents of unit scale: folded text padding is the same function in another order
of summation. Measured on the bundled card and on its NFT exports: up to 1.6e-4, with guidance 5."""


def with_text_padding(card: ModelCard, padding: str) -> ModelCard:
    """The card with its prompts' padding ``full`` or ``folded``; folded ones promise the library's bits no more."""
    precision = card.precision.model_copy(update={"text_padding": padding})
    if padding == "full" or card.precision.text_padding == padding:
        return card.model_copy(update={"precision": precision})
    looser = {level: max(FOLDED_TOLERANCE, card.parity.tolerances[level]) for level in ("C0", "C1")}
    parity = card.parity.model_copy(update={"tolerances": {**card.parity.tolerances, **looser}})
    return card.model_copy(update={"precision": precision, "parity": parity})
