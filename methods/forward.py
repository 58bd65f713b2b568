"""The student's forward in training: the SAME ModelCall that the serving loop makes, with or without gradient.

Legend: B rows, C latent channels, T latent frames, H W latent cells, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cards.prediction import network_timestep
from inference.engine import Engine
from inference.instance import ModelInstance
from loops.guidance import guidance_policy
from loops.loop import ModelCall, Profile
from methods.roles import trainable_component


def velocity(
    instance: ModelInstance,
    latents_BCTHW: Tensor,
    sigma_B: Tensor,
    text_BLD: Tensor,
    *,
    gradient: bool,
    conditions: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Velocity (B, C, T, H, W) at ``sigma_B`` in float32; ``conditions`` (B, ...): what else the card's forward takes,
    such as an encoded first frame."""
    component = trainable_component(instance.card)
    further = {} if conditions is None else conditions
    call = ModelCall(
        component,
        "velocity",
        {"latents": latents_BCTHW, "timestep": network_timestep(sigma_B), "text": text_BLD, **further},
        instance.numerics(component),
    )
    return instance.call(call, Profile.TRAIN if gradient else Profile.ROLLOUT).float()


def guided_velocity(
    instance: ModelInstance,
    latents_BCTHW: Tensor,
    sigma_B: Tensor,
    conditions: Mapping[str, Tensor],
    *,
    guidance: float,
    policy: str,
    gradient: bool,
) -> Tensor:
    """Velocity (B, C, T, H, W) in float32 as a request of this guidance sees it: two branches where ``guidance`` > 1.

    ``conditions`` (B, ...) are as a rollout's ``BehaviourRecord`` has them: ``text``, ``negative_text`` of a guided
    one, and what else the card's forward takes.
    """
    shared = {name: value for name, value in conditions.items() if name not in ("text", "negative_text")}
    if not guidance > 1.0:
        return velocity(instance, latents_BCTHW, sigma_B, conditions["text"], gradient=gradient, conditions=shared)
    component = trainable_component(instance.card)
    tensors = {"latents": latents_BCTHW, "timestep": network_timestep(sigma_B), **shared}
    branches = guidance_policy(policy)
    calls = branches.calls(
        component, tensors, conditions["text"], conditions["negative_text"], instance.numerics(component)
    )
    profile = Profile.TRAIN if gradient else Profile.ROLLOUT
    return branches.combine(tuple(instance.call(call, profile) for call in calls), guidance).float()


def encode_prompts(engine: Engine, instance: ModelInstance, prompts: Sequence[str]) -> Tensor:
    """Text (B, L, D) through the engine's encoder and cache: each distinct prompt is encoded once."""
    distinct = list(dict.fromkeys(prompts))
    features = dict(zip(distinct, engine.encode(distinct, instance), strict=True))
    return torch.cat([features[prompt] for prompt in prompts])
