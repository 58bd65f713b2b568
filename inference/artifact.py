"""Artifact: what leaves the engine, with its provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loops.ar_decode import Completion
from loops.loop import BehaviourRecord, TokenBehaviour
from loops.score import Score


@dataclass(frozen=True)
class Provenance:
    """Enough to make the artifact again."""

    card_digest: str
    weights_versions: dict[str, int]
    """Component id -> version of its weights when the request started."""
    prompt: str
    negative_prompt: str
    params: Any
    """SamplingParams of a clip, TokenParams of a text, ScoreParams of a score."""
    nodes: Mapping[str, Any] = field(default_factory=dict)
    """Loop node -> its own params, where the request overrode some."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Name -> digest of each tensor that the request brought."""


@dataclass(frozen=True)
class Artifact:
    """Result of a request."""

    latents: Tensor
    """(C, T, H, W), normalised, as the loop left them; empty (0,) for a text or a score."""
    video: Tensor | None
    """(3, F, H, W) in [-1, 1] as decoded; None for a request that wanted latents only."""
    fps: float
    provenance: Provenance
    behaviour: BehaviourRecord | None = None
    """Under ROLLOUT."""
    completion: Completion | None = None
    """Text, token ids and, under ROLLOUT, log-probs of a text request; the last where there are several."""
    completions: Mapping[str, Completion] = field(default_factory=dict)
    """Loop node -> what it said, of every text loop that ran."""
    tokens: Mapping[str, TokenBehaviour] = field(default_factory=dict)
    """Loop node -> what it drew, under ROLLOUT where the card keeps it."""
    refined: str | None = None
    """The words that the generator was given, where the card rewrote the prompt."""
    score: Score | None = None
    """Mean and frame by frame, of a score request."""

    @property
    def text(self) -> str:
        """The text of a text request."""
        if self.completion is None:
            raise ValueError("the request made a clip, not a text; its latents and video are here")
        return self.completion.text

    def frames_FHWC(self) -> np.ndarray:
        """uint8 frames (F, H, W, 3)."""
        if self.video is None:
            raise ValueError("the request asked for latents only; ask for output='video'")
        return to_uint8(self.video)


def to_uint8(video_CFHW: Tensor) -> np.ndarray:
    """uint8 (F, H, W, 3) of a video (3, F, H, W) in [-1, 1]: halved, clamped and rounded as diffusers does for PIL."""
    unit = (video_CFHW.float() * 0.5 + 0.5).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()
