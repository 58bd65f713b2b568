"""Worst-case bytes of a chain of experts: as on the unified card."""

from cards.unified.memory import HELD_BYTES, PEAK_BYTES

__all__ = ["HELD_BYTES", "PEAK_BYTES"]
