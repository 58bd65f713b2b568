"""The sampler as a policy: rollouts with noise in their steps, and the same steps evaluated anew with a gradient.

A rollout leaves its path (``loops.loop.BehaviourRecord``): the states around each noisy step, their log-probs at the
weights that rolled out, and what the forwards were conditioned on. :func:`evaluate_steps` takes any (sample, step)
pairs of such paths through the SAME ModelCall path, both guidance branches included, at the weights of any instance.
Its log-probs are the rollout's bit for bit where its forward has the rows of the engine's forward; where it has others
they are within 1e-6 in float32, for a matrix product may round differently with its number of rows.

:func:`path_updates` is the generator's half of every method that trains a sampler with PPO.

Legend: N samples, K noisy steps of each, B rows: (sample, step) pairs. C, T, H, W as in ``methods.forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.artifact import Artifact
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.parity.interleave import GateReport, tensor_difference
from inference.request import Request
from loops.loop import SDE, BehaviourRecord, Profile
from loops.sde import StepDistribution, sde_step
from methods.forward import guided_velocity
from methods.method import Update
from methods.ppo import policy_loss, ratio_metrics
from methods.random import generator_at
from methods.roles import STUDENT
from methods.world import World

Pair = tuple[int, int]
"""(sample, noisy step), counted from 0."""


@dataclass(frozen=True)
class Paths:
    """What N rollouts with the same sampler left. Per-sample tensors are the rollouts' own, stacked where they are
    used: the samples of a prompt share its text."""

    sde: SDE
    guidance: float
    guidance_policy: str
    sigmas: Tensor
    """(K + 1,) before each noisy step and after the last."""
    states: tuple[Tensor, ...]
    """N times (K + 1, C, T, H, W)."""
    log_probs_NK: Tensor
    """float32, at the weights that rolled out."""
    conditions: tuple[Mapping[str, Tensor], ...]
    """N times name -> (1, ...)."""

    @classmethod
    def of(cls, artifacts: Sequence[Artifact]) -> Paths:
        """The paths of ROLLOUT requests that all had one ``sde``, number of steps and guidance."""
        params = artifacts[0].provenance.params
        records: list[Any] = [artifact.behaviour for artifact in artifacts]
        assert all(isinstance(record, BehaviourRecord) and record.conditions is not None for record in records)
        assert len({_policy_of(artifact) for artifact in artifacts}) == 1
        return cls(
            sde=params.sde,
            guidance=params.guidance,
            guidance_policy=params.guidance_policy,
            sigmas=records[0].sde_sigmas,
            states=tuple(record.sde_states for record in records),
            log_probs_NK=torch.stack([record.sde_log_probs for record in records]),
            conditions=tuple(record.conditions for record in records),
        )

    @property
    def steps(self) -> int:
        """K."""
        return self.log_probs_NK.shape[1]

    def rolled_out(self, pairs: Sequence[Pair]) -> Tensor:
        """(B,) the rollout's own log-probs."""
        return torch.stack([self.log_probs_NK[n, k] for n, k in pairs])


def _policy_of(artifact: Artifact) -> Any:
    """A request's parameters but for its seeds."""
    params = artifact.provenance.params
    return replace(params, seed=0, sde=replace(params.sde, seed=None))


def roll_out_paths(
    engine: Engine,
    instance: ModelInstance,
    requests: Sequence[Request],
    listener: Callable[[str, int, int], None] | None = None,
) -> tuple[list[Artifact], Paths]:
    """The samples of ``requests`` (each with an ``sde``, and inputs where the card takes any) and their paths."""
    asked = [replace(request, profile=Profile.ROLLOUT) for request in requests]
    artifacts = engine.run_interleaved(asked, instance, listener)
    return artifacts, Paths.of(artifacts)


