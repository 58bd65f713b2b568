"""What it costs that a request is queued: 10,000 requests through submission, line, admission and end.

    python scripts/bench/admission.py [requests=10000] [slots=8]

``ledger`` is the line alone: admit, and then, as places become free, ready and refund. ``submit`` is all that a caller
waits for: the request is checked, its demand estimated, and it is put in. Both in microseconds a request, both sides in
one run; the figure is the ledger's.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from _tools import options, random_wan, report

from inference.admission import Budget, Demand, Ledger, Ticket, Waiting
from inference.engine import Engine
from inference.request import Request

GOAL = 50.0


def through_the_ledger(requests: int, slots: int) -> float:
    """Microseconds a request, with all of them in the line at once."""
    ledger = Ledger(Budget(slots=slots, seconds=1e6, resident_bytes=2**40))
    began = time.perf_counter()
    open_tickets: list[Ticket] = []
    waiting: list[Waiting] = []
    for i in range(requests):
        place = ledger.admit(Demand(seconds=1 + i % 7, resident_bytes=1000 + i % 13), (float(i % 97), float(i)))
        if isinstance(place, Ticket):
            open_tickets.append(place)
        else:
            waiting.append(place)
    longest = ledger.waiting
    done = 0
    while open_tickets:
        open_tickets.pop(0).refund()
        done += 1
        for place in ledger.ready():
            assert place.ticket is not None
            open_tickets.append(place.ticket)
    seconds = time.perf_counter() - began
    assert done == requests and ledger.tickets == 0 and longest == requests - slots
    return 1e6 * seconds / requests


def submitted(requests: int, slots: int) -> tuple[float, float]:
    """Microseconds a request of ``Engine.submit``, and of a round's look at the line when nobody can be let in."""
    instance = random_wan(heads=1, head_dim=16, layers=1, ffn=16)
    engine = Engine(budget=Budget(slots=slots))
    base = Request(prompt="a red circle", steps=2, guidance=1.0, output="latents")
    began = time.perf_counter()
    for seed in range(requests):
        engine.submit(replace(base, seed=seed), instance)
    submit = time.perf_counter() - began
    engine.tick()  # takes them all into the line, and runs a step of those let in
    began = time.perf_counter()
    for _ in range(100):
        assert not list(engine._intake.settle())
    return 1e6 * submit / requests, 1e6 * (time.perf_counter() - began) / 100


def main(arguments: list[str]) -> int:
    chosen = options(arguments, {"requests": 10_000, "slots": 8})
    ledger = min(through_the_ledger(chosen["requests"], chosen["slots"]) for _ in range(3))
    print(f"ledger: {ledger:.1f} us a request", flush=True)
    submit, look = submitted(chosen["requests"], chosen["slots"])
    print(f"submit: {submit:.1f} us a request; a round's look at the line of those: {look:.1f} us", flush=True)
    report(
        "admission",
        ledger,
        "microseconds a request",
        GOAL,
        ledger < GOAL,
        submit=round(submit, 1),
        look=round(look, 1),
        requests=chosen["requests"],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
