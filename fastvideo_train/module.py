"""PostTrainingModule: owns the roles, their optimizers and the average; turns a method's updates into steps.

Knows no method's maths and no file format. Manual optimization: a method may make several losses and several optimizer
steps of one batch. Randomness is addressed by (seed, step), so nothing here keeps a generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LambdaLR

from cards.card import ModelCard
from cards.errors import UserError
from fastvideo_train.parallel.plan import Plan
from fastvideo_train.rollouts import InProcessRollouts, RolloutSettings
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.behaviour import behaviour_gate
from inference.parity.interleave import GateReport
from inference.text_kv import pool_bytes
from methods.ladder import ladder_of
from methods.method import Context, Method, Update
from methods.rewards.reward import Reward
from methods.roles import EMA, STUDENT, Roles
from methods.rollout import RolloutPlan
from methods.rollout_process import Asynchronous
from methods.world import World

GATE_PROMPT = "a red circle moves left"
"""Of the C2 gate's seeded request."""
StepHook = Callable[[int, dict[str, float]], None]


class ParityError(RuntimeError):
    """Training and serving no longer compute the same: the run must not go on."""


class DivergedError(UserError):
    """A loss or gradient that is not finite: the step is not taken."""


class PostTrainingModule(LightningModule):
    """See the module's docstring.

    Args:
        card: what is trained: ``method.derive_card`` of the base's card.
        base: what the run starts from, loaded.
        method: what it is trained by.
        plan: how it is placed.
        reward: for methods that need one.
        others: roles that are cards of their own, see ``Method.role_cards``.
        rollouts: how rollouts are executed.
        batch_at: training step -> its batch, for rollouts that are a step ahead; None beyond the end.
        seed: of every draw.
        parity_every: training steps between C2 gates; the first runs before the first update. 0 runs none.
        start_step: training steps that a resumed run has behind it.
        on_step: called with (step, metrics) after each training step, on every rank.
    """

    def __init__(
        self,
        card: ModelCard,
        base: ModelInstance,
        method: Method,
        plan: Plan,
        *,
        reward: Reward | None,
        seed: int,
        others: Mapping[str, ModelInstance] | None = None,
        max_rows: int = 32,
        parity_every: int = 0,
        start_step: int = 0,
        on_step: StepHook | None = None,
        rollouts: RolloutSettings | None = None,
        batch_at: Callable[[int], Any] | None = None,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.card = card
        self.method = method
        self.plan = plan
        self.reward = reward
        self.seed = seed
        self.parity_every = parity_every
        self.step_index = start_step
        self.optimizer_steps = 0
        self.position: dict[str, Any] = {}
        self.on_step = on_step
        self.c2: GateReport | None = None
        settings = InProcessRollouts() if rollouts is None else rollouts
        names = (*method.roles(), *((EMA,) if method.ema is not None else ()), *settings.roles)
        self.optimizer_specs = method.optimizers()
        self.roles = Roles(base, names, method.lora, card=card, trained=self.optimizer_specs, others=others)
        method.attach_heads(self.roles)
        self.base = base
        self.engine = Engine(
            base.device,
            batching="shape",
            max_rows=max_rows,
            kv_bytes=pool_bytes(base, max_rows),
            share_prefixes=False,
        )
        self.rollouts = settings.make(self.engine, self.roles, max_rows)
        self.batch_at = batch_at
        if isinstance(self.rollouts, Asynchronous):
            self.rollouts.ahead = self._ahead
        self.on_start: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None
        self._sharded = False

    # -- placement

    def configure_model(self) -> None:
        """Shards the roles' modules by the plan, once."""
        if self._sharded:
            return
        self._sharded = True
        self.rollouts.prepare()
        mesh = getattr(self, "_device_mesh", None)
        for module in self.roles.sharded_modules():
            if self.plan.activation_checkpointing and hasattr(module, "enable_gradient_checkpointing"):
                cast(Any, module).enable_gradient_checkpointing()
            self.plan.shard(module, None if mesh is None else mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """One AdamW and one schedule for each of the method's optimizers, in its order."""
        made = []
        for name, spec in self.optimizer_specs.items():
            optimizer = torch.optim.AdamW(
                self.roles.trained(name), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay
            )
            factor = partial(self.method.lr_factor, steps=spec.steps)
            made.append({"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, factor)})
        return made[0] if len(made) == 1 else made

    def role_optimizers(self, *, wrapped: bool = False) -> dict[str, Any]:
        """Role (or component) -> its optimizer; ``wrapped`` as Lightning steps it."""
        return dict(zip(self.optimizer_specs, _listed(self.optimizers(use_pl_optimizer=wrapped)), strict=True))

    def role_schedules(self) -> dict[str, Any]:
        """Role (or component) -> its schedule of the learning rate."""
        return dict(zip(self.optimizer_specs, _listed(self.lr_schedulers()), strict=True))

    def world(self) -> World:
        return World(self.global_rank, self.trainer.world_size)

    def context(self) -> Context:
        """What the method works with, on this rank."""
        return Context(
            card=self.card,
            engine=self.engine,
            roles=self.roles,
            world=self.world(),
            seed=self.seed,
            device=self.base.device,
            reward=self.reward,
            rollouts=self.rollouts,
        )

    def _ahead(self, step: int) -> RolloutPlan | None:
        """What the method will roll out in a later step."""
        batch = None if self.batch_at is None else self.batch_at(step)
        if batch is None:
            return None
        return self.method.rollout_plan(batch, step, seed=self.seed, world=self.world())

    @property
    def best_role(self) -> str:
        """The role that is evaluated and exported: the average when there is one."""
        return EMA if self.method.ema is not None else STUDENT

    # -- training

    def on_train_start(self) -> None:
        if self.reward is not None:
            self.reward.use_engine(self.engine)
            self.reward.prepare(str(self.base.device))
        self.rollouts.start()
        if self.on_start is not None:
            self.on_start()

    def on_train_end(self) -> None:
        self.rollouts.close()
        if self.on_end is not None:
            self.on_end()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Methods move what they use."""
        return batch

    def training_step(self, step_batch: Any, batch_idx: int) -> None:
        batch = step_batch.batch
        if batch is None:
            return
        began = time.perf_counter()
        step = self.step_index
        metrics: dict[str, float] = {}
        if self.parity_every > 0 and step % self.parity_every == 0:
            metrics |= self.check_parity()
        context = self.context()
        for update in self.method.updates(batch, step, context):
            for name, value in update.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value
            if update.loss is not None:
                metrics |= self._descend(update)
        self.rollouts.end_updates()
        metrics |= self.method.after_step(step, self.optimizer_steps, context)
        metrics |= self.rollouts.metrics()
        self.step_index = step + 1
        self.position = step_batch.position
        metrics = context.world.mean(metrics)
        metrics["time/step_seconds"] = time.perf_counter() - began
        if self.on_step is not None:
            self.on_step(self.step_index, metrics)

    def _descend(self, update: Update) -> dict[str, float]:
        """One backward and, when the update says so, one step of its optimizer."""
        assert update.loss is not None
        name = update.optimizer
        with self.roles.backward_of(name):
            self.manual_backward(update.loss)
        if not update.step:
            return {}
        optimizer, schedule = self.role_optimizers(wrapped=True)[name], self.role_schedules()[name]
        clip = self.optimizer_specs[name].clip
        norm = torch.nn.utils.clip_grad_norm_(self.roles.trained(name), float("inf") if clip is None else clip)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not torch.isfinite(full):
            raise DivergedError(
                f"step {self.step_index}: got a gradient norm of {float(full)}, expected a finite one; the weights are "
                "as before this step. Lower lr= or set method.warmup, and go on from the last checkpoint with "
                "resume=auto"
            )
        lr = schedule.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        self.roles.changed(name)
        if name == next(iter(self.optimizer_specs)):
            self.optimizer_steps += 1
        if self.method.ema is not None and name in (STUDENT, *self.roles.apart):
            keep = self.method.ema if schedule.last_epoch > self.method.ema_start else 0.0
            self.roles.blend(EMA, keep, of=name)
        of = "" if name == STUDENT else f"{name}_"
        return {f"train/{of}grad_norm": float(full), f"train/{of}lr": lr}

    def check_parity(self) -> dict[str, float]:
        """The C2 gates: the student's and the method's own; stops the run when training and serving differ."""
        student = self.roles.instance(STUDENT)
        # A ladder is walked as it is; else four steps of Euler stand for any number of any solver.
        steps, solver = (4, "euler") if ladder_of(self.card) is None else (None, None)
        self.c2 = behaviour_gate(student, prompt=GATE_PROMPT, seed=self.seed, steps=steps, solver=solver)
        reports = {"c2": self.c2, **self.method.gates(self.context())}
        for report in reports.values():
            if not report.passed:
                raise ParityError(
                    f"C2 gate broke at step {self.step_index}: largest difference {report.difference:.3e}, allowed "
                    f"{report.tolerance:.1e} ({report.what}); the loop that trains is not the loop that serves"
                )
        return {f"parity/{name}": report.difference for name, report in reports.items()}


def _listed(one_or_more: Any) -> list[Any]:
    """What Lightning gives alone or in a list."""
    return one_or_more if isinstance(one_or_more, list) else [one_or_more]
