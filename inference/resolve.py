"""Settles a request against its card: defaults, overrides of single nodes, and every problem named at once."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cards.card import LoopMismatchError, LoopSpec, ModelCard
from cards.errors import UserError, unknown_name
from inference.inputs import input_problems
from inference.request import Request, ResolvedRequest
from inference.request_checks import MAX_SEED, TEXT_ONLY, default, foreign, is_number, run_problems
from inference.resolve_text import resolve_score, resolve_text, text_params
from loops.guidance import guidance_policy
from loops.loop import SDE, Profile, SamplingParams
from loops.registry import LOOPS, check_params
from loops.sde import SDE_KINDS
from loops.solvers import SOLVERS

CAPTURES = ("trajectory", "velocities")
OUTPUTS = ("video", "latents")
TEXT_LOOP = "ar_decode"
SCORE_LOOP = "score"
CHUNK_LOOP = "chunk_rollout"


def denoise_spec(card: ModelCard, task: str) -> LoopSpec:
    """The loop that a task is about: its program's first, past those that rewrite the prompt for it.

    Raises ``UserError`` for a task that the card does not have.
    """
    if task not in card.programs:
        raise unknown_name(f"task of card {card.name!r}", task, card.programs)
    loops = (node.loop for node in card.programs[task].nodes if node.loop is not None and node.writes != "prompt")
    return card.loops[next(loops)]


def refine_nodes(card: ModelCard, task: str) -> tuple[str, ...]:
    """Ids of the nodes that rewrite the prompt, in order; none for most cards."""
    return tuple(node.id for node in card.programs[task].nodes if node.writes == "prompt")


def resolve(request: Request, card: ModelCard) -> ResolvedRequest:
    """Fills in the card's defaults and checks every value; raises ``UserError`` that names all problems at once."""
    spec = denoise_spec(card, request.task)
    plain = _resolve_loop(replace(request, overrides=None), card, spec)
    if refine_nodes(card, request.task) and request.refine is not False:
        plain = _with_refiners(plain, card)
    if request.overrides is None:
        return plain
    nodes = {**plain.nodes, **_node_params(request.overrides, plain, card, spec)}
    return replace(plain, request=replace(plain.request, overrides=request.overrides), nodes=nodes)


def _with_refiners(plain: ResolvedRequest, card: ModelCard) -> ResolvedRequest:
    """The request of a clip with the params of the loops that rewrite its prompt. They draw apart: the first by the
    request's seed, each other by one of its own that follows from it."""
    params, _ = text_params(plain.request, card)
    nodes = refine_nodes(card, plain.request.task)
    return replace(
        plain,
        nodes={node: replace(params, seed=_seed_of(params.seed, i)) for i, node in enumerate(nodes)},
        refined=True,
    )


def _seed_of(seed: int, draw: int) -> int:
    """Seed of the draws of a loop that is one of several in a request."""
    if draw == 0:
        return seed
    return int(np.random.SeedSequence([seed, draw]).generate_state(1, np.uint64)[0]) & MAX_SEED


def _node_params(
    overrides: Mapping[str, Mapping[str, Any]], plain: ResolvedRequest, card: ModelCard, first: LoopSpec
) -> dict[str, Any]:
    """Params of each node that a request overrides; raises ``UserError`` that names every problem."""
    loops = {n.id: card.loops[n.loop] for n in card.programs[plain.request.task].nodes if n.loop is not None}
    params: dict[str, Any] = {}
    problems: list[str] = []
    for node, values in overrides.items():
        if node not in loops:
            problems.append(str(unknown_name("loop node", node, loops)))
            continue
        refines = node in plain.nodes
        fields = _overridable(loops[node].kind if refines else first.kind)
        if _overridable(loops[node].kind) != fields:
            problems.append(f"{node}: got overrides for a loop of kind {loops[node].kind!r}, which takes none here")
            continue
        unknown = [name for name in values if name not in fields]
        if unknown:
            problems += [f"{node}: {unknown_name('field', name, fields)}" for name in unknown]
            continue
        if refines:
            own, found = text_params(replace(plain.request, **values), card)
            params[node] = replace(own, seed=plain.nodes[node].seed)
            problems += [f"{node}: {problem}" for problem in found]
            continue
        try:
            params[node] = _resolve_loop(replace(plain.request, **values), card, loops[node]).params
        except UserError as error:
            problems.append(f"{node}: {error}")
    if problems:
        raise UserError("the request cannot run: overrides: " + "; ".join(problems))
    return params