def evaluate_steps(
    instance: ModelInstance, paths: Paths, pairs: Sequence[Pair], *, gradient: bool
) -> tuple[StepDistribution, Tensor]:
    """Where the instance's weights would lead from the state before each of the pairs' steps, as one forward of B rows
    (a guidance branch), and the states (B, C, T, H, W) that the rollout reached."""
    device = instance.device
    before = torch.stack([paths.states[n][k] for n, k in pairs]).to(device)
    reached = torch.stack([paths.states[n][k + 1] for n, k in pairs]).to(device)
    steps = torch.tensor([k for _, k in pairs])
    sigma_B, following_B = paths.sigmas[steps].to(device), paths.sigmas[steps + 1].to(device)
    conditions = {
        name: torch.cat([paths.conditions[n][name] for n, _ in pairs]).to(device) for name in paths.conditions[0]
    }
    velocity = guided_velocity(
        instance,
        before,
        sigma_B,
        conditions,
        guidance=paths.guidance,
        policy=paths.guidance_policy,
        gradient=gradient,
    )
    return sde_step(paths.sde.kind, before, velocity, sigma_B, following_B, paths.sde.level), reached


def log_probs(instance: ModelInstance, paths: Paths, pairs: Sequence[Pair], *, gradient: bool) -> Tensor:
    """(B,) float32 log-probs of the pairs at the instance's weights, with their gradient under ``gradient``."""
    distribution, reached = evaluate_steps(instance, paths, pairs, gradient=gradient)
    return distribution.log_prob(reached)


def log_prob_gate(instance: ModelInstance, request: Request) -> GateReport:
    """C2 of a policy with log-probs: each noisy step of a rollout by itself gives the rollout's log-prob again, with a
    gradient, when it is evaluated as a loss does. Same path, batch and dtype: the ratio is 1 to the last bit."""
    _, paths = roll_out_paths(Engine(instance.device, cache_bytes=0), instance, [request])
    pairs = [(0, k) for k in range(paths.steps)]
    again = [log_probs(instance, paths, [pair], gradient=True) for pair in pairs]
    difference = tensor_difference(torch.cat(again).detach(), paths.rolled_out(pairs).to(instance.device))
    if not all(value.requires_grad for value in again):
        difference = float("inf")
    return GateReport("C2", f"{len(pairs)} log-probs of a rollout == training's, with gradient", difference, 0.0)


@dataclass(frozen=True, kw_only=True)
class PathLoss:
    """How paths become updates."""

    clip_range: float
    """eps of PPO's clip."""
    kl: float = 0.0
    """Weight of the exact KL divergence from a reference."""
    a_max: float = 5.0
    """Advantages are clamped to +- this."""
    updates: int = 1
    """Optimizer steps; each takes its own part of the noisy steps, of every sample."""
    timesteps: int | None = None
    """Noisy steps that are trained on, drawn anew for each iteration and the same for all samples; None: all."""
    micro_batch: int = 32
    """Rows of a forward."""

    def steps(self, available: int, *address: int | str) -> list[list[int]]:
        """The noisy steps of each update, of those ``available``, drawn at an address."""
        count = available if self.timesteps is None else self.timesteps
        drawn = torch.randperm(available, generator=generator_at(*address, "sde steps"))[:count].tolist()
        each = count // self.updates
        return [sorted(drawn[u * each : (u + 1) * each]) for u in range(self.updates)]


