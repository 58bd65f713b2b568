"""Loop kind -> loop, and what its options on a card are. Every miss lists the valid names."""

from __future__ import annotations

from typing import Any

from cards.card import LoopSpec, ModelCard
from cards.errors import unknown_name
from cards.program import Node
from loops.adaptive import AdaptiveOptions, ExitLoop, ExitOptions, FirstBlockLoop, SkipLoop, SkipOptions
from loops.ar_decode import ARDecodeLoop, TextOptions
from loops.chunk_rollout import ChunkOptions, ChunkRolloutLoop
from loops.component import ComponentLoop
from loops.denoise import DenoiseLoop
from loops.denoise_image import DenoiseImageLoop
from loops.loop import Loop
from loops.options import LoopOptions, read_options
from loops.score import ScoreLoop
from loops.vae_tiles import TileOptions, TilesLoop

LOOPS: dict[str, Loop] = {
    "ar_decode": ARDecodeLoop(),
    "chunk_rollout": ChunkRolloutLoop(),
    "diffusion_denoise": DenoiseLoop(),
    "diffusion_denoise_exit": ExitLoop(),
    "diffusion_denoise_first_block": FirstBlockLoop(),
    "diffusion_denoise_image": DenoiseImageLoop(),
    "diffusion_denoise_skip": SkipLoop(),
    "score": ScoreLoop(),
    "vae_tiles": TilesLoop(),
}
OPTIONS: dict[str, type[LoopOptions]] = {
    "ar_decode": TextOptions,
    "chunk_rollout": ChunkOptions,
    "diffusion_denoise_exit": ExitOptions,
    "diffusion_denoise_first_block": AdaptiveOptions,
    "diffusion_denoise_skip": SkipOptions,
    "vae_tiles": TileOptions,
}
"""Kinds that read options; the others have none."""


def loop_of_kind(kind: str) -> Loop:
    """The loop that a card names; raises ``UserError`` with the list of kinds."""
    if kind not in LOOPS:
        raise unknown_name("loop kind", kind, LOOPS)
    return LOOPS[kind]


def check_loop(spec: LoopSpec, card: ModelCard) -> None:
    """Raises ``UserError`` for a kind that does not exist or options that the kind cannot run with."""
    loop_of_kind(spec.kind)
    read_options(OPTIONS.get(spec.kind, LoopOptions), spec, card)


def check_params(params: Any, spec: LoopSpec, card: ModelCard) -> None:
    """Raises ``UserError`` for a request's settled ``params`` that the spec's kind cannot run."""
    read_options(OPTIONS.get(spec.kind, LoopOptions), spec, card).check_params(params, spec, card)


def component_loop(node: Node) -> Loop:
    """The one-step loop of a component node."""
    return ComponentLoop(node)
