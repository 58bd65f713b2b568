"""Checks that requests of every kind share: each gives the problems that it found, none raises."""

from __future__ import annotations

import math
import numbers
from typing import Any

from inference.request import Request
from inference.scheduling.policy import PRIORITY_RANGE
from loops.loop import Profile

MAX_SEED = 2**63 - 1
CLIP_ONLY = (
    "negative_prompt",
    "frames",
    "height",
    "width",
    "steps",
    "guidance",
    "guidance_policy",
    "solver",
    "shift",
    "sde",
    "actions",
)
TEXT_ONLY = ("messages", "max_tokens", "temperature", "top_p", "top_k", "stop")


def default(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def run_problems(request: Request) -> list[str]:
    """What is wrong with how the request is to be run, whatever it asks for."""
    found = []
    if not isinstance(request.profile, Profile):
        found.append(f"profile: got {request.profile!r}, expected a Profile ({', '.join(Profile)})")
    low, high = PRIORITY_RANGE
    if not is_number(request.priority, numbers.Integral) or not low <= request.priority <= high:
        found.append(f"priority: got {request.priority!r}, expected a whole number, {low} .. {high}")
    deadline = request.deadline
    if deadline is not None and not (is_number(deadline, numbers.Real) and math.isfinite(deadline) and deadline > 0):
        found.append(f"deadline: got {deadline!r}, expected a number of seconds > 0")
    return found


def foreign(request: Request, names: tuple[str, ...]) -> list[str]:
    """Fields that the request sets and its task does not have."""
    return [
        f"{name}: got {getattr(request, name)!r}, expected nothing (task {request.task!r} does not have it)"
        for name in names
        if getattr(request, name) is not None
    ]


def is_number(value: Any, kind: type) -> bool:
    """bool is a subclass of int in Python, but True is no number of steps."""
    return isinstance(value, kind) and not isinstance(value, bool)
