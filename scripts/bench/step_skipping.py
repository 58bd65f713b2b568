"""What content-adaptive loops leave out on the bundled Wan, and what it costs: all sides in one run.

    python scripts/bench/step_skipping.py [requests=16] [steps=20] [fine=100] [euler=0]

Every request is sampled by the base loop with ``steps`` and with ``fine`` steps, by each adaptive loop at several
thresholds, and by the base loop with fewer steps, which is what an adaptive loop must beat; by the Euler solver with
``euler=1``, else by the card's own. A row is a JSON line:

- ``forwards``: whole forwards of a request and branch, on average; a first-block forward that stops there counts its
  share of the blocks.
- ``from_base`` and ``from_fine``: relative L1 difference of the final latents from the base loop's with ``steps`` and
  with ``fine`` steps.
- ``correct``: share of the videos that ShapeEval finds right in all that their prompts ask for.

The figure is the skipping loop's ``from_fine`` over that of the base loop with as many steps as it had forwards.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cards.registry import family
from cards.wan21.card import with_denoise_loop
from inference.engine import Engine
from inference.instance import ModelInstance
from inference.request import Request
from loops.adaptive import relative_change
from methods.shapeworld.heldout import training_caption
from methods.shapeworld.judge import evaluate

GUIDANCE = 3.0
SKIP, FIRST_BLOCK, EXIT = (f"diffusion_denoise_{name}" for name in ("skip", "first_block", "exit"))
SIDES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((SKIP, {"threshold": t, "order": order}) for order in (0, 1) for t in (0.0, 0.05, 0.1, 0.15, 0.2, 0.3)),
    *((FIRST_BLOCK, {"threshold": t}) for t in (0.0, 0.05, 0.1, 0.2, 0.3)),
    *((EXIT, {"threshold": t, "patience": 2}) for t in (0.0, 0.02, 0.05, 0.1)),
)
CHOSEN = (SKIP, {"threshold": 0.1, "order": 1})
"""The side that the figure is taken of."""


@dataclass(frozen=True)
class Outcome:
    """One side's results for all requests."""

    latents: list[Tensor]
    forwards: float
    correct: float
    seconds: float
    """CPU."""


def sample(instance: ModelInstance, requests: Sequence[Request]) -> Outcome:
    """All requests one after the other; block forwards are counted on the real module."""
    transformer: Any = instance.module("transformer")
    count = 0

    def see(*_: object) -> None:
        nonlocal count
        count += 1

    handles = [block.ffn.register_forward_pre_hook(see) for block in transformer.blocks]
    began = time.process_time()
    artifacts = Engine().run_serial(requests, instance)
    seconds = time.process_time() - began
    for handle in handles:
        handle.remove()
    videos = [artifact.frames_FHWC() for artifact in artifacts]
    forwards = count / len(transformer.blocks) / len(requests) / 2
    correct = evaluate(videos, [request.prompt for request in requests])["all_correct"]
    return Outcome([artifact.latents for artifact in artifacts], forwards, correct, seconds)


def difference(ours: Outcome, theirs: Outcome) -> float:
    pairs = zip(ours.latents, theirs.latents, strict=True)
    return float(np.mean([relative_change(a, b) for a, b in pairs]))


def main(arguments: list[str]) -> int:
    options = {"requests": 16, "steps": 20, "fine": 100, "euler": 0}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in options or not value.isdecimal():
            print(f"got {argument!r}; expected {' or '.join(f'{key}=<number>' for key in options)}", file=sys.stderr)
            return 2
        options[name] = int(value)
    if 0 in (options["requests"], options["steps"], options["fine"]):
        print(f"got {options}; expected at least 1 request, step and fine step", file=sys.stderr)
        return 2
    solver = "euler" if options["euler"] else None
    instance = ModelInstance.load(family("wan21").card("tiny"))
    rng = np.random.default_rng(0)
    requests = [
        Request(prompt=training_caption(rng), seed=seed, steps=options["steps"], guidance=GUIDANCE, solver=solver)
        for seed in range(options["requests"])
    ]

    def with_steps(steps: int) -> Outcome:
        return sample(instance, [replace(request, steps=steps) for request in requests])

    fine, base = with_steps(options["fine"]), with_steps(options["steps"])

    def show(loop: str, settings: dict[str, Any], outcome: Outcome) -> None:
        row = {
            "loop": loop,
            **settings,
            "forwards": round(outcome.forwards, 2),
            "from_base": round(difference(outcome, base), 5),
            "from_fine": round(difference(outcome, fine), 5),
            "correct": round(outcome.correct, 3),
            "cpu_seconds": round(outcome.seconds, 2),
        }
        print(json.dumps(row), flush=True)

    show("diffusion_denoise", {"steps": options["fine"]}, fine)
    fewer = {options["steps"]: base}
    for steps in sorted({max(1, round(options["steps"] * share)) for share in (0.3, 0.4, 0.5, 0.6, 0.8)}):
        fewer[steps] = with_steps(steps)
    for steps, outcome in sorted(fewer.items()):
        show("diffusion_denoise", {"steps": steps}, outcome)
    chosen = base
    zero_is_base = True
    for kind, settings in SIDES:
        side = instance.view({}, with_denoise_loop(instance.card, kind, **settings))
        outcome = sample(side, requests)
        show(kind, settings, outcome)
        if settings["threshold"] == 0:
            same = all(torch.equal(a, b) for a, b in zip(outcome.latents, base.latents, strict=True))
            zero_is_base = zero_is_base and same
        if (kind, settings) == CHOSEN:
            chosen = outcome
    as_many = round(chosen.forwards)
    theirs = fewer[as_many] if as_many in fewer else with_steps(as_many)
    mine, others = difference(chosen, fine), difference(theirs, fine)
    print(f"threshold 0 is the base loop to the bit: {zero_is_base}")
    print(
        json.dumps(
            {
                "name": "step_skipping",
                "value": round(mine / others, 4),
                "unit": f"error of skipping / error of {as_many} steps",
                "goal": 1.0,
                "pass": bool(zero_is_base and mine <= others),
                "ours": {"from_fine": round(mine, 5), "forwards": round(chosen.forwards, 2), "correct": chosen.correct},
                "theirs": {"from_fine": round(others, 5), "forwards": as_many, "correct": theirs.correct},
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
