"""Whether memory grows with the number of requests: 1,000 of them, resident memory after 100 against the end.

    python scripts/bench/rss.py [requests=1000]

Prompts, sizes, guidance and outputs vary; some are cancelled, some fail. The feature cache is on, with room for a few
dozen prompts, so that it is full after 100.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import replace
from pathlib import Path

from _tools import options, random_wan, report

from cards.errors import UserError
from inference.engine import Engine
from inference.request import Request

GOAL = 1.02


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(arguments: list[str]) -> int:
    chosen = options(arguments, {"requests": 1000})
    instance = random_wan(heads=2, head_dim=32, layers=2, ffn=128)
    engine = Engine(cache_bytes=2**20)
    base = Request(prompt="", steps=4, guidance=1.0, output="latents")
    level = 0
    for first in range(0, chosen["requests"], 10):
        handles = [
            engine.submit(
                replace(
                    base, prompt=f"prompt {i}", seed=i, width=16 * (1 + i % 3), guidance=1.0 + i % 2, steps=2 + i % 4
                ),
                instance,
            )
            for i in range(first, first + 10)
        ]
        engine.tick()
        handles[0].cancel()
        while engine.tick():
            pass
        for handle in handles:
            with contextlib.suppress(UserError):
                handle.result()
        if first + 10 == 100:
            gc.collect()
            level = resident_bytes()
        if (first + 10) % 100 == 0:
            print(f"{first + 10} requests: {resident_bytes() / 2**20:.1f} MiB", flush=True)
    gc.collect()
    ratio = resident_bytes() / level
    report(
        "rss",
        ratio,
        "resident memory at the end / after 100 requests",
        GOAL,
        ratio <= GOAL,
        tickets_left=engine.ledger.tickets,
        mib=round(level / 2**20, 1),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
