"""What merging equal steps of B requests gains, against what one forward of B rows gains by itself.

    python scripts/bench/batching.py [steps=8] [rounds=4]

For B = 2, 4, 8: the engine runs B requests one after the other and together with ``batching="shape"``; the raw side
runs B forwards of one row and one forward of B rows, as often. The efficiency is the engine's speed-up over the raw
one. All four alternate within a round; the figure is the least over B of the median over rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from _tools import TEXT_TOKENS, TEXT_WIDTH, options, random_wan, report

from inference.engine import Engine
from inference.request import Request

GOAL = 0.95
BATCHES = (2, 4, 8)


def timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    chosen = options(arguments, {"steps": 8, "rounds": 4})
    steps = chosen["steps"]
    instance = random_wan()
    card, transformer = instance.card, instance.module("transformer")
    size = card.geometry.latent_shape(card.sampling.frames, card.sampling.height, card.sampling.width)
    base = Request(prompt="a red circle", steps=steps, guidance=1.0, solver="euler", output="latents")
    engine = Engine(batching="shape")
    engine.encode([base.prompt], instance)  # neither side encodes
    medians = {}
    for rows in BATCHES:
        requests = [replace(base, seed=seed) for seed in range(rows)]
        latents, text = torch.randn(rows, *size), torch.randn(rows, TEXT_TOKENS, TEXT_WIDTH)
        times = torch.full((rows,), 500.0)

        @torch.no_grad()
        def raw_one(latents: Any = latents, text: Any = text, times: Any = times, rows: int = rows) -> None:
            for _ in range(steps):
                for i in range(rows):
                    transformer(latents[i : i + 1], times[i : i + 1], text[i : i + 1], return_dict=False)

        @torch.no_grad()
        def raw_all(latents: Any = latents, text: Any = text, times: Any = times) -> None:
            for _ in range(steps):
                transformer(latents, times, text, return_dict=False)

        def serial(requests: Any = requests) -> None:
            engine.run_serial(requests, instance)

        def together(requests: Any = requests) -> None:
            engine.run_interleaved(requests, instance)

        sides = (serial, together, raw_one, raw_all)
        for side in sides:
            side()
        efficiencies = []
        for index in range(chosen["rounds"]):
            order = sides if index % 2 == 0 else sides[::-1]
            seconds = {side: timed(side) for side in order}
            ours, raw = seconds[serial] / seconds[together], seconds[raw_one] / seconds[raw_all]
            efficiencies.append(ours / raw)
            print(f"B={rows}: engine {ours:.3f}x, raw forward {raw:.3f}x, efficiency {ours / raw:.3f}", flush=True)
        medians[rows] = statistics.median(efficiencies)
    least = min(medians.values())
    report(
        "batching",
        least,
        "engine's speed-up / that of raw forward(B)",
        GOAL,
        least >= GOAL,
        by_batch={str(rows): round(value, 4) for rows, value in medians.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
