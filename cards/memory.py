"""The size of a forward, as far as its activations go: what a family's ``PEAK_BYTES`` functions take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardSize:
    """One forward's input; the clip's part is 0 for a text alone."""

    rows: int
    """Length of the batch dim."""
    frames: int = 0
    """Latent frames."""
    height: int = 0
    """Latent cells."""
    width: int = 0
    """Latent cells."""
    tokens: int = 0
    """Transformer tokens of a row's clip."""
    text_tokens: int = 0
    """Tokens of a row's text, padding included; of a language model the new ones."""
    past_tokens: int = 0
    """Tokens of a row whose keys and values a language model reads, padding included."""

    @property
    def cells(self) -> int:
        return self.frames * self.height * self.width
