"""Denoising that does less where a request's own content allows it: steps that reuse, blocks that reuse, an early end.

Three kinds, each the base loop with one change, and the base loop bit for bit at threshold 0:

- ``diffusion_denoise_skip`` evaluates nothing in a step whose input has hardly moved since the last evaluation: the
  accumulated relative L1 change of the network's input is under the threshold. The criterion is TeaCache's (Liu et al.
  2024, arXiv 2411.19108) on the plain noisy latents, without its polynomial fitted for each model. What is
  reused is each guidance branch's velocity, held or drawn on along a line through the last two.
- ``diffusion_denoise_first_block`` evaluates the first block of the network, and the others only when its residual has
  changed (First Block Cache of ParaAttention, as diffusers ships it). The forward decides; the loop carries its memory.
- ``diffusion_denoise_exit`` ends at the predicted clean latents once they have stopped changing.

State is in ``LoopState.plugins``, keyed (plugin, guidance branch), so that it goes with the request; nothing is kept
on a module. A few-rung distilled card refuses all three: each of its rungs is needed. The loops do not compose: reused
velocities hold the prediction still, which is what an early end waits for. Knows nothing about a family's network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from cards.card import LoopMismatchError, LoopSpec, ModelCard
from cards.errors import UserError
from cards.prediction import velocity_to_x0
from loops.denoise import DenoiseLoop
from loops.loop import Instance, LoopContext, LoopState, ModelCall, SamplingParams, StepResult
from loops.options import LoopOptions, read_options

MAIN = "main"
"""Branch of what all guidance branches share, such as the network's input."""
DRIFT = ("skip_drift", MAIN)
SETTLED = ("exit_settled", MAIN)
VELOCITY = "skip_velocity"
FIRST_BLOCK = "first_block"


def relative_change(now: Tensor, before: Tensor) -> float:
    """``|now - before|_1 / |before|_1``, TeaCache's relative L1 distance; nan where both are all zero."""
    return ((now - before).abs().mean() / before.abs().mean()).item()


class AdaptiveOptions(LoopOptions):
    """What the three kinds have in common."""

    threshold: float = Field(ge=0)
    """Relative L1 change under which something is left out; 0 leaves out nothing."""

    def check(self, spec: LoopSpec, card: ModelCard) -> None:
        ladder = spec.schedule.ladder
        if ladder is not None:
            raise LoopMismatchError(
                f"card {card.name!r}: got loop kind {spec.kind!r} for weights distilled for the ladder {list(ladder)}, "
                "which need every rung; use kind 'diffusion_denoise'"
            )
        if not spec.dynamic_stop:
            raise UserError(
                f"card {card.name!r}: got dynamic_stop=false for loop kind {spec.kind!r}, whose work depends on the "
                "request's content; set it to true"
            )


# -- whole steps


class SkipOptions(AdaptiveOptions):
    """Options of ``diffusion_denoise_skip``."""

    order: Literal[0, 1] = 0
    """0 holds the last velocity; 1 draws on the line through the last two evaluated, in sigma."""
    first: int = Field(default=1, ge=1)
    """Steps at the start that are always evaluated."""
    last: int = Field(default=1, ge=0)
    """Steps at the end that are always evaluated."""
    most_in_a_row: int | None = Field(default=None, ge=1)
    """Skipped steps between two evaluated ones, at most; None: any number."""


@dataclass(frozen=True)
class Drift:
    """How far the network's input has moved since the last evaluation."""

    latents: Tensor
    """Input of the latest step, evaluated or not."""
    accumulated: float = 0.0
    in_a_row: int = 0
    """Steps skipped since."""


@dataclass(frozen=True)
class Evaluated:
    """One branch's latest evaluations, newest first, at most two."""

    sigmas: tuple[float, ...]
    velocities: tuple[Tensor, ...]

    def then(self, sigma: float, velocity: Tensor, order: int) -> Evaluated:
        """With one more; a copy of its own rows, since a merged forward's result keeps the whole batch alive."""
        kept = order + 1
        return Evaluated((sigma, *self.sigmas)[:kept], (velocity.clone(), *self.velocities)[:kept])

    def at(self, sigma: float) -> Tensor:
        """Velocity at ``sigma``: the last one, or on the line through the last two."""
        if len(self.velocities) < 2:
            return self.velocities[0]
        (s1, s2), (v1, v2) = self.sigmas, self.velocities
        return v1 + (sigma - s1) / (s1 - s2) * (v1 - v2)


