"""Request: what enters the engine. Fields left at None take the card's defaults; everything is checked before work.

Knows the card; knows nothing about how the request is scheduled.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from cards.card import LoopMismatchError, LoopSpec, ModelCard
from cards.errors import UserError, unknown_name
from inference.inputs import input_problems
from inference.scheduling.policy import PRIORITY_RANGE
from loops.guidance import guidance_policy
from loops.loop import Profile, SamplingParams, TokenParams
from loops.score import ScoreParams
from loops.solvers import SOLVERS

MAX_SEED = 2**63 - 1
CAPTURES = ("trajectory", "velocities")
OUTPUTS = ("video", "latents")
TEXT_LOOP = "ar_decode"
SCORE_LOOP = "score"
CLIP_ONLY = ("negative_prompt", "frames", "height", "width", "steps", "guidance", "guidance_policy", "solver", "shift")
TEXT_ONLY = ("messages", "max_tokens", "temperature", "top_p", "top_k", "stop")


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    """As the model's chat template knows it: system, user, assistant."""
    content: str


@dataclass(frozen=True)
class Request:
    """One generation. Sizes in pixels and frames; guidance in the standard convention (1 = conditional only).

    A clip takes no field of a text and a text (a task whose loop decodes tokens) none of a clip. A score (a task whose
    loop compares frames with the prompt) takes ``prompt``, ``inputs`` and ``frames``.
    """

    prompt: str
    """Plain text; "" beside ``messages``."""
    negative_prompt: str | None = None
    task: str = "t2v"
    seed: int | None = None
    """None draws a fresh random one; the artifact reports it."""
    frames: int | None = None
    """Of a clip: its length. Of a score: how many of the given frames are looked at, spread evenly."""
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    guidance: float | None = None
    guidance_policy: str | None = None
    solver: str | None = None
    shift: float | None = None
    output: Literal["video", "latents"] = "video"
    """``latents`` runs no decoder."""
    priority: int = 0
    """-8 .. 8; every level doubles the share of device time, or goes first, as the policy has it."""
    deadline: float | None = None
    """Seconds from submission by which the result is wanted; the policy ``deadline`` heeds it."""
    profile: Profile = Profile.SERVE
    capture: tuple[str, ...] = ()
    """Opt-in fields of the BehaviourRecord, for ROLLOUT."""
    messages: tuple[Message, ...] | None = None
    """A chat in place of a prompt, put into words by the model's chat template."""
    max_tokens: int | None = None
    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    top_k: int | None = None
    """0 keeps every token."""
    stop: tuple[str, ...] | None = None
    """The text ends before the first of these, though it span tokens."""
    overrides: Mapping[str, Mapping[str, Any]] | None = None
    """Loop node of the program -> fields of this request that differ there, such as ``{"refine": {"steps": 4}}``."""
    extensions: Mapping[str, Mapping[str, Any]] | None = None
    """Name of an interceptor that the engine has -> its parameters for this request."""
    inputs: Mapping[str, Tensor] | None = None
    """The tensors that the task's program declares, by name: ``pixels`` of a score is uint8 RGB (F, H, W, 3), F = 1 for
    a picture. They are read while the request runs: not to be written to before it is done."""


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with every value settled."""

    request: Request
    params: Any
    """SamplingParams of a clip, TokenParams of a text, ScoreParams of a score."""
    negative_prompt: str
    nodes: Mapping[str, Any] = field(default_factory=dict)
    """Node -> its own params, where the request overrides some."""

    def params_of(self, node: str) -> Any:
        """What a node's loop runs with."""
        return self.nodes.get(node, self.params)

    @property
    def guided(self) -> bool:
        """Whether any of its loops has an unconditional branch."""
        return any(params.guided for params in (self.params, *self.nodes.values()))

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        """What the first node reads: the prompt, or the chat as mappings of role and content."""
        messages = self.request.messages
        return self.request.prompt if messages is None else [asdict(message) for message in messages]

    @property
    def pixels(self) -> bool:
        return self.request.output == "video"


def _default(value: Any, fallback: Any) -> Any:
    return fallback if value is None else value


