"""Decoding by spatial tiles: one ModelCall a tile, so that a long decode takes turns with other requests and needs a
tile's memory at a time.

Equal to the bit to ``tiled_decode`` of ``diffusers.AutoencoderKLWan`` with the same sizes: the same overlapping tiles,
blended row by row into the tile above and the tile on the left, clamped at the end. That is not the untiled decode: a
tile does not see beyond its edges. On the bundled VAE and a ShapeWorld clip, pixels in [-1, 1], tiles of half a frame's
side and strides of three eighths differ from it by 0.0025 on average and 0.20 at most in a frame of 128 x 128 pixels,
0.0056 and 0.52 in one of 64 x 64, 0.019 and 0.85 in one of 32 x 32 (``scripts/bench/vae_tiles.py``). Where one tile
covers the frame it is the untiled decode, and the call is the same. Knows nothing about what a decoder computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pydantic import Field
from torch import Tensor

from cards.card import LoopSpec, ModelCard
from cards.errors import UserError
from cards.geometry import Geometry
from loops.loop import (
    Done,
    Instance,
    Loop,
    LoopContext,
    LoopResult,
    LoopState,
    ModelCall,
    Resources,
    SamplingParams,
    StepResult,
    WorkPlan,
    WorkUnit,
)
from loops.options import LoopOptions, read_options

HEIGHT, WIDTH = 3, 4
"""Dims of latents and videos (B, C, T, H, W)."""


class TileOptions(LoopOptions):
    """Sizes as ``AutoencoderKLWan.enable_tiling`` takes them."""

    tile: tuple[int, int]
    """(height, width) of a tile in pixels."""
    stride: tuple[int, int]
    """(height, width) in pixels from one tile to the next; neighbours overlap by ``tile - stride`` and blend there."""
    tiles_per_step: int = Field(default=1, ge=1)
    """Tiles of one step. Where the engine merges equal calls these share a forward: faster, with their memory."""

    def check(self, spec: LoopSpec, card: ModelCard) -> None:
        cell = card.geometry.spatial
        problems = [
            f"{name}: got {value} pixels, expected a positive multiple of {cell} (a latent cell)"
            for name, sizes in (("tile", self.tile), ("stride", self.stride))
            for value in sizes
            if value < cell or value % cell
        ]
        if any(stride > tile for stride, tile in zip(self.stride, self.tile, strict=True)):
            problems.append(f"stride: got {self.stride}, expected at most the tile {self.tile}; larger leaves gaps")
        if "decoder" not in spec.components:
            problems.append(f"components: got {sorted(spec.components)}, expected the part decoder")
        if problems:
            raise UserError(f"card {card.name!r}, loop kind {spec.kind!r}: " + "; ".join(problems))


@dataclass(frozen=True)
class Layout:
    """Where the tiles of one frame lie. All in latent cells."""

    size: tuple[int, int]
    """(height, width) of the frame."""
    tile: tuple[int, int]
    stride: tuple[int, int]
    cell: int
    """Pixels a cell, per side."""

    @classmethod
    def of(cls, options: TileOptions, size: tuple[int, int], geometry: Geometry) -> Layout:
        """The layout of a frame of ``size`` latent cells."""
        (tile_h, tile_w), (stride_h, stride_w), cell = options.tile, options.stride, geometry.spatial
        return cls(size, (tile_h // cell, tile_w // cell), (stride_h // cell, stride_w // cell), cell)

    @property
    def whole(self) -> bool:
        """One tile covers the frame."""
        return self.size[0] <= self.tile[0] and self.size[1] <= self.tile[1]

    @property
    def columns(self) -> int:
        return -(-self.size[1] // self.stride[1])

    @property
    def rows(self) -> int:
        return -(-self.size[0] // self.stride[0])

    @property
    def count(self) -> int:
        return 1 if self.whole else self.rows * self.columns

    def corner(self, index: int) -> tuple[int, int]:
        """(top, left) of a tile, counted row by row."""
        row, column = divmod(index, self.columns)
        return row * self.stride[0], column * self.stride[1]

    def cut(self, latents_BCTHW: Tensor, index: int) -> Tensor:
        """A tile of the latents; smaller at the lower and right end of the frame."""
        top, left = self.corner(index)
        return latents_BCTHW[..., top : top + self.tile[0], left : left + self.tile[1]]


def blend(edge: Tensor, tile: Tensor, extent: int, dim: int) -> None:
    """Fades ``edge``, the end of the tile before along ``dim``, into the first ``extent`` rows of ``tile``, in place.

    Row by row as ``AutoencoderKLWan.blend_v`` and ``blend_h`` do it, so that the bits are theirs.
    """
    extent = min(edge.shape[dim], tile.shape[dim], extent)
    for k in range(extent):
        before, after = edge.select(dim, edge.shape[dim] - extent + k), tile.select(dim, k)
        after.copy_(before * (1 - k / extent) + after * (k / extent))


def end_of(tile: Tensor, extent: int, dim: int) -> Tensor:
    """A copy of the last ``extent`` rows along ``dim``, of all where there are fewer."""
    extent = min(tile.shape[dim], extent)
    return tile.narrow(dim, tile.shape[dim] - extent, extent).clone()


class TilesLoop(Loop):
    """``vae_tiles``: one VAE_TILE step for ``tiles_per_step`` tiles. Reads the slot ``latents``; gives a video."""

    def init(self, params: SamplingParams | None, instance: Instance, ctx: LoopContext) -> LoopState:
        assert ctx.spec is not None
        options = read_options(TileOptions, ctx.spec, instance.card)
        latents_BCTHW = ctx.slots["latents"]
        size = (latents_BCTHW.shape[HEIGHT], latents_BCTHW.shape[WIDTH])
        layout = Layout.of(options, size, instance.card.geometry)
        height, width = (min(a, b) for a, b in zip(layout.size, layout.tile, strict=True))
        cells = latents_BCTHW.shape[2] * height * width
        return LoopState(
            step=0,
            total=-(-layout.count // options.tiles_per_step),
            params=params,
            tensors={"latents": latents_BCTHW},
            facts={
                "component": ctx.spec.components["decoder"],
                "layout": layout,
                "tiles_per_step": options.tiles_per_step,
                "seconds": ctx.spec.cost.base_seconds + ctx.spec.cost.per_token_seconds * cells,
            },
        )

    def next(self, state: LoopState) -> WorkPlan | Done:
        if state.step >= state.total:
            return Done()
        layout, component = state.facts["layout"], state.facts["component"]
        method = "decode" if layout.whole else "decode_tile"
        tiles = self._tiles(state)
        calls = tuple(
            ModelCall(component, method, {"latents": layout.cut(state.tensors["latents"], index)}) for index in tiles
        )
        return WorkPlan(
            unit=WorkUnit.VAE_TILE,
            calls=calls,
            label=f"decode {tiles[-1] + 1}/{layout.count}",
            resources=Resources(seconds=len(calls) * state.facts["seconds"]),
        )

    def _tiles(self, state: LoopState) -> range:
        """Tiles of the state's step."""
        per_step = state.facts["tiles_per_step"]
        return range(state.step * per_step, min((state.step + 1) * per_step, state.facts["layout"].count))

    def advance(self, state: LoopState, result: StepResult) -> LoopState:
        """Puts the tiles into the video, which grows in place, and keeps of each the ends that its neighbours need."""
        layout, tensors = state.facts["layout"], dict(state.tensors)
        for index, output in zip(self._tiles(state), result.outputs, strict=True):
            if layout.whole:
                tensors["video"] = output
            else:
                self._place(tensors, layout, index, output.clone())
        return replace(state, step=state.step + 1, tensors=tensors)

    def _place(self, tensors: dict[str, Tensor], layout: Layout, index: int, tile: Tensor) -> None:
        cell = layout.cell
        overlap = tuple((a - b) * cell for a, b in zip(layout.tile, layout.stride, strict=True))
        row, column = divmod(index, layout.columns)
        if row > 0:
            blend(tensors.pop(f"above {column}"), tile, overlap[0], HEIGHT)
        if column > 0:
            blend(tensors.pop("left"), tile, overlap[1], WIDTH)
        if row + 1 < layout.rows:
            tensors[f"above {column}"] = end_of(tile, overlap[0], HEIGHT)
        if column + 1 < layout.columns:
            tensors["left"] = end_of(tile, overlap[1], WIDTH)
        if "video" not in tensors:
            tensors["video"] = tile.new_empty((*tile.shape[:3], layout.size[0] * cell, layout.size[1] * cell))
        top, left = (corner * cell for corner in layout.corner(index))
        kept = tile[..., : layout.stride[0] * cell, : layout.stride[1] * cell]
        tensors["video"][..., top : top + kept.shape[HEIGHT], left : left + kept.shape[WIDTH]] = kept

    def finalize(self, state: LoopState) -> LoopResult:
        video = state.tensors["video"]
        return LoopResult(video if state.facts["layout"].whole else torch.clamp(video, min=-1.0, max=1.0))
