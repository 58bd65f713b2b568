"""What a sample of a rollout leaves with the method, in bytes, before anything runs.

Each field of what an artifact and its behaviour record hold has its formula here. Of the words that a language model
draws the most that it may draw counts.

Legend: N steps of the sampler, K of them with noise, C T H W latent, F frames of a clip, L tokens, D text width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cards.card import ModelCard
from cards.needs import request_needs
from cards.registry import family
from cards.source import build_on_meta, resolve_folder
from inference.resolve import resolve
from loops.loop import SamplingParams, TokenParams
from methods.method import Method
from methods.world import World

FLOAT32, FLOAT64, INT64, BOOL = 4, 8, 8, 1
LOOPS = ("diffusion_denoise",)
"""Kinds of loops whose record is planned."""


@dataclass(frozen=True)
class RecordPlan:
    """Bytes of one rank."""

    samples: int
    """That a training step rolls out."""
    fields: Mapping[str, int]
    """Field -> bytes of a sample."""
    per_prompt: Mapping[str, int] = field(default_factory=dict)
    """Field -> bytes that the samples of a prompt share."""
    prompts: int = 0
    """That a training step rolls out."""

    @property
    def bytes_per_sample(self) -> int:
        return sum(self.fields.values())

    @property
    def total(self) -> int:
        """Of a training step."""
        return self.samples * self.bytes_per_sample + self.prompts * sum(self.per_prompt.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "bytes_per_sample": self.bytes_per_sample,
            "fields": dict(self.fields),
            "bytes_per_prompt": sum(self.per_prompt.values()),
            "total": self.total,
        }


@dataclass(frozen=True)
class _Prompt:
    """Stands for any prompt."""

    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def plan_record(card: ModelCard, method: Method, devices: int = 1) -> RecordPlan | None:
    """The record of the method's rollouts on the card that it trains; None where it has no ``rollout_plan``, or a loop
    whose record has no formula here."""
    prompts = [_Prompt() for _ in range(method.batch_size)]
    plan = method.rollout_plan(prompts, 0, seed=0, world=World(0, devices))
    if plan is None:
        return None
    fields: dict[str, int] = {}
    shared: dict[str, int] = {}
    for request in plan.requests:  # of a step's requests the largest counts
        resolved = resolve(request, card)
        needs = request_needs(
            card, request.task, guided=resolved.guided, pixels=resolved.pixels, refined=resolved.refined
        )
        for node in needs.nodes:
            if node.loop is None:
                continue
            params = resolved.params_of(node.id)
            if isinstance(params, TokenParams):
                _most(fields, _token_bytes(node.id, params))
            elif isinstance(params, SamplingParams):
                if card.loops[node.loop].kind not in LOOPS or (params.sde and family(card.family).condition_shapes()):
                    return None
                _most(fields, _clip_bytes(card, params, request.capture, pixels=resolved.pixels))
                if params.sde is not None:
                    _most(shared, {"conditions": _condition_bytes(card, guided=params.guided)})
    return RecordPlan(len(plan.requests), fields, shared, method.batch_size // devices)


def _most(into: dict[str, int], found: Mapping[str, int]) -> None:
    for name, size in found.items():
        into[name] = max(into.get(name, 0), size)


def _clip_bytes(card: ModelCard, params: SamplingParams, capture: tuple[str, ...], *, pixels: bool) -> dict[str, int]:
    """Of the artifact's tensors and of the record of ``diffusion_denoise``."""
    latent = FLOAT32 * math.prod(card.geometry.latent_shape(params.frames, params.height, params.width))
    n = params.steps
    found = {"latents": latent}
    if pixels:
        found["video"] = FLOAT32 * 3 * params.frames * params.height * params.width
    found |= {"sigmas": FLOAT32 * n, "timesteps": FLOAT32 * n}
    found |= dict.fromkeys(capture, n * latent)
    if params.sde is not None:
        k = len(params.sde.steps(n))
        found |= {
            "sde_steps": INT64 * k,
            "sde_sigmas": FLOAT32 * (k + 1),
            "sde_states": (k + 1) * latent,
            "sde_log_probs": FLOAT32 * k,
        }
    return found


def _condition_bytes(card: ModelCard, *, guided: bool) -> int:
    """Of the text that every forward took, with the unconditional branch's."""
    encoder = next(c for c in card.components.values() if c.kind == "text_encoder")
    module = build_on_meta(encoder, None if encoder.config else resolve_folder(card.source, card.root))
    width: int = module.config.d_model  # type: ignore[union-attr,assignment]
    element = getattr(torch, encoder.dtype).itemsize
    return (2 if guided else 1) * card.sampling.max_sequence_length * width * element


def _token_bytes(node: str, params: TokenParams) -> dict[str, int]:
    """Of what a language model draws; the prompt's own ids, which are as many as it has, do not count."""
    most = params.max_tokens
    return {
        f"{node} token_ids": INT64 * most,
        f"{node} logprobs": FLOAT64 * most,
        f"{node} mask": BOOL * most,
    }
