"""What a few-step student saves: seconds a video against its teacher at 50 UniPC steps, in turns.

    python scripts/bench/few_step.py student=<export> [teacher=<folder or card>] [steps=50] [guidance=3] [videos=6]

Both make whole videos through the engine (encode, denoise, decode), one at a time; the prompts are encoded anew. The
student runs its own ladder. ``guidance`` is the teacher's; 1 halves its forwards. The figure is the median over pairs
of theirs / ours.
"""

from __future__ import annotations

import statistics
import sys
import time

from _tools import report, text_options

from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request

GOAL = 10.0
DEFAULTS = {"student": "", "teacher": "wan21", "steps": "50", "guidance": "3", "videos": "6"}
PROMPTS = ("a red circle moves left", "two blue squares", "a green triangle stays still")


def load(name: str) -> ModelInstance:
    from cards.registry import FAMILIES, family

    return Engine().load(family(name).card("tiny") if name in FAMILIES else name)


def seconds(instance: ModelInstance, request: Request) -> float:
    engine = Engine(cache_bytes=0)
    began = time.perf_counter()
    engine.run(request, instance)
    return time.perf_counter() - began


def main(arguments: list[str]) -> int:
    chosen = text_options(arguments, DEFAULTS)
    if not chosen["student"]:
        print("few_step: no student=<export> given; nothing is measured")
        return 0
    student, teacher = load(chosen["student"]), load(chosen["teacher"])
    steps, guidance, videos = int(chosen["steps"]), float(chosen["guidance"]), int(chosen["videos"])
    pairs = []
    for index in range(videos + 1):
        prompt = PROMPTS[index % len(PROMPTS)]
        ours = seconds(student, Request(prompt=prompt, seed=index))
        theirs = seconds(teacher, Request(prompt=prompt, seed=index, steps=steps, solver="unipc", guidance=guidance))
        if index:  # the first pair warms up
            pairs.append((ours, theirs))
            print(f"video {index}: ours {ours:.3f} s, theirs {theirs:.3f} s, {theirs / ours:.1f}x", flush=True)
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    mine, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
    report("few_step", ratio, "theirs / ours", GOAL, ratio >= GOAL, ours=round(mine, 4), theirs=round(hand, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