def _overridable(kind: str) -> tuple[str, ...]:
    """Fields of a request that may differ from loop to loop of its kind."""
    if kind == TEXT_LOOP:
        return ("max_tokens", "temperature", "top_p", "top_k", "stop")
    if kind.startswith("diffusion_"):
        return ("steps", "guidance", "guidance_policy", "solver", "shift")
    return ()


def _resolve_loop(request: Request, card: ModelCard, spec: LoopSpec) -> ResolvedRequest:
    """The request as one of its loops sees it."""
    s = card.sampling
    if spec.kind == TEXT_LOOP:
        return resolve_text(request, card)
    if spec.kind == SCORE_LOOP:
        return resolve_score(request, card)
    ladder = spec.schedule.ladder
    values: dict[str, Any] = {
        "frames": default(request.frames, s.frames),
        "height": default(request.height, s.height),
        "width": default(request.width, s.width),
        "steps": default(request.steps, s.steps if ladder is None else len(ladder)),
        "guidance": default(request.guidance, spec.guidance.scale),
        "guidance_policy": default(request.guidance_policy, spec.guidance.policy),
        "solver": default(request.solver, spec.solver),
        "shift": default(request.shift, spec.schedule.shift),
        "seed": default(request.seed, secrets.randbelow(2**31)),
    }
    negative_prompt = default(request.negative_prompt, s.negative_prompt)
    problems = _problems(request, card, values, negative_prompt, spec.kind) + _refine_problems(request, card)
    if problems:
        raise UserError("the request cannot run: " + "; ".join(dict.fromkeys(problems)))
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
    if ladder is not None and values["solver"] != spec.solver:
        raise LoopMismatchError(
            f"got solver={values['solver']!r}; {card.name} was distilled for the ladder {list(ladder)} by "
            f"{spec.solver!r}: leave solver out"
        )
    params = SamplingParams(
        **{**values, "guidance": float(values["guidance"]), "shift": float(values["shift"])},
        actions=() if request.actions is None else tuple(request.actions),
        sde=request.sde,
    )
    check_params(params, spec, card)
    return ResolvedRequest(
        request=replace(request, seed=params.seed),
        params=params,
        negative_prompt=negative_prompt,
    )