class SkipLoop(DenoiseLoop):
    """``diffusion_denoise_skip``. Skipped steps are solver steps as all others, taken by ``advance`` itself: no plan
    of theirs is ever given, so that no runner sees a step without calls."""

    takes_sde = False

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None
        options = read_options(SkipOptions, ctx.spec, instance.card)
        state = super().init(params, instance, ctx)
        branches = tuple(call.branch for call in self.calls(state))
        return replace(state, facts={**state.facts, "skip": options, "branches": branches})

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        options = state.facts["skip"]
        if options.threshold == 0:
            return super().advance(state, result)
        state = self._evaluated(state, result, options)
        state = super().advance(state, result)
        while (accumulated := self._accumulated(state, options)) < options.threshold:
            state = self._skip(state, accumulated)
        return state

    def _evaluated(self, state: LoopState, result: StepResult, options: SkipOptions) -> LoopState:
        """The state that remembers what was evaluated at its step."""
        sigma = float(state.solver.sigmas[state.step])
        plugins = {**state.plugins, DRIFT: Drift(state.tensors["latents"])}
        for branch, velocity in zip(state.facts["branches"], result.outputs, strict=True):
            before: Evaluated = plugins.get((VELOCITY, branch), Evaluated((), ()))
            plugins[VELOCITY, branch] = before.then(sigma, velocity, options.order)
        return replace(state, plugins=plugins)

    def _accumulated(self, state: LoopState, options: SkipOptions) -> float:
        """Change of the input since the last evaluation; inf where the step must be evaluated."""
        drift: Drift = state.plugins[DRIFT]
        forced = state.step < options.first or state.step >= state.total - options.last
        if forced or drift.in_a_row == options.most_in_a_row:
            return float("inf")
        return drift.accumulated + relative_change(state.tensors["latents"], drift.latents)

    def _skip(self, state: LoopState, accumulated: float) -> LoopState:
        """A solver step with what the branches remember."""
        sigma = float(state.solver.sigmas[state.step])
        reused = tuple(state.plugins[VELOCITY, branch].at(sigma) for branch in state.facts["branches"])
        drift = Drift(state.tensors["latents"], accumulated, state.plugins[DRIFT].in_a_row + 1)
        return super().advance(replace(state, plugins={**state.plugins, DRIFT: drift}), StepResult(reused))


# -- blocks of a forward


@dataclass
class BlockMemory:
    """What the forwards of one branch remember of each other. The operation reads and replaces ``fields``."""

    fields: dict[str, Any] = field(default_factory=dict)
    forwards: int = 0
    skipped: int = 0
    """Forwards that evaluated the first block alone."""
    batch_key: ClassVar[None] = None
    """Such a forward is merged with no other: it would decide for all its rows at once."""


class FirstBlockLoop(DenoiseLoop):
    """``diffusion_denoise_first_block``: the family's operation ``velocity_first_block`` in place of ``velocity``.

    Under the guidance policy ``sequential`` each branch decides for itself, as in the library's pipeline; ``batched``
    is one forward and decides for both.
    """

    takes_sde = False

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None
        options = read_options(AdaptiveOptions, ctx.spec, instance.card)
        state = super().init(params, instance, ctx)
        memories = {(FIRST_BLOCK, call.branch): BlockMemory() for call in super().calls(state)}
        return replace(state, plugins=memories, facts={**state.facts, "threshold": options.threshold})

    def calls(self, state: LoopState) -> tuple[ModelCall, ...]:
        calls, threshold = super().calls(state), state.facts["threshold"]
        if threshold == 0:
            return calls
        return tuple(
            replace(
                call,
                method="velocity_first_block",
                static={**call.static, "threshold": threshold},
                state=state.plugins[FIRST_BLOCK, call.branch],
            )
            for call in calls
        )


# -- an early end


class ExitOptions(AdaptiveOptions):
    """Options of ``diffusion_denoise_exit``."""

    patience: int = Field(default=2, ge=1)
    """Steps in a row whose prediction must be this close to the one before."""


@dataclass(frozen=True)
class Settled:
    """The latest prediction of the clean latents."""

    x0: Tensor
    in_a_row: int = 0
    """Steps in a row in which it changed by less than the threshold."""


class ExitLoop(DenoiseLoop):
    """``diffusion_denoise_exit``: the result is then the prediction, ``x0 = x - sigma v`` after guidance."""

    takes_sde = False

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None
        options = read_options(ExitOptions, ctx.spec, instance.card)
        state = super().init(params, instance, ctx)
        return replace(state, facts={**state.facts, "exit": options})

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        options: ExitOptions = state.facts["exit"]
        moved = super().advance(state, result)
        if options.threshold == 0 or moved.step >= moved.total:
            return moved
        latents = state.tensors["latents"]
        sigma = float(state.solver.sigmas[state.step])
        x0 = velocity_to_x0(latents, self.guided_velocity(state, result), sigma).to(latents.dtype)
        before: Settled | None = state.plugins.get(SETTLED)
        quiet = before is not None and relative_change(x0, before.x0) < options.threshold
        settled = Settled(x0, before.in_a_row + 1 if before is not None and quiet else 0)
        if settled.in_a_row < options.patience:
            return replace(moved, plugins={**moved.plugins, SETTLED: settled})
        return replace(moved, total=moved.step, tensors={**moved.tensors, "latents": x0})
