"""Request: what enters the engine. Fields left at None take the card's defaults; everything is checked before work.

Knows the card; knows nothing about how the request is scheduled.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from cards.card import LoopMismatchError, LoopSpec, ModelCard
from cards.errors import UserError, unknown_name
from loops.guidance import guidance_policy
from loops.loop import Profile, SamplingParams
from loops.solvers import SOLVERS

MAX_SEED = 2**63 - 1
CAPTURES = ("trajectory", "velocities")
OUTPUTS = ("video", "latents")


@dataclass(frozen=True)
class Request:
    """One generation. Sizes in pixels and frames; guidance in the standard convention (1 = conditional only)."""

    prompt: str
    negative_prompt: str | None = None
    task: str = "t2v"
    seed: int | None = None
    """None draws a fresh random one; the artifact reports it."""
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_policy: str | None = None
    solver: str | None = None
    shift: float | None = None
    output: Literal["video", "latents"] = "video"
    """``latents`` runs no decoder."""
    profile: Profile = Profile.SERVE
    capture: tuple[str, ...] = ()
    """Opt-in fields of the BehaviourRecord, for ROLLOUT."""


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with every value settled."""

    request: Request
    params: SamplingParams
    negative_prompt: str

    @property
    def pixels(self) -> bool:
        return self.request.output == "video"


def _default(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def denoise_spec(card: ModelCard, task: str) -> LoopSpec:
    """The loop of a task's program; raises ``UserError`` for a task that the card does not have."""
    if task not in card.programs:
        raise unknown_name(f"task of card {card.name!r}", task, card.programs)
    loop = next(node.loop for node in card.programs[task].nodes if node.loop is not None)
    return card.loops[loop]


def resolve(request: Request, card: ModelCard) -> ResolvedRequest:
    """Fills in the card's defaults and checks every value; raises ``UserError`` that names all problems at once."""
    spec, s = denoise_spec(card, request.task), card.sampling
    ladder = spec.schedule.ladder
    values: dict[str, Any] = {
        "frames": _default(request.frames, s.frames),
        "height": _default(request.height, s.height),
        "width": _default(request.width, s.width),
        "steps": _default(request.steps, s.steps if ladder is None else len(ladder)),
        "guidance": _default(request.guidance, spec.guidance.scale),
        "guidance_policy": _default(request.guidance_policy, spec.guidance.policy),
        "solver": _default(request.solver, spec.solver),
        "shift": _default(request.shift, spec.schedule.shift),
        "seed": _default(request.seed, secrets.randbelow(2**31)),
    }
    negative_prompt = _default(request.negative_prompt, s.negative_prompt)
    problems = _problems(request, card, values, negative_prompt)
    if problems:
        raise UserError("the request cannot run: " + "; ".join(problems))
    if ladder is not None and values["steps"] != len(ladder):
        raise LoopMismatchError(
            f"got steps={values['steps']}; {card.name} was distilled for the ladder {list(ladder)}: "
            f"leave steps out or use steps={len(ladder)}"
        )
    if ladder is not None and request.shift is not None:
        raise LoopMismatchError(
            f"got shift={request.shift}; {card.name} was distilled for the ladder {list(ladder)}, which is final: "
            "leave shift out"
        )
    params = SamplingParams(**{**values, "guidance": float(values["guidance"]), "shift": float(values["shift"])})
    return ResolvedRequest(
        request=replace(request, seed=params.seed),
        params=params,
        negative_prompt=negative_prompt,
    )


def _problems(request: Request, card: ModelCard, values: dict[str, Any], negative_prompt: Any) -> list[str]:
    """Everything that is wrong with the settled values."""
    found = [
        f"{name}: got {value!r}, expected a string"
        for name, value in (("prompt", request.prompt), ("negative_prompt", negative_prompt))
        if not isinstance(value, str)
    ]
    for name, low, high, text in (
        ("steps", 1, math.inf, "at least 1"),
        ("seed", 0, MAX_SEED, "0 .. 2^63 - 1"),
    ):
        value = values[name]
        if not _is_number(value, numbers.Integral) or not low <= value <= high:
            found.append(f"{name}: got {value!r}, expected a whole number, {text}")
    guidance, shift = values["guidance"], values["shift"]
    if not (_is_number(guidance, numbers.Real) and math.isfinite(guidance) and guidance >= 0):
        found.append(f"guidance: got {guidance!r}, expected a number >= 0 (1 = conditional only)")
    if not (_is_number(shift, numbers.Real) and math.isfinite(shift) and shift > 0):
        found.append(f"shift: got {shift!r}, expected a number > 0")
    sizes = {name: values[name] for name in ("frames", "height", "width")}
    not_whole = [name for name, value in sizes.items() if not _is_number(value, numbers.Integral)]
    found += [f"{name}: got {sizes[name]!r}, expected a whole number" for name in not_whole]
    checks: list[Callable[[], Any]] = [lambda: guidance_policy(str(values["guidance_policy"]))]
    if not not_whole:
        checks.append(lambda: card.geometry.check(**sizes))
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(str(error))
    if values["solver"] not in SOLVERS:
        found.append(str(unknown_name("solver", str(values["solver"]), SOLVERS)))
    if request.output not in OUTPUTS:
        found.append(f"output: got {request.output!r}, expected one of {', '.join(OUTPUTS)}")
    if not isinstance(request.profile, Profile):
        found.append(f"profile: got {request.profile!r}, expected a Profile ({', '.join(Profile)})")
    if isinstance(request.capture, str):
        found.append(f"capture: got the string {request.capture!r}, expected a tuple of {', '.join(CAPTURES)}")
    else:
        found += [
            f"capture: got {c!r}, expected one of {', '.join(CAPTURES)}" for c in request.capture if c not in CAPTURES
        ]
    if request.capture and request.profile is Profile.SERVE:
        found.append("capture: a SERVE request keeps no behaviour; use profile=Profile.ROLLOUT")
    return found


def _is_number(value: Any, kind: type) -> bool:
    """bool is a subclass of int in Python, but True is no number of steps."""
    return isinstance(value, kind) and not isinstance(value, bool)
