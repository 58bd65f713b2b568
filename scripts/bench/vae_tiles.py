"""Tiled decoding against the untiled one on the bundled VAE: difference, largest activation and time, in one run.

    python scripts/bench/vae_tiles.py [size=64] [tile=32] [stride=24]

A ShapeWorld clip is encoded and decoded: ours by tiles, theirs untiled. The library's own ``tiled_decode`` runs too:
ours must be equal to it to the bit. How far each is from the clip is printed beside how far they are from each other,
for the bundled VAE knows frames of 32 x 32 pixels alone. Sizes are pixels per side; a frame is ``size`` by ``size``.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cards.registry import family
from cards.wan21.card import with_vae_tiles
from inference.instance import ModelInstance
from loops.drive import drive
from loops.loop import LoopContext, ModelCall
from loops.registry import loop_of_kind
from methods.shapeworld.heldout import training_scene
from methods.shapeworld.render import render

FRAMES = 9


def clip(size: int) -> Tensor:
    """Video (1, 3, F, S, S) in [-1, 1]: a scene of ShapeWorld."""
    rng = np.random.default_rng(0)
    frames_FHWC = torch.from_numpy(render(training_scene(rng), rng, FRAMES, size))
    return (frames_FHWC.permute(3, 0, 1, 2)[None].float() / 127.5) - 1


def measured(vae: Any, run: Callable[[], Tensor]) -> tuple[Tensor, int, float]:
    """Result, elements of the largest output of a decoder layer, CPU seconds."""
    largest = 0

    def see(_module: Any, _args: Any, output: Tensor) -> None:
        nonlocal largest
        largest = max(largest, output.numel())

    layers = [module for module in vae.decoder.modules() if not list(module.children())]
    handles = [module.register_forward_hook(see) for module in layers]
    began = time.process_time()
    result = run()
    seconds = time.process_time() - began
    for handle in handles:
        handle.remove()
    return result, largest, seconds


def main(arguments: list[str]) -> int:
    options = {"size": 64, "tile": 32, "stride": 24}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in options or not value.isdecimal() or int(value) < 1:
            print(f"got {argument!r}; expected {' or '.join(f'{key}=<number>' for key in options)}", file=sys.stderr)
            return 2
        options[name] = int(value)
    tile, stride = (options["tile"],) * 2, (options["stride"],) * 2
    instance = ModelInstance.load(with_vae_tiles(family("wan21").card("tiny"), tile=tile, stride=stride))
    vae: Any = instance.module("vae")
    video = clip(options["size"])
    latents = instance.call(ModelCall("vae", "encode", {"video": video}))
    spec = instance.card.loops["decode"]

    def by_tiles() -> Tensor:
        ctx = LoopContext(spec=spec, slots={"latents": latents})
        return drive(loop_of_kind(spec.kind), None, instance, ctx).value  # type: ignore[arg-type]

    def untiled() -> Tensor:
        return instance.call(ModelCall("vae", "decode", {"latents": latents}))

    def library() -> Tensor:
        theirs = copy.deepcopy(vae)
        theirs.enable_tiling(*tile, *stride)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
        with torch.no_grad():
            return theirs.decode(latents / (1.0 / std) + mean, return_dict=False)[0]

    untiled()
    theirs, theirs_largest, theirs_seconds = measured(vae, untiled)
    ours, ours_largest, ours_seconds = measured(vae, by_tiles)
    difference = (ours - theirs).abs()
    equal = torch.equal(ours, library())
    print(f"equal to the library's tiled_decode to the bit: {equal}")
    print(
        f"tiled and untiled, on pixels in [-1, 1]: {difference.max():.4f} at most, {difference.mean():.5f} on average"
    )
    errors = {"ours": (ours - video).abs().mean().item(), "theirs": (theirs - video).abs().mean().item()}
    print(f"from the clip on average: {errors['ours']:.4f} by tiles, {errors['theirs']:.4f} untiled")
    print(f"largest activation: {ours_largest} elements by tiles, {theirs_largest} untiled")
    print(f"CPU seconds: {ours_seconds:.2f} by tiles, {theirs_seconds:.2f} untiled")
    print(
        json.dumps(
            {
                "name": "vae_tiles",
                "value": round(ours_largest / theirs_largest, 4),
                "unit": "largest activation, tiled / untiled",
                "goal": round((options["tile"] / options["size"]) ** 2, 4),
                "pass": bool(equal and ours_largest * options["size"] ** 2 <= theirs_largest * options["tile"] ** 2),
                "ours": {
                    "largest_activation": ours_largest,
                    "cpu_seconds": round(ours_seconds, 3),
                    "error_mean": round(errors["ours"], 5),
                    "difference_max": round(difference.max().item(), 5),
                    "difference_mean": round(difference.mean().item(), 6),
                },
                "theirs": {
                    "largest_activation": theirs_largest,
                    "cpu_seconds": round(theirs_seconds, 3),
                    "error_mean": round(errors["theirs"], 5),
                },
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
