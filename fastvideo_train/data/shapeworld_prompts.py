"""ShapeWorld captions as a prompt stream: made up on the spot, never one of the held-out evaluation prompts."""

from __future__ import annotations

import numpy as np

from fastvideo_train.data.prompts import Prompt, PromptSource
from methods.shapeworld.heldout import training_caption


class ShapeWorldPrompts(PromptSource):
    """Draw ``i`` of the stream is ``training_caption`` with a generator of its own, seeded by (seed, i).

    Args:
        seed: of the draws.
    """

    def at(self, position: int) -> Prompt:
        return Prompt(training_caption(np.random.default_rng([self.seed, position])))

    def digest(self) -> str:
        return "shapeworld"
