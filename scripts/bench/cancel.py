"""How many steps a cancelled request still takes, while others run beside it.

    python scripts/bench/cancel.py [trials=20]

Another thread cancels one of four requests at a random time. A step that is under way at that moment ends; the figure
is the most steps that a request took after ``cancel()`` had returned.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

from _tools import options, random_wan, report

from inference.engine import Engine
from inference.engine_thread import EngineThread
from inference.request import Request

GOAL = 1.0


def main(arguments: list[str]) -> int:
    chosen = options(arguments, {"trials": 20})
    instance = random_wan(heads=2, layers=2, ffn=256)
    engine, rng = Engine(), random.Random(0)
    base = Request(prompt="a red circle", steps=200, guidance=1.0, solver="euler", output="latents")
    thread = EngineThread(engine)
    thread.start()
    after, waits = [], []
    for trial in range(chosen["trials"]):
        handles = [engine.submit(replace(base, seed=seed), instance) for seed in range(4)]
        time.sleep(rng.uniform(0.05, 0.3))
        chosen_one = handles[rng.randrange(4)]
        chosen_one.cancel()
        done, began = chosen_one.progress[0], time.perf_counter()
        while not chosen_one.done:
            time.sleep(0.0005)
        waits.append(time.perf_counter() - began)
        after.append(chosen_one.progress[0] - done)
        for handle in handles:
            handle.cancel()
        while not all(handle.done for handle in handles):
            time.sleep(0.0005)
        print(f"trial {trial + 1}: {after[-1]} steps after cancel, {1e3 * waits[-1]:.1f} ms", flush=True)
    thread.stop()
    tickets = engine.ledger.tickets
    report(
        "cancel",
        max(after),
        "steps after cancel, at most",
        GOAL,
        max(after) <= GOAL and tickets == 0,
        worst_ms=round(1e3 * max(waits), 1),
        tickets_left=tickets,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
