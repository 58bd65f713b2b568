"""What a loop of a card will run for a request, before it starts: the worst case, for admission and progress.

Knows each kind's number of steps and the size of a step; leaves seconds and bytes to whoever has a cost model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cards.card import LoopSpec, ModelCard
from cards.geometry import Geometry
from loops.loop import SamplingParams
from loops.options import read_options
from loops.vae_tiles import Layout, TileOptions


@dataclass(frozen=True)
class Forecast:
    """At most so many steps, none larger than this."""

    steps: int
    rows: int
    """Rows of a step, were its calls one forward."""
    tokens: int
    """Tokens of a row: of the card's transformer for a clip, text tokens otherwise."""


def _tokens(cells: tuple[int, int, int], geometry: Geometry) -> int:
    """Transformer tokens of (frames, height, width) latent cells, at least one."""
    frames, height, width = (n // p for n, p in zip(cells, geometry.patch, strict=True))
    return max(1, frames * height * width)


def _sampling(spec: LoopSpec, params: Any, card: ModelCard) -> Forecast:
    """A loop with a step for each of the request's, guidance branches as rows."""
    tokens = 1
    if isinstance(params, SamplingParams):
        tokens = card.geometry.tokens(params.frames, params.height, params.width)
    return Forecast(params.steps, 2 if params.guided else 1, tokens)


def _tiles(spec: LoopSpec, params: Any, card: ModelCard) -> Forecast:
    options = read_options(TileOptions, spec, card)
    _, frames, height, width = card.geometry.latent_shape(params.frames, params.height, params.width)
    layout = Layout.of(options, (height, width), card.geometry)
    tokens = _tokens((frames, min(height, layout.tile[0]), min(width, layout.tile[1])), card.geometry)
    per_step = min(options.tiles_per_step, layout.count)
    return Forecast(-(-layout.count // options.tiles_per_step), per_step, tokens)


FORECASTS: dict[str, Callable[[LoopSpec, Any, ModelCard], Forecast]] = {"vae_tiles": _tiles}
"""Kinds whose steps are not the request's."""


def forecast(spec: LoopSpec, params: Any, card: ModelCard) -> Forecast:
    """The worst case of a loop under a request's settled ``params``."""
    return FORECASTS.get(spec.kind, _sampling)(spec, params, card)
