"""The contract of a method: which roles it has and which losses it makes of a batch.

A method is a plain class. It knows maths and roles; it leaves optimizers' steps, clipping, EMA, checkpoints and
logging to the module that owns it, and rollouts to the engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cards.card import ModelCard
from cards.errors import UserError, unknown_name
from inference.artifact import Artifact
from inference.engine import Engine
from inference.parity.interleave import GateReport
from methods.rewards.reward import Reward
from methods.roles import STUDENT, LoRA, Roles
from methods.rollout import InProcess, RolloutPlan, RolloutRunner
from methods.world import World


@dataclass(frozen=True)
class Update:
    """A loss to descend, or metrics alone."""

    loss: Tensor | None
    """Scalar: this rank's mean, already weighted by its share of the optimizer step; None for metrics alone."""
    step: bool
    """True when the optimizer steps after this backward; False accumulates."""
    metrics: dict[str, float] = field(default_factory=dict)
    """This rank's; summed over the updates of a step, then averaged over ranks."""
    optimizer: str = STUDENT
    """What :meth:`Method.optimizers` calls the optimizer that steps; its gradient norm and learning rate are logged
    under that name."""


class MethodWarning(UserWarning):
    """A run that was seen to fail with such a card."""


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW of one role, or of one component beside the student's main one."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float | None
    """Largest gradient norm of its parameters; None clips nothing."""
    steps: int
    """Optimizer steps of a whole run, for the schedule."""


@dataclass(frozen=True)
class Baseline:
    """What the evaluation before training samples, when that is not the role that is trained."""

    role: str
    guidance: float | None


@dataclass(frozen=True)
class Context:
    """What a method works with."""

    card: ModelCard
    """What the student runs: see :meth:`Method.derive_card`."""
    engine: Engine
    roles: Roles
    world: World
    seed: int
    device: torch.device
    reward: Reward | None = None
    rollouts: RolloutRunner = None  # type: ignore[assignment]
    """Who runs the requests of a rollout; None is this process' engine."""

    def __post_init__(self) -> None:
        if self.rollouts is None:
            object.__setattr__(self, "rollouts", InProcess(self.engine, self.roles))


