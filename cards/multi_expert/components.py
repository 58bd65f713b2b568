"""What the components of a chain of experts compute: as on the unified card."""

from cards.unified.components import OPERATIONS, PREPARE

__all__ = ["OPERATIONS", "PREPARE"]