def denoise_spec(card: ModelCard, task: str) -> LoopSpec:
    """The loop of a task's program, whatever its kind; raises ``UserError`` for a task that the card does not have."""
    if task not in card.programs:
        raise unknown_name(f"task of card {card.name!r}", task, card.programs)
    loop = next(node.loop for node in card.programs[task].nodes if node.loop is not None)
    return card.loops[loop]


def resolve(request: Request, card: ModelCard) -> ResolvedRequest:
    """Fills in the card's defaults and checks every value; raises ``UserError`` that names all problems at once."""
    spec = denoise_spec(card, request.task)
    plain = _resolve_loop(replace(request, overrides=None), card, spec)
    if request.overrides is None:
        return plain
    nodes = _node_params(request.overrides, plain, card, spec)
    return replace(plain, request=replace(plain.request, overrides=request.overrides), nodes=nodes)


def _node_params(
    overrides: Mapping[str, Mapping[str, Any]], plain: ResolvedRequest, card: ModelCard, first: LoopSpec
) -> dict[str, Any]:
    """Params of each node that a request overrides; raises ``UserError`` that names every problem."""
    loops = {n.id: card.loops[n.loop] for n in card.programs[plain.request.task].nodes if n.loop is not None}
    fields = _overridable(first.kind)
    params: dict[str, Any] = {}
    problems: list[str] = []
    for node, values in overrides.items():
        if node not in loops:
            problems.append(str(unknown_name("loop node", node, loops)))
            continue
        if _overridable(loops[node].kind) != fields:
            problems.append(f"{node}: got overrides for a loop of kind {loops[node].kind!r}, which takes none here")
            continue
        unknown = [name for name in values if name not in fields]
        if unknown:
            problems += [f"{node}: {unknown_name('field', name, fields)}" for name in unknown]
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
        return _resolve_text(request, card)
    if spec.kind == SCORE_LOOP:
        return _resolve_score(request, card)
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
    found = _foreign(request, TEXT_ONLY) + [
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
    found += _run_problems(request) + input_problems(request.inputs, card.programs[request.task], request.task)
    if isinstance(request.capture, str):
        found.append(f"capture: got the string {request.capture!r}, expected a tuple of {', '.join(CAPTURES)}")
    else:
        found += [
            f"capture: got {c!r}, expected one of {', '.join(CAPTURES)}" for c in request.capture if c not in CAPTURES
        ]
    if request.capture and request.profile is Profile.SERVE:
        found.append("capture: a SERVE request keeps no behaviour; use profile=Profile.ROLLOUT")
    return found


def _run_problems(request: Request) -> list[str]:
    """What is wrong with how the request is to be run, whatever it asks for."""
    found = []
    if not isinstance(request.profile, Profile):
        found.append(f"profile: got {request.profile!r}, expected a Profile ({', '.join(Profile)})")
    low, high = PRIORITY_RANGE
    if not _is_number(request.priority, numbers.Integral) or not low <= request.priority <= high:
        found.append(f"priority: got {request.priority!r}, expected a whole number, {low} .. {high}")
    deadline = request.deadline
    if deadline is not None and not (_is_number(deadline, numbers.Real) and math.isfinite(deadline) and deadline > 0):
        found.append(f"deadline: got {deadline!r}, expected a number of seconds > 0")
    return found


def _foreign(request: Request, names: tuple[str, ...]) -> list[str]:
    """Fields that the request sets and its task does not have."""
    return [
        f"{name}: got {getattr(request, name)!r}, expected nothing (task {request.task!r} does not have it)"
        for name in names
        if getattr(request, name) is not None
    ]


# -- text


def _resolve_text(request: Request, card: ModelCard) -> ResolvedRequest:
    text = card.sampling.text
    if text is None:
        raise UserError(f"card {card.name!r} has a text task, but its sampling has no text part; write one")
    values: dict[str, Any] = {
        "max_tokens": _default(request.max_tokens, text.max_tokens),
        "temperature": _default(request.temperature, text.temperature),
        "top_p": _default(request.top_p, text.top_p),
        "top_k": _default(request.top_k, text.top_k),
        "stop": _default(request.stop, ()),
        "seed": _default(request.seed, secrets.randbelow(2**31)),
    }
    problems = _text_problems(request, values)
    problems += input_problems(request.inputs, card.programs[request.task], request.task)
    if problems:
        raise UserError("the request cannot run: " + "; ".join(problems))
    settled = {"temperature": float(values["temperature"]), "top_p": float(values["top_p"])}
    params = TokenParams(**{**values, **settled, "stop": tuple(values["stop"])})
    return ResolvedRequest(request=replace(request, seed=params.seed), params=params, negative_prompt="")


def _text_problems(request: Request, values: dict[str, Any]) -> list[str]:
    """Everything that is wrong with the settled values of a text request; its length is checked once it is tokens."""
    found = _foreign(request, CLIP_ONLY)
    if not isinstance(request.prompt, str):
        found.append(f"prompt: got {request.prompt!r}, expected a string")
    elif request.messages is not None and request.prompt:
        found.append(f"prompt: got {request.prompt!r} beside messages, expected one of the two; leave prompt empty")
    if request.messages is not None:
        found += _message_problems(request.messages)
    for name, low, high, text in (
        ("max_tokens", 1, math.inf, "at least 1"),
        ("top_k", 0, math.inf, "at least 0 (0 keeps every token)"),
        ("seed", 0, MAX_SEED, "0 .. 2^63 - 1"),
    ):
        value = values[name]
        if not _is_number(value, numbers.Integral) or not low <= value <= high:
            found.append(f"{name}: got {value!r}, expected a whole number, {text}")
    temperature, top_p, stop = values["temperature"], values["top_p"], values["stop"]
    if not (_is_number(temperature, numbers.Real) and math.isfinite(temperature) and temperature >= 0):
        found.append(f"temperature: got {temperature!r}, expected a number >= 0 (0 takes the most likely token)")
    if not (_is_number(top_p, numbers.Real) and 0 < top_p <= 1):
        found.append(f"top_p: got {top_p!r}, expected a number in (0, 1] (1 keeps every token)")
    if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
        found.append(f"stop: got {stop!r}, expected a tuple of strings that are not empty")
    if request.output != "video":
        found.append(f"output: got {request.output!r}, expected nothing (a text request gives text)")
    found += _run_problems(request)
    if request.capture:
        found.append(f"capture: got {request.capture!r}, expected nothing (a text ROLLOUT keeps log-probs always)")
    return found


def _message_problems(messages: Any) -> list[str]:
    if not isinstance(messages, (tuple, list)) or not messages:
        return [f"messages: got {messages!r}, expected a tuple of Message, at least one"]
    return [
        f"messages[{i}]: got {m!r}, expected a Message whose role and content are strings"
        for i, m in enumerate(messages)
        if not (isinstance(m, Message) and isinstance(m.role, str) and isinstance(m.content, str))
    ]


# -- scores


def _resolve_score(request: Request, card: ModelCard) -> ResolvedRequest:
    score = card.sampling.score
    if score is None:
        raise UserError(f"card {card.name!r} has a score task, but its sampling has no score part; write one")
    found = _foreign(request, (*(name for name in CLIP_ONLY if name != "frames"), *TEXT_ONLY, "seed"))
    if not isinstance(request.prompt, str):
        found.append(f"prompt: got {request.prompt!r}, expected a string")
    frames = _default(request.frames, score.frames)
    if frames is not None and not (_is_number(frames, numbers.Integral) and frames >= 1):
        found.append(f"frames: got {frames!r}, expected a whole number, at least 1")
    if request.output != "video":
        found.append(f"output: got {request.output!r}, expected nothing (a score request gives a score)")
    if request.capture:
        found.append(f"capture: got {request.capture!r}, expected nothing (a score has no trajectory)")
    found += _run_problems(request) + input_problems(request.inputs, card.programs[request.task], request.task)
    if found:
        raise UserError("the request cannot run: " + "; ".join(found))
    assert request.inputs is not None
    given = len(request.inputs["pixels"])
    params = ScoreParams(
        frames=given if frames is None else min(int(frames), given), rows=score.rows, divisor=score.divisor
    )
    return ResolvedRequest(request=request, params=params, negative_prompt="")


# -- numbers


def _is_number(value: Any, kind: type) -> bool:
    """bool is a subclass of int in Python, but True is no number of steps."""
    return isinstance(value, kind) and not isinstance(value, bool)
