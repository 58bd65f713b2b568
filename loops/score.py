"""The score loop: pictures of a clip are compared with its prompt, a few in each forward.

A picture is a frame, or several frames side by side for a model that was trained to see motion in them. A row of a call
is one picture beside its request's text embedding, so equal calls of different requests merge whatever their prompts
and clip sizes. Pictures are prepared a forward ahead, never all at once.

Legend: F frames, P pictures, H W pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loops.loop import (
    Done,
    Instance,
    Loop,
    LoopContext,
    LoopResult,
    LoopState,
    ModelCall,
    Resources,
    StepResult,
    WorkPlan,
    WorkUnit,
)


@dataclass(frozen=True)
class ScoreParams:
    """What the score loop needs of a request, resolved and checked against the card."""

    frames: int
    """How many frames are looked at, spread evenly; at most as many as there are."""
    rows: int
    """Pictures in one forward, at most."""
    divisor: float
    """Similarities are divided by it."""
    grid: int = 1
    """A picture holds ``grid`` x ``grid`` frames in reading order."""
    seed: int = 0
    """Nothing is drawn."""

    @property
    def guided(self) -> bool:
        """A score has no unconditional branch."""
        return False

    @property
    def pictures(self) -> int:
        """How many pictures the frames make."""
        return math.ceil(self.frames / self.grid**2)

    @property
    def steps(self) -> int:
        """Forwards over pictures."""
        return math.ceil(self.pictures / self.rows)


@dataclass(frozen=True)
class Score:
    """What the loop leaves."""

    value: float
    """Mean over the pictures."""
    frames_F: Tensor
    """(P,) float64 on CPU: the score of each picture."""
    indices: tuple[int, ...]
    """Which frames of the clip were looked at."""


class ScoreLoop(Loop):
    """``score``: one REWARD_BATCH for every ``rows`` pictures; reads the slots ``text`` (1, D) and ``pixels``."""

    def init(self, params: ScoreParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None and params is not None
        frames_FHWC: Tensor = ctx.slots["pixels"]
        indices = spread(len(frames_FHWC), params.frames)
        pictures_PHWC = tiled(frames_FHWC[indices], params.grid)
        return LoopState(
            step=0,
            total=params.steps,
            params=params,
            tensors={
                "frames": pictures_PHWC,
                "text": ctx.slots["text"],
                "pixels": instance.pixels(pictures_PHWC[: params.rows]),
            },
            captured={"scores": []},
            facts={"component": ctx.spec.components["scorer"], "cost": ctx.spec.cost, "indices": tuple(indices)},
            shared={"pixels": instance.pixels},
        )

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step >= state.total:
            return Done()
        pixels_BCSS, cost = state.tensors["pixels"], state.facts["cost"]
        rows = len(pixels_BCSS)
        text_BD = state.tensors["text"].expand(rows, -1)
        return WorkPlan(
            unit=WorkUnit.REWARD_BATCH,
            calls=(ModelCall(state.facts["component"], "score", {"pixels": pixels_BCSS, "text": text_BD}),),
            label=f"score {state.step + 1}/{state.total}",
            resources=Resources(seconds=cost.base_seconds + cost.per_token_seconds * rows),
        )

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        state.captured["scores"].append(result.outputs[0].detach().double().cpu() / state.params.divisor)
        step, rows = state.step + 1, state.params.rows
        tensors = {**state.tensors}
        if step < state.total:
            tensors["pixels"] = state.shared["pixels"](tensors["frames"][step * rows : (step + 1) * rows])
        return replace(state, step=step, tensors=tensors)

    def finalize(self, state: LoopState) -> LoopResult:
        scores_F = torch.cat(state.captured["scores"])
        return LoopResult(Score(scores_F.mean().item(), scores_F, state.facts["indices"]))


def spread(total: int, wanted: int | None) -> list[int]:
    """Indices of ``wanted`` frames out of ``total``: the middles of equal stretches; all of them when fewer exist."""
    if wanted is None or wanted >= total:
        return list(range(total))
    return [int((i + 0.5) * total / wanted) for i in range(wanted)]


def tiled(frames_FHWC: Tensor, grid: int) -> Tensor:
    """(P, grid H, grid W, 3): every ``grid`` x ``grid`` frames as one picture, in reading order; the last frame fills
    up the last picture. ``grid`` 1 gives the frames."""
    if grid == 1:
        return frames_FHWC
    short = -len(frames_FHWC) % grid**2
    whole_FHWC = torch.cat([frames_FHWC, frames_FHWC[-1:].expand(short, -1, -1, -1)])
    _, height, width, channels = whole_FHWC.shape
    cells = whole_FHWC.reshape(-1, grid, grid, height, width, channels).transpose(2, 3)
    return cells.reshape(-1, grid * height, grid * width, channels)
