"""The cost figures of every card that an engine runs, kept from run to run where it has a folder for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cards.card import ModelCard
from inference.cost import CostBook, device_name, workload_of
from inference.estimate import tokens_of_call
from loops.loop import ModelCall


class Books:
    """A :class:`CostBook` a card.

    Args:
        folder: where they are read from and written to; None keeps nothing.
    """

    def __init__(self, device: torch.device, folder: Path | None = None):
        self._device = device_name(str(device))
        self._folder = folder
        self._books: dict[int, tuple[ModelCard, CostBook]] = {}
        """id of a card -> the card, which keeps the id alive, and its book; a digest a step would cost too much."""
        self._by_digest: dict[str, CostBook] = {}

    def of(self, card: ModelCard) -> CostBook:
        """The card's book, made or read at its first use."""
        found = self._books.get(id(card))
        if found is None:
            book = self._by_digest.get(card.digest)
            if book is None:
                book = CostBook.of(card, self._device)
                if self._folder is not None:
                    book.load(self._folder)
                self._by_digest[card.digest] = book
            found = self._books[id(card)] = (card, book)
        return found[1]

    def observe(self, card: ModelCard, call: ModelCall, seconds: float) -> None:
        """Takes the measured seconds of a forward."""
        self.of(card).observe(workload_of(call, tokens_of_call(call, card)), seconds)

    def figures(self) -> list[dict[str, Any]]:
        """The routing figures of every card."""
        return [book.figures() for book in self._by_digest.values()]

    def save(self) -> None:
        if self._folder is None:
            return
        for book in self._by_digest.values():
            book.save(self._folder)
