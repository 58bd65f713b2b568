"""The score loop: which frames it looks at, its steps, and a state that can be put to rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inference.engine import Engine
from inference.instance import ModelInstance
from loops.component import ComponentLoop
from loops.drive import drive
from loops.loop import Done, LoopContext, LoopState, StepResult, WorkPlan, WorkUnit
from loops.score import ScoreLoop, ScoreParams, spread, tiled
from tests.support.tiny_clip import SIDE, save_tiny_clip

FRAMES = torch.randint(0, 256, (7, 20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    return Engine().load(save_tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def ctx(clip: ModelInstance) -> LoopContext:
    encode = clip.card.programs["score"].nodes[0]
    text = drive(ComponentLoop(encode), None, clip, LoopContext(spec=None, slots={"prompt": "a red cube"})).value  # type: ignore[arg-type]
    return LoopContext(spec=clip.card.loops["score"], slots={"text": text, "pixels": FRAMES})


def walk(clip: ModelInstance, state: LoopState, upto: int | None = None) -> tuple[LoopState, list[WorkPlan]]:
    loop, plans = ScoreLoop(), []
    while (upto is None or len(plans) < upto) and not isinstance(plan := loop.next(state), Done):
        plans.append(plan)
        state = loop.advance(state, StepResult(tuple(clip.call(call) for call in plan.calls)))
    return state, plans


def test_spread() -> None:
    assert spread(9, 1) == [4]
    assert spread(81, 4) == [10, 30, 50, 70]
    assert spread(2, 4) == [0, 1]
    assert spread(3, None) == [0, 1, 2]


def test_a_long_clip_is_several_steps_of_at_most_rows_frames(clip: ModelInstance, ctx: LoopContext) -> None:
    params = ScoreParams(frames=7, rows=3, divisor=1.0)
    state, plans = walk(clip, ScoreLoop().init(params, clip, ctx))
    assert params.steps == 3
    assert [plan.calls[0].rows for plan in plans] == [3, 3, 1]
    assert [plan.label for plan in plans] == ["score 1/3", "score 2/3", "score 3/3"]
    assert all(plan.unit is WorkUnit.REWARD_BATCH and plan.unit == ctx.spec.unit for plan in plans)  # type: ignore[union-attr]
    assert all(plan.calls[0].tensors["pixels"].shape[1:] == (3, SIDE, SIDE) for plan in plans)
    assert plans[0].resources.seconds > plans[2].resources.seconds > 0
    score = ScoreLoop().finalize(state).value
    assert score.indices == tuple(range(7))
    assert score.frames_F.shape == (7,)
    assert score.value == score.frames_F.mean().item()


def test_frames_in_other_portions_score_the_same(clip: ModelInstance, ctx: LoopContext) -> None:
    scores: list[Any] = []
    for rows in (1, 3, 7, 100):
        params = ScoreParams(frames=7, rows=rows, divisor=1.0)
        scores.append(drive(ScoreLoop(), params, clip, ctx).value.frames_F)  # type: ignore[arg-type]
    assert scores[0].std() > 1e-3  # the frames do differ
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=0, atol=1e-5)


def test_only_the_chosen_frames_are_looked_at(clip: ModelInstance, ctx: LoopContext) -> None:
    every = drive(ScoreLoop(), ScoreParams(7, 1, 1.0), clip, ctx).value  # type: ignore[arg-type]
    some = drive(ScoreLoop(), ScoreParams(2, 1, 1.0), clip, ctx).value  # type: ignore[arg-type]
    assert some.indices == (1, 5)
    assert torch.equal(some.frames_F, every.frames_F[[1, 5]])
    halved = drive(ScoreLoop(), ScoreParams(2, 1, 2.0), clip, ctx).value  # type: ignore[arg-type]
    assert torch.equal(halved.frames_F, some.frames_F / 2)


def test_a_state_that_was_saved_goes_on_to_the_bit(clip: ModelInstance, ctx: LoopContext) -> None:
    start = ScoreLoop().init(ScoreParams(frames=7, rows=3, divisor=1.0), clip, ctx)
    expected = ScoreLoop().finalize(walk(clip, LoopState.resume(start.save(), start.shared))[0]).value
    middle, _ = walk(clip, start, upto=1)
    rested = LoopState.resume(middle.save(), middle.shared)
    assert torch.equal(ScoreLoop().finalize(walk(clip, rested)[0]).value.frames_F, expected.frames_F)


def test_a_grid_of_frames_is_one_picture_in_reading_order() -> None:
    levels = torch.arange(1, 7, dtype=torch.uint8)
    frames = levels[:, None, None, None].expand(-1, 2, 3, 3)
    first, second = tiled(frames, 2)
    assert first.shape == (4, 6, 3)
    assert first[::2, ::3, 0].tolist() == [[1, 2], [3, 4]]
    assert second[::2, ::3, 0].tolist() == [[5, 6], [6, 6]]  # the last frame fills up
    assert torch.equal(first[:2, :3], frames[0]) and torch.equal(first[2:, 3:], frames[3])
    assert tiled(frames, 1) is frames


def test_a_picture_of_several_frames_is_one_row(clip: ModelInstance, ctx: LoopContext) -> None:
    params = ScoreParams(frames=7, rows=1, divisor=1.0, grid=2)
    assert (params.pictures, params.steps) == (2, 2)
    state, plans = walk(clip, ScoreLoop().init(params, clip, ctx))
    assert [plan.calls[0].rows for plan in plans] == [1, 1]
    pictures = LoopContext(spec=ctx.spec, slots={**ctx.slots, "pixels": tiled(FRAMES, 2)})
    expected = drive(ScoreLoop(), ScoreParams(2, 1, 1.0), clip, pictures).value  # type: ignore[arg-type]
    score = ScoreLoop().finalize(state).value
    assert torch.equal(score.frames_F, expected.frames_F)
    assert score.indices == tuple(range(7))
