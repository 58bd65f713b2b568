"""The reference driver: a loop run in the plainest way. Every other runner must equal it bit for bit."""

from __future__ import annotations

from loops.loop import Done, Instance, Loop, LoopContext, LoopResult, SamplingParams, StepResult


def drive(loop: Loop, params: SamplingParams, instance: Instance, ctx: LoopContext) -> LoopResult:
    """Runs ``loop`` for one request, one call at a time."""
    state = loop.init(params, instance, ctx)
    while not isinstance(plan := loop.next(state), Done):
        outputs = tuple(instance.call(call, ctx.profile) for call in plan.calls)
        state = loop.advance(state, StepResult(outputs))
    return loop.finalize(state)
