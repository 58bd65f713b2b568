"""What an operator may set, and the bounds that keep one client from starving the others."""

from __future__ import annotations

from dataclasses import dataclass

from cards.card import ModelCard
from cards.errors import UserError
from inference.admission import Budget


@dataclass(frozen=True)
class Settings:
    """Bounds of a server."""

    max_running: int = 8
    """Requests whose steps interleave; further ones wait."""
    max_queue: int = 64
    """Requests that wait; past it, 429."""
    max_work: float = 16.0
    """Largest frames x pixels x steps of one request, in multiples of the card's default request."""
    max_kept: int = 256
    """Finished videos that can still be fetched; older ones are dropped."""
    max_body_bytes: int = 2**20
    max_prompt_chars: int = 8000
    stall_seconds: float = 600.0
    """A single round of the engine that takes longer makes the server not ready."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_queue", "max_kept"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if not self.max_work > 0:
            raise UserError(f"max_work: got {self.max_work}, expected a number above 0")

    def budget(self) -> Budget:
        """What the server's engine may have in flight."""
        return Budget(slots=self.max_running)

    def work_limit(self, card: ModelCard) -> int:
        """Largest frames x pixels x steps that the server takes for a card."""
        s = card.sampling
        return int(self.max_work * s.frames * s.height * s.width * s.steps)
