"""The nodes of a chain: one refinement an expert, each of the text that the one before it left; then Wan2.1's."""

from __future__ import annotations

from cards.unified.program import REFINE


def refinement(expert: str) -> str:
    """Id of an expert's node and of its loop."""
    return f"{REFINE}_{expert}"