class Method(ABC):
    """Base of all methods; keyword-only arguments come from ``conf/method/<name>.yaml``.

    Args:
        lr, betas, weight_decay: of AdamW.
        clip: largest gradient norm; None clips nothing.
        steps: training steps of a whole run.
        warmup: optimizer steps over which the learning rate rises.
        lr_schedule: ``constant`` | ``cosine``, which falls to 0 over the run.
        batch_size: global items a step: clips for finetune, prompts for RL.
        ema: decay of an average of the student's weights, or None.
        ema_start: optimizer steps before the average starts; until then it copies.
        lora: rank, alpha and targets, or None for full weights.
        micro_batch: rows a forward.
        text_padding: ``full`` | ``folded``, see ``cards.card.Precision``; None leaves the card's.
    """

    name: str
    needs_reward = False
    takes_inputs = False
    """True when it trains cards whose requests bring tensors, such as a first frame."""
    needs_clips = False
    """True when the batches are encoded videos, False when they are prompts."""
    rolls_out = False
    """True when it has its samples rolled out by ``ctx.rollouts``."""
    judges_itself = False
    """True when what counts is what its ``evaluation`` measures: ``eval.prompts=auto`` asks for no clips then."""

    def __init__(
        self,
        *,
        lr: float,
        steps: int,
        batch_size: int,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        clip: float | None = 1.0,
        warmup: int = 0,
        lr_schedule: Literal["constant", "cosine"] = "constant",
        ema: float | None = None,
        ema_start: int = 0,
        lora: dict[str, Any] | None = None,
        micro_batch: int = 32,
        text_padding: Literal["full", "folded"] | None = None,
    ):
        for name, value, low in (("steps", steps, 0), ("batch_size", batch_size, 1), ("micro_batch", micro_batch, 1)):
            if value < low:
                raise UserError(f"method {name}: got {value}, expected at least {low}")
        if not lr >= 0:
            raise UserError(f"method lr: got {lr}, expected a number >= 0")
        if lr_schedule not in ("constant", "cosine"):
            raise unknown_name("method lr_schedule", str(lr_schedule), ("constant", "cosine"))
        if text_padding not in (None, "full", "folded"):
            raise unknown_name("method text_padding", str(text_padding), ("full", "folded"))
        if ema is not None and not 0 <= ema < 1:
            raise UserError(f"method ema: got {ema}, expected a decay in [0, 1), or null")
        self.lr = lr
        self.steps = steps
        self.batch_size = batch_size
        self.betas = betas
        self.weight_decay = weight_decay
        self.clip = clip
        self.warmup = warmup
        self.lr_schedule = lr_schedule
        self.ema = ema
        self.ema_start = ema_start
        self.lora = None if lora is None else make_lora(lora)
        self.micro_batch = micro_batch
        self.text_padding = text_padding

    @abstractmethod
    def roles(self) -> tuple[str, ...]:
        """Roles besides the student and its EMA."""

    @abstractmethod
    def updates(self, batch: Any, step: int, ctx: Context) -> Iterator[Update]:
        """The losses of one training step, in order."""

    def rollout_plan(self, batch: Any, step: int, *, seed: int, world: World) -> RolloutPlan | None:
        """What ``updates`` will hand to ``ctx.rollouts`` for a batch, once, known before the step begins: with it the
        batch of a step can be sampled while the step before trains. None where that is not so."""
        return None

    def optimizer_steps(self) -> int:
        """Steps of the first optimizer in a whole run."""
        return self.steps

    def optimizers(self) -> dict[str, OptimizerSpec]:
        """Trained role -> its optimizer; a component that joined apart (``Roles.join``) goes by its own name. The first
        is the one whose steps are counted. Without the student the main component stays as it is."""
        return {STUDENT: OptimizerSpec(self.lr, self.betas, self.weight_decay, self.clip, steps=self.optimizer_steps())}

    def lr_factor(self, n: int, steps: int | None = None) -> float:
        """Share of its rate that optimizer step ``n`` (from 0) of ``steps`` (None: the student's) takes."""
        rise = min(1.0, (n + 1) / self.warmup) if self.warmup > 0 else 1.0
        if self.lr_schedule == "constant":
            return rise
        whole = self.optimizer_steps() if steps is None else steps
        return rise * 0.5 * (1.0 + math.cos(math.pi * min(1.0, n / max(1, whole))))

    def derive_card(self, card: ModelCard) -> ModelCard:
        """The card that is trained, evaluated, checked and exported, of the card that the run starts from."""
        return card

    def role_cards(self, card: ModelCard) -> dict[str, ModelCard]:
        """Roles that are cards of their own, for a run that starts from ``card``. Loads no weights; raises
        ``UserError`` for a card that cannot take the role."""
        return {}

    def token_batches(self, card: ModelCard) -> dict[str, tuple[int, int]]:
        """Language model that it trains -> (rows, tokens) of its training forward at most, for memory plans."""
        return {}

    def attach_heads(self, roles: Roles) -> None:  # noqa: B027 - most methods have none
        """Puts the method's own trained modules on the roles, before anything is sharded or optimized."""

    def baseline(self) -> Baseline | None:
        """What is evaluated before training; None = the trained role, as after training."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the method itself: plain values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - most methods have no state
        """Inverse of :meth:`state`."""

    def after_step(self, step: int, optimizer_steps: int, ctx: Context) -> dict[str, float]:
        """Called when the updates of a step are done, e.g. to move the old policy; gives metrics."""
        return {}

    def gates(self, ctx: Context) -> dict[str, GateReport]:
        """C2 gates of the method's own beside the velocities', by name: what else must be the same in training and in
        serving. Run with them, logged as ``parity/<name>``."""
        return {}

    def evaluation(self, ctx: Context, role: str) -> dict[str, float]:
        """Metrics of a role that the method measures itself, in every evaluation and on every rank alike."""
        return {}

    def observed(self, artifacts: Sequence[Artifact], metadata: Sequence[Any]) -> dict[str, NDArray[np.float64]]:
        """What the method reads off the artifacts of prompts, one number each, NaN where there is nothing to read: the
        same columns on every rank, in every evaluation beside the reward's."""
        return {}

    def rollout_guidance(self) -> float | None:
        """Guidance scale that the trained weights are made for; None leaves the card's."""
        return None

    def reward_problems(self, reward: Reward) -> list[str]:
        """What makes the method unfit for the reward, before weights load."""
        return []

    def problems(self, card: ModelCard, world_size: int) -> list[str]:
        """What makes the method unfit for the card that the run starts from and the plan, before weights load."""
        found = []
        if self.batch_size % world_size:
            found.append(f"batch_size: got {self.batch_size}, expected a multiple of the {world_size} devices")
        inputs = {brought.name for program in card.programs.values() for brought in program.inputs}
        if inputs and not self.takes_inputs:
            found.append(
                f"method {self.name}: card {card.name!r} takes {', '.join(sorted(inputs))} with every request, which "
                "this method does not bring; use method=finetune"
            )
        if not any(component.trainable for component in card.components.values()):
            found.append(f"card {card.name!r} has no trainable component")
        return found

    def cautions(self, card: ModelCard) -> list[str]:
        """What may go wrong with the card that the run starts from, though it can run."""
        return []


def make_lora(options: dict[str, Any]) -> LoRA:
    """``LoRA`` from a config; raises ``UserError`` that names an unknown key."""
    known = {"rank", "alpha", "targets"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UserError(f"method lora: unknown key(s) {', '.join(unknown)}; expected {', '.join(sorted(known))}")
    values = dict(options)
    if "targets" in values:
        values["targets"] = tuple(values["targets"])
    lora = LoRA(**values)
    if lora.rank < 1 or not lora.targets:
        raise UserError(f"method lora: got {lora}, expected a rank of at least 1 and at least one target layer")
    return lora
