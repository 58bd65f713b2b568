"""How long short requests wait behind long ones at 0.8 of capacity: fair shares against first come, first served.

    python scripts/bench/mixed_load.py [requests=60] [load=80] [seed=0]

Four sizes of request (2, 8, 24 and 60 steps) arrive as a Poisson process, 15, 25, 45 and 15 % of them; ``load`` is the
share in percent of what the device can do, measured first. Both policies replay the same arrivals in real time, with
batching off, so the work is the same. The figure is the p95 latency of the shortest class under ``fair`` over that
under ``fifo``; starvation is looked for in the slowdown of the longest class and in the longest pause between two steps
of any request.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
from _tools import options, random_wan, report

from inference.engine import Engine, Handle
from inference.engine_thread import EngineThread
from inference.instance import ModelInstance
from inference.request import Request

GOAL = 0.5
STEPS = (2, 8, 24, 60)
SHARES = (0.15, 0.25, 0.45, 0.15)
BASE = Request(prompt="a red circle", guidance=1.0, solver="euler", output="latents")


@dataclass(frozen=True)
class Arrival:
    """One request of the trace."""

    at: float
    """Seconds."""
    size: int
    """Index into STEPS."""
    seed: int


def trace(requests: int, seconds_each: float, load: float, seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    at, rows = 0.0, []
    for i in range(requests):
        at += rng.expovariate(load / seconds_each)
        rows.append(Arrival(at, rng.choices(range(4), SHARES)[0], i))
    return rows


def replay(arrivals: list[Arrival], policy: str, instance: ModelInstance) -> tuple[list[list[float]], float, float]:
    """Latencies (s) by size, the longest pause (s) of a request between two steps, and the seconds of it all."""
    engine = Engine(policy=policy)  # type: ignore[arg-type]
    engine.encode([BASE.prompt], instance)
    thread = EngineThread(engine)
    thread.start()
    began = time.monotonic()
    handles: list[tuple[Arrival, Handle]] = []
    for arrival in arrivals:
        time.sleep(max(0.0, began + arrival.at - time.monotonic()))
        request = replace(BASE, seed=arrival.seed, steps=STEPS[arrival.size])
        handles.append((arrival, engine.submit(request, instance)))
    latencies: list[list[float]] = [[] for _ in STEPS]
    pause = 0.0
    for arrival, handle in handles:
        handle.result()
        events = list(handle.events())
        latencies[arrival.size].append(events[-1].seconds)
        steps = [event.seconds for event in events]
        pause = max(pause, *np.diff(steps))
    thread.stop()
    return latencies, pause, time.monotonic() - began


def main(arguments: list[str]) -> int:
    chosen = options(arguments, {"requests": 60, "load": 80, "seed": 0})
    instance = random_wan(layers=8)
    warm = Engine()
    warm.run(replace(BASE, seed=0, steps=20), instance)
    began = time.perf_counter()
    warm.run(replace(BASE, seed=0, steps=100), instance)
    step = (time.perf_counter() - began) / 100
    mean = step * sum(n * share for n, share in zip(STEPS, SHARES, strict=True))
    arrivals = trace(chosen["requests"], mean, chosen["load"] / 100, chosen["seed"])
    print(f"a step takes {1e3 * step:.1f} ms, a request {mean:.2f} s on average; {arrivals[-1].at:.0f} s of arrivals")
    p95, pauses, longest = {}, {}, {}
    for policy in ("fifo", "fair"):
        latencies, pause, seconds = replay(arrivals, policy, instance)
        p95[policy] = float(np.percentile(latencies[0], 95))
        longest[policy] = float(np.percentile(latencies[3], 95))
        pauses[policy] = pause
        rows = ", ".join(f"{n} steps {np.percentile(row, 95):.2f} s" for n, row in zip(STEPS, latencies, strict=True))
        print(f"{policy}: p95 of {rows}; longest pause {pause:.2f} s; {seconds:.0f} s in all", flush=True)
    ratio = p95["fair"] / p95["fifo"]
    report(
        "mixed_load",
        ratio,
        "p95 of the short class, fair / fifo",
        GOAL,
        ratio <= GOAL,
        short_p95={name: round(value, 3) for name, value in p95.items()},
        long_p95={name: round(value, 3) for name, value in longest.items()},
        longest_pause={name: round(value, 3) for name, value in pauses.items()},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