def path_updates(
    paths: Paths,
    advantages_N: Sequence[float] | np.ndarray,
    keep_N: Sequence[bool] | np.ndarray,
    settings: PathLoss,
    *,
    student: ModelInstance,
    reference: ModelInstance | None,
    world: World,
    address: tuple[int | str, ...],
    optimizer: str = STUDENT,
    off_policy: bool = False,
) -> Iterator[Update]:
    """The updates of one iteration: ``mean max(-A rho, -A clip(rho)) + kl KL`` over the pairs of the kept samples of
    all ranks; none at all when nothing is kept anywhere.

    The old log-probs are those of the weights that rolled out, evaluated by the training path in the very micro-batches
    that the loss has: in the first update they are the loss's own value without gradient, those of later updates come
    from a pass without gradient before the first step. So where nothing has moved rho is 1 to the last bit, whatever
    the engine's batches were; how far the engine's own log-probs are from them is logged as ``parity/log_prob``.

    Args:
        keep_N: False leaves a sample out: one whose reward failed, or of a group without signal.
        reference: for ``settings.kl`` > 0.
        address: (seed, step, ...) of what is drawn; the same on every rank.
        off_policy: the rollouts are of other weights than the student has now: the old log-probs are the rollouts' own.
    """
    kept = [n for n, keep in enumerate(keep_N) if keep]
    counts = world.gather(np.array([len(kept)]))
    most, total = int(counts.max()), int(counts.sum())
    if total == 0:
        return
    # Ranks make equally many forwards: one with fewer samples repeats one of its own at weight 0.
    rows = kept + [0] * (most - len(kept))
    clamped = torch.as_tensor(np.asarray(advantages_N), dtype=torch.float32).clamp(-settings.a_max, settings.a_max)
    passes = [
        _chunks([(place, k) for k in steps for place in range(most)], settings.micro_batch)
        for steps in settings.steps(paths.steps, *address)
    ]
    old: dict[tuple[int, int], Tensor] = {}
    for u, chunks in enumerate(passes):
        for c, chunk in enumerate(chunks):
            pairs = [(rows[place], k) for place, k in chunk]
            if off_policy:
                old[u, c] = paths.rolled_out(pairs).to(student.device)
            elif u > 0:
                old[u, c] = log_probs(student, paths, pairs, gradient=False)
    furthest, difference = 0.0, 0.0
    for u, chunks in enumerate(passes):
        share = world.size * most / (total * sum(map(len, chunks)))  # of a pair in this rank's loss
        for c, chunk in enumerate(chunks):
            pairs = [(rows[place], k) for place, k in chunk]
            weight_B = torch.tensor([share if place < len(kept) else 0.0 for place, _ in chunk], device=student.device)
            distribution, reached = evaluate_steps(student, paths, pairs, gradient=True)
            log_prob_B = distribution.log_prob(reached)
            old_B = old.get((u, c), log_prob_B.detach())
            advantage_B = clamped[[n for n, _ in pairs]].to(student.device)
            loss_B = policy_loss(log_prob_B, old_B, advantage_B, clip_range=settings.clip_range)
            watched = ratio_metrics(log_prob_B, old_B, clip_range=settings.clip_range) | {"policy_loss": loss_B}
            if settings.kl > 0:
                assert reference is not None, "a KL term needs a reference"
                fixed, _ = evaluate_steps(reference, paths, pairs, gradient=False)
                kl_B = distribution.kl(fixed.mean)
                loss_B = loss_B + settings.kl * kl_B
                watched["kl"] = kl_B
            furthest = max(furthest, watched["ratio_deviation"].max().item())
            if u == 0 and not off_policy:
                rolled_out_B = paths.rolled_out(pairs).to(student.device)
                difference = max(difference, tensor_difference(log_prob_B.detach(), rolled_out_B))
            watched["loss"] = loss_B
            yield Update(
                loss=(weight_B * loss_B).sum(),
                step=c + 1 == len(chunks),
                metrics={
                    f"train/{name}": (weight_B * value_B.detach()).sum().item() / len(passes)
                    for name, value_B in watched.items()
                },
                optimizer=optimizer,
            )
    furthest, difference = world.gather(np.array([[furthest, difference]])).max(0).tolist()
    yield Update(loss=None, step=False, metrics={"train/ratio_deviation_max": furthest, "parity/log_prob": difference})


def _chunks(pairs: Sequence[Pair], rows: int) -> list[Sequence[Pair]]:
    return [pairs[start : start + rows] for start in range(0, len(pairs), rows)]