def _problems(
    request: Request, card: ModelCard, values: dict[str, Any], negative_prompt: Any, spec_kind: str
) -> list[str]:
    """Everything that is wrong with the settled values."""
    theirs = TEXT_ONLY if not refine_nodes(card, request.task) or request.refine is False else ("messages",)
    found = foreign(request, theirs if spec_kind == CHUNK_LOOP else (*theirs, "actions")) + [
        f"{name}: got {value!r}, expected a string"
        for name, value in (("prompt", request.prompt), ("negative_prompt", negative_prompt))
        if not isinstance(value, str)
    ]
    for name, low, high, text in (
        ("steps", 1, math.inf, "at least 1"),
        ("seed", 0, MAX_SEED, "0 .. 2^63 - 1"),
    ):
        value = values[name]
        if not is_number(value, numbers.Integral) or not low <= value <= high:
            found.append(f"{name}: got {value!r}, expected a whole number, {text}")
    guidance, shift = values["guidance"], values["shift"]
    if not (is_number(guidance, numbers.Real) and math.isfinite(guidance) and guidance >= 0):
        found.append(f"guidance: got {guidance!r}, expected a number >= 0 (1 = conditional only)")
    if not (is_number(shift, numbers.Real) and math.isfinite(shift) and shift > 0):
        found.append(f"shift: got {shift!r}, expected a number > 0")
    sizes = {name: values[name] for name in ("frames", "height", "width")}
    not_whole = [name for name, value in sizes.items() if not is_number(value, numbers.Integral)]
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
    if request.sde is not None:
        found += _sde_problems(request.sde, values, spec_kind)
    if isinstance(request.actions, str):
        found.append(f"actions: got the string {request.actions!r}, expected a tuple of names, one a chunk")
    if request.output not in OUTPUTS:
        found.append(f"output: got {request.output!r}, expected one of {', '.join(OUTPUTS)}")
    found += run_problems(request) + input_problems(request.inputs, card.programs[request.task], request.task)
    if isinstance(request.capture, str):
        found.append(f"capture: got the string {request.capture!r}, expected a tuple of {', '.join(CAPTURES)}")
    else:
        found += [
            f"capture: got {c!r}, expected one of {', '.join(CAPTURES)}" for c in request.capture if c not in CAPTURES
        ]
    if request.capture and request.profile is Profile.SERVE:
        found.append("capture: a SERVE request keeps no behaviour; use profile=Profile.ROLLOUT")
    return found


def _sde_problems(sde: Any, values: dict[str, Any], spec_kind: str) -> list[str]:
    """What is wrong with a request's SDE for the loop and the settled values."""
    if not isinstance(sde, SDE):
        return [f"sde: got {sde!r}, expected an SDE (kind, level, window, seed), or nothing for the ODE"]
    found = []
    if not LOOPS[spec_kind].takes_sde:
        able = ", ".join(sorted(kind for kind, loop in LOOPS.items() if loop.takes_sde))
        found.append(f"sde: got one for a loop of kind {spec_kind!r}, expected none; the kinds that take it: {able}")
    if values["solver"] != "euler":
        found.append(f"sde: got solver={values['solver']!r}, expected 'euler', whose steps stand alone; set solver")
    if sde.kind not in SDE_KINDS:
        found.append(str(unknown_name("SDE kind", str(sde.kind), SDE_KINDS)))
    if not (is_number(sde.level, numbers.Real) and math.isfinite(sde.level) and sde.level > 0):
        found.append(f"sde level: got {sde.level!r}, expected a number > 0; for the ODE leave sde out")
    elif sde.kind == "cps" and sde.level > 1:
        found.append(f"sde level: got {sde.level!r}, expected at most 1 for cps")
    if sde.seed is not None and not (is_number(sde.seed, numbers.Integral) and 0 <= sde.seed <= MAX_SEED):
        found.append(f"sde seed: got {sde.seed!r}, expected 0 .. 2^63 - 1, or nothing for the request's noise")
    if sde.window is not None:
        found += _window_problems(sde.window, values["steps"])
    return found


def _window_problems(window: Any, steps: Any) -> list[str]:
    whole = (
        isinstance(window, tuple | list) and len(window) == 2 and all(is_number(n, numbers.Integral) for n in window)
    )
    if whole and is_number(steps, numbers.Integral) and 0 <= window[0] < window[1] <= steps:
        return []
    return [f"sde window: got {window!r}, expected (start, stop) with 0 <= start < stop <= steps = {steps!r}"]


def _refine_problems(request: Request, card: ModelCard) -> list[str]:
    """What is wrong with a request as those who rewrite its prompt see it."""
    if not refine_nodes(card, request.task):
        return foreign(request, ("refine",))
    if request.refine is False:
        return []
    found = text_params(request, card)[1]
    if request.refine is not None and request.refine is not True:
        found.append(f"refine: got {request.refine!r}, expected True or False")
    return found
