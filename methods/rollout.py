"""Rollouts: K requests a prompt through the engine under the ROLLOUT profile.

The engine that serves is the engine that rolls out: steps of all requests share forwards, each prompt is encoded once.

Legend: N samples = groups x K, group-major.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from loops.loop import Profile
from methods.random import address_seed


@dataclass(frozen=True)
class Rollouts:
    """Clean samples of a behaviour policy."""

    x0_NCTHW: Tensor
    videos_NFHWC: np.ndarray
    """uint8."""
    prompts: list[str]
    sigmas: Tensor
    """(steps,) the sampler's own."""


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
    """One sample for each (prompt, seed)."""
    requests = [
        Request(prompt=prompt, seed=seed, steps=steps, solver=solver, guidance=guidance, profile=Profile.ROLLOUT)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    artifacts = engine.run_interleaved(requests, instance, listener)
    behaviour = artifacts[0].behaviour
    assert behaviour is not None
    return Rollouts(
        x0_NCTHW=torch.stack([a.latents for a in artifacts]),
        videos_NFHWC=np.stack([a.frames_FHWC() for a in artifacts]),
        prompts=list(prompts),
        sigmas=behaviour.sigmas,
    )


def rollout_seeds(seed: int, step: int, groups: Sequence[int], samples: int) -> list[int]:
    """Seeds of the samples of the global groups ``groups`` at a step: the same on any number of ranks."""
    return [address_seed(seed, "rollout", step, group, k) for group in groups for k in range(samples)]
