"""Pixels and frames <-> latent cells.

Knows the compression of the VAE and the patches of the transformer; knows nothing about weights. A causal video VAE
keeps the first frame and compresses the rest, so a clip has ``k * temporal + 1`` frames.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from cards.errors import UserError


class Geometry(BaseModel):
    """How a clip maps to latents: factors in pixels (frames) a latent cell, patches in latent cells."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spatial: int
    """Pixels a latent cell, per side."""
    temporal: int
    """Frames a latent frame, after the first."""
    channels: int
    """Latent channels."""
    patch: tuple[int, int, int] = (1, 2, 2)
    """Latent cells a transformer token: (frames, height, width)."""

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, T, H, W) of the latents of one clip; raises ``UserError`` when the clip does not fit."""
        self.check(frames, height, width)
        return (self.channels, (frames - 1) // self.temporal + 1, height // self.spatial, width // self.spatial)

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Transformer tokens of one clip."""
        _, t, h, w = self.latent_shape(frames, height, width)
        return (t // self.patch[0]) * (h // self.patch[1]) * (w // self.patch[2])

    def check(self, frames: int, height: int, width: int) -> None:
        """Raises ``UserError`` that names every problem of the size at once."""
        problems = []
        if frames < 1 or (frames - 1) % self.temporal:
            k = self.temporal
            near = max(0, round((frames - 1) / k)) * k + 1
            problems.append(
                f"frames: got {frames}, expected {k}k + 1 (the VAE compresses {k} frames into one after the first); "
                f"use {near} or {near + k}"
            )
        for name, value, patch in (("height", height, self.patch[1]), ("width", width, self.patch[2])):
            multiple = self.spatial * patch
            if value < multiple or value % multiple:
                near = max(1, round(value / multiple)) * multiple
                problems.append(f"{name}: got {value} pixels, expected a positive multiple of {multiple}; use {near}")
        if problems:
            raise UserError("the clip does not fit the model: " + "; ".join(problems))
