"""What a prompt's encoding costs in full and in folded text padding: milliseconds a prompt, in turns.

    python scripts/bench/text_encoding.py [rounds=5] [prompts=16] [threads=1]

Both sides are the bundled tiny card's own text encoder in one engine, on the same prompts, none of them met before: the
cache of features is of no help, as with a prompt refiner whose every rewrite is new. The figure is the median over
rounds of full / folded; the features' largest difference is printed beside it.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from _tools import options, report

from cards.registry import family
from fastvideo_train.numerics import with_text_padding
from inference.engine import Engine
from inference.instance import ModelInstance

GOAL = 2.0


def main(arguments: list[str]) -> int:
    chosen = options(arguments, {"rounds": 5, "prompts": 16, "threads": 1})
    torch.set_num_threads(chosen["threads"])
    card = family("wan21").card("tiny")
    full = ModelInstance.load(card)
    sides = {name: full.view({}, with_text_padding(card, name)) for name in ("full", "folded")}
    engine = Engine("cpu")
    for instance in sides.values():
        engine.encode(["a red circle"], instance)
    times: dict[str, list[float]] = {name: [] for name in sides}
    apart = 0.0
    for index in range(chosen["rounds"]):
        prompts = [f"a red circle moves left {index} {i}" for i in range(chosen["prompts"])]
        features = {}
        for name in sorted(sides, reverse=index % 2 == 0):
            began = time.perf_counter()
            features[name] = torch.cat(engine.encode(prompts, sides[name]))
            times[name].append(1e3 * (time.perf_counter() - began) / len(prompts))
        apart = max(apart, (features["full"] - features["folded"]).abs().max().item())
    ratio = statistics.median(a / b for a, b in zip(times["full"], times["folded"], strict=True))
    report(
        "text_encoding",
        ratio,
        "full / folded text padding, time of a prompt",
        GOAL,
        ratio >= GOAL,
        ms={name: round(statistics.median(of), 2) for name, of in times.items()},
        largest_difference=apart,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
