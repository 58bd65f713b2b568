"""How soon a causal card's first frames leave: seconds to the first ``frames`` event over seconds to the whole clip.

    python scripts/bench/first_frames.py [card=wan_causal | card=<export>] [clips=10] [frames=9]

One request at a time through the engine; prompts are encoded anew. The figure is the median over clips.
"""

from __future__ import annotations

import statistics
import sys
import time

from _tools import report, text_options

from cards.registry import FAMILIES, family
from inference.engine import Engine
from inference.request import Request

GOAL = 1 / 3
DEFAULTS = {"card": "wan_causal", "clips": "10", "frames": "9"}


def main(arguments: list[str]) -> int:
    chosen = text_options(arguments, DEFAULTS)
    name = chosen["card"]
    engine = Engine(cache_bytes=0)
    engine.load(family(name).card("tiny") if name in FAMILIES else name)
    pairs = []
    for index in range(int(chosen["clips"]) + 1):
        began = time.perf_counter()
        handle = engine.submit(Request(prompt="a red circle moves left", seed=index, frames=int(chosen["frames"])))
        while engine.tick():
            pass
        whole = time.perf_counter() - began
        first = next(event.seconds for event in handle.events() if event.kind == "frames")
        if index:  # the first clip warms up
            pairs.append((first, whole))
    ratio = statistics.median(first / whole for first, whole in pairs)
    mine, all_of_it = (statistics.median(column) for column in zip(*pairs, strict=True))
    report("first_frames", ratio, "first / whole", GOAL, ratio <= GOAL, ours=round(mine, 4), theirs=round(all_of_it, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
