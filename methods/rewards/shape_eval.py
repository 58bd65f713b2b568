"""ShapeEval as a reward: does the video show the shapes, colours, motions, places and counts of its caption?

Knows how a verdict becomes a number. Leaves looking at pixels to ``methods.shapeworld.judge``.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from cards.errors import UserError, unknown_name
from methods.rewards.reward import Reward, RewardBatch, Scores, attempt
from methods.shapeworld.judge import Verdict, judge

Target = Literal["score", "all_correct", "blend"]
CATEGORIES = ("valid", "colour", "shape", "motion", "two_objects", "position", "count")
PARTS = (*CATEGORIES, "all_correct", "score")


class ShapeEvalReward(Reward):
    """The judge's verdict as a number in 0..1; rule-based, no weights.

    Judged is the caption that a sample's metadata calls its ``meaning``, else its prompt.

    ``parts`` hold each category (NaN = the caption does not ask for it), ``all_correct`` and ``score``. A prompt that
    is no ShapeWorld caption is masked.

    Args:
        target: ``score`` = graded, ``all_correct`` = 1 when nothing is wrong, ``blend`` = mean of the two.
    """

    name = "shape_eval"

    def __init__(self, *, target: Target = "score") -> None:
        if target not in get_args(Target):
            raise unknown_name("target for reward shape_eval", str(target), get_args(Target))
        self.target = target
        self.version = f"1 {target}"

    def part_names(self) -> tuple[str, ...]:
        return PARTS

    def score(self, batch: RewardBatch) -> Scores:
        def one(i: int) -> Verdict:
            try:
                meaning = batch.metadata[i].get("meaning", batch.prompts[i])
                return judge(np.asarray(batch.videos_BFHWC[i]), meaning)
            except UserError as error:  # about this sample alone: nothing here can be misconfigured
                raise ValueError(str(error)) from error

        verdicts, reasons = attempt(self.name, len(batch), one)
        parts = {name: _column(verdicts, name) for name in PARTS}
        if self.target == "blend":
            values = (parts["score"] + parts["all_correct"]) / 2
        else:
            values = parts[self.target].copy()
        return Scores(values=values, parts=parts, reasons=reasons)


def _column(verdicts: list[Verdict | None], name: str) -> np.ndarray:
    """One field of all verdicts as numbers; NaN for no verdict and for a category that was not asked."""
    cells = [None if verdict is None else getattr(verdict, name) for verdict in verdicts]
    return np.array([np.nan if cell is None else float(cell) for cell in cells], dtype=np.float64)
