"""Instructions for ShapeWorld scenes in words that the generator never saw, as a prompt stream.

A prompt's metadata has its ``meaning``, a caption of the scene, which ShapeEval judges in place of the instruction.
"""

from __future__ import annotations

import numpy as np

from fastvideo_train.data.prompts import Prompt, PromptSource
from methods.shapeworld.phrasing import Instruction, held_out_instructions, training_instruction


class PhrasingPrompts(PromptSource):
    """Draw ``i`` of the stream is ``training_instruction`` with a generator of its own, seeded by (seed, i); an
    evaluation asks the fixed instructions that training never sees.

    Args:
        seed: of the draws.
    """

    def at(self, position: int) -> Prompt:
        return _prompt(training_instruction(np.random.default_rng([self.seed, position])))

    def held_out(self, count: int) -> list[Prompt]:
        return [_prompt(instruction) for instruction in held_out_instructions()[:count]]

    def digest(self) -> str:
        return "shapeworld phrasings"


def _prompt(instruction: Instruction) -> Prompt:
    return Prompt(instruction.text, {"meaning": instruction.meaning, "kind": instruction.kind})
