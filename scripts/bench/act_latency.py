"""How long an act of a session takes until its frames are there, and how many frames a second that makes.

    python scripts/bench/act_latency.py [acts=30] [window=4] [sessions=1] [ckpt=<export>]

The bundled tiny causal Wan by default, alone on an engine with a thread of its own; the first acts, until the window
is full, are not counted. The figure is the median time from ``act()`` to the act's end. With more sessions all act at
once, and frames per second are of all together. The goal is that one session keeps up with the card's own frame rate.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from _tools import options, report

from cards.errors import UserError
from cards.registry import family
from cards.wan_causal.card import with_rollout
from inference.engine import Engine
from inference.engine_thread import EngineThread
from inference.load import card_of
from inference.session import WorldModelSession

PROMPT = "a red circle"


def main(arguments: list[str]) -> int:
    places = [argument.removeprefix("ckpt=") for argument in arguments if argument.startswith("ckpt=")]
    rest = [argument for argument in arguments if not argument.startswith("ckpt=")]
    chosen = options(rest, {"acts": 30, "window": 4, "sessions": 1})
    card = card_of(Path(places[-1])) if places else family("wan_causal").card("tiny")
    card = card if places else with_rollout(card, window=chosen["window"])
    engine = Engine()
    instance = engine.load(card, tasks=("t2v",))
    sessions = [WorldModelSession(engine, instance, PROMPT, seed) for seed in range(chosen["sessions"])]
    firsts, wholes, frames, spent = [], [], 0, 0.0
    with EngineThread(engine):
        for number in range(chosen["window"] + chosen["acts"]):
            began = time.perf_counter()
            handles = [session.act(session.actions[-1] if session.actions else None) for session in sessions]
            results = [handle.result() for handle in handles]
            seconds = time.perf_counter() - began
            if number < chosen["window"]:
                continue
            for handle in handles:
                events = list(handle.events())
                firsts.append(next(event.seconds for event in events if event.kind == "frames"))
                wholes.append(events[-1].seconds)
            spent += seconds
            frames += sum(len(result.frames_FHWC()) for result in results)
            print(f"act {number + 1}: {1e3 * seconds:.1f} ms", flush=True)
        for session in sessions:
            session.close()
    rate = frames / spent
    report(
        "act_latency",
        1e3 * statistics.median(wholes),
        "ms from act() to its end, median",
        round(1e3 * frames / len(wholes) / card.sampling.fps, 1),
        rate >= card.sampling.fps * (chosen["sessions"] == 1),
        first_frames_ms=round(1e3 * statistics.median(firsts), 1),
        worst_ms=round(1e3 * max(wholes), 1),
        frames_per_second=round(rate, 2),
        frames_an_act=frames // len(wholes),
        sessions=chosen["sessions"],
        card=card.name,
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
