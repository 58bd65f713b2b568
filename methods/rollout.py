"""Rollouts: requests under the ROLLOUT profile, and who runs them: this process' engine or one of its own.

The engine that serves is the engine that rolls out: steps of all requests share forwards, each prompt is encoded once.
A method hands its requests to ``ctx.rollouts`` and gets artifacts, with what is known of the weights that made them.

Legend: N samples = groups x K, group-major.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.artifact import Artifact
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from loops.loop import Profile
from methods.random import address_seed
from methods.roles import Roles

# -- what a method asks for


@dataclass(frozen=True)
class RolloutPlan:
    """What a method has rolled out in a training step."""

    role: str
    """Whose weights."""
    requests: tuple[Request, ...]


def rollout_requests(
    prompts: Sequence[str], seeds: Sequence[int], *, steps: int, solver: str, guidance: float
) -> tuple[Request, ...]:
    """One request for each (prompt, seed)."""
    return tuple(
        Request(prompt=prompt, seed=seed, steps=steps, solver=solver, guidance=guidance, profile=Profile.ROLLOUT)
        for prompt, seed in zip(prompts, seeds, strict=True)
    )


def rollout_seeds(seed: int, step: int, groups: Sequence[int], samples: int) -> list[int]:
    """Seeds of the samples of the global groups ``groups`` at a step: the same on any number of ranks."""
    return [address_seed(seed, "rollout", step, group, k) for group in groups for k in range(samples)]


# -- who runs it


@dataclass(frozen=True)
class Sampled:
    """What came of a step's requests."""

    artifacts: list[Artifact]
    """In the order of the requests."""
    role: str | None
    """Role that holds the weights that sampled them until the step's updates are done; None where no role does, since
    an optimizer moves it: what is known of the policy then is what the behaviour records hold."""
    version: int
    """Training steps that those weights had behind them."""


class RolloutRunner(ABC):
    """Runs the requests of a method. One thread calls it; on several ranks all of them, in the same order."""

    def prepare(self) -> None:  # noqa: B027 - nothing to do in one process
        """Called once, before the roles are sharded."""

    def start(self) -> None:  # noqa: B027
        """Called when training begins, before the first rollout is wanted; may be left out."""

    @abstractmethod
    def roll_out(self, requests: Sequence[Request], *, role: str, step: int) -> Sampled:
        """The artifacts of a training step's requests."""

    def end_updates(self) -> None:  # noqa: B027
        """Called when a step's updates are done, before the method moves its roles."""

    def metrics(self) -> dict[str, float]:
        """Of the last :meth:`roll_out`."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Ends what it started."""


class InProcess(RolloutRunner):
    """The engine of this process on the roles' own modules: nothing is copied."""

    def __init__(self, engine: Engine, roles: Roles):
        self.engine = engine
        self.roles = roles

    def roll_out(self, requests: Sequence[Request], *, role: str, step: int) -> Sampled:
        artifacts = self.engine.run_interleaved(requests, self.roles.instance(role))
        return Sampled(artifacts, None if self.roles.moves(role) else role, step)


# -- what a method makes of it


@dataclass(frozen=True)
class Rollouts:
    """Clean samples of a behaviour policy."""

    x0_NCTHW: Tensor
    videos_NFHWC: np.ndarray
    """uint8."""
    prompts: list[str]
    sigmas: Tensor
    """(steps,) the sampler's own."""


def stacked(artifacts: Sequence[Artifact]) -> Rollouts:
    """Clips of one size, sampled on the same steps."""
    behaviour = artifacts[0].behaviour
    assert behaviour is not None
    return Rollouts(
        x0_NCTHW=torch.stack([a.latents for a in artifacts]),
        videos_NFHWC=np.stack([a.frames_FHWC() for a in artifacts]),
        prompts=[a.provenance.prompt for a in artifacts],
        sigmas=behaviour.sigmas,
    )


def roll_out(
    engine: Engine,
    instance: ModelInstance,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    steps: int,
    solver: str,
    guidance: float,
    listener: Callable[[str, int, int], None] | None = None,
) -> Rollouts:
    """One sample for each (prompt, seed), by an engine of this process."""
    requests = rollout_requests(prompts, seeds, steps=steps, solver=solver, guidance=guidance)
    return stacked(engine.run_interleaved(requests, instance, listener))
