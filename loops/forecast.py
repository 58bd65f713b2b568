"""What a loop of a card will run for a request, before it starts: the worst case, for admission and progress.

Knows each kind's number of steps and the size of a step; leaves seconds and bytes to whoever has a cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cards.card import LoopSpec, ModelCard
from cards.chunks import chunk_count
from cards.geometry import Geometry
from loops.ar_decode import TextOptions
from loops.chunk_rollout import ChunkOptions, steps_per_chunk
from loops.loop import SamplingParams
from loops.options import read_options
from loops.score import ScoreParams
from loops.vae_tiles import Layout, TileOptions


@dataclass(frozen=True)
class Forecast:
    """At most so many steps, none larger than this."""

    steps: int
    rows: int
    """Rows of a step, were its calls one forward."""
    tokens: int
    """Tokens of a row: of the card's transformer for a clip, text tokens otherwise."""
    frames: int | None = None
    """Latent frames of a step; None is all of the clip's."""
    turns: Mapping[str, int] = field(default_factory=dict)
    """Part in the loop -> its steps, where the parts take turns; the others run in every step."""


def _tokens(cells: tuple[int, int, int], geometry: Geometry) -> int:
    """Transformer tokens of (frames, height, width) latent cells, at least one."""
    frames, height, width = (n // p for n, p in zip(cells, geometry.patch, strict=True))
    return max(1, frames * height * width)


def _sampling(spec: LoopSpec, params: Any, card: ModelCard, pixels: bool) -> Forecast:
    """A loop with a step for each of the request's; guidance branches, or the pictures of a score, as rows."""
    tokens = 1
    if isinstance(params, ScoreParams):
        return Forecast(params.steps, min(params.rows, params.pictures), tokens)
    if isinstance(params, SamplingParams):
        tokens = card.geometry.tokens(params.frames, params.height, params.width)
    return Forecast(params.steps, 2 if params.guided else 1, tokens)


def _text(spec: LoopSpec, params: Any, card: ModelCard, pixels: bool) -> Forecast:
    """A forward a token, and one for the log-probs of a rollout."""
    return Forecast(params.steps + read_options(TextOptions, spec, card).behaviour, 1, 1)


def _tiles(spec: LoopSpec, params: Any, card: ModelCard, pixels: bool) -> Forecast:
    options = read_options(TileOptions, spec, card)
    _, frames, height, width = card.geometry.latent_shape(params.frames, params.height, params.width)
    layout = Layout.of(options, (height, width), card.geometry)
    tokens = _tokens((frames, min(height, layout.tile[0]), min(width, layout.tile[1])), card.geometry)
    per_step = min(options.tiles_per_step, layout.count)
    return Forecast(-(-layout.count // options.tiles_per_step), per_step, tokens)


def _chunks(spec: LoopSpec, params: Any, card: ModelCard, pixels: bool) -> Forecast:
    chunk = read_options(ChunkOptions, spec, card).chunk
    _, _, height, width = card.geometry.latent_shape(params.frames, params.height, params.width)
    chunks = chunk_count(params.frames, chunk, card.geometry)
    embeds = "actions" in spec.components
    return Forecast(
        steps=embeds + chunks * steps_per_chunk(params.steps, pixels=pixels),
        rows=1,
        tokens=_tokens((chunk, height, width), card.geometry),
        frames=chunk,
        turns={"denoiser": chunks * (params.steps + 1), "decoder": chunks * pixels, "actions": int(embeds)},
    )


FORECASTS: dict[str, Callable[[LoopSpec, Any, ModelCard, bool], Forecast]] = {
    "ar_decode": _text,
    "chunk_rollout": _chunks,
    "vae_tiles": _tiles,
}
"""Kinds whose steps are not the request's."""


def forecast(spec: LoopSpec, params: Any, card: ModelCard, *, pixels: bool = True) -> Forecast:
    """The worst case of a loop under a request's settled ``params``; ``pixels``: it wants more than latents."""
    return FORECASTS.get(spec.kind, _sampling)(spec, params, card, pixels)
