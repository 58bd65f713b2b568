"""Settles requests for text and for scores; see ``inference.resolve``."""

from __future__ import annotations

import math
import numbers
import secrets
from dataclasses import replace
from typing import Any

from cards.card import ModelCard
from cards.errors import UserError
from inference.inputs import input_problems
from inference.request import Message, Request, ResolvedRequest
from inference.request_checks import CLIP_ONLY, MAX_SEED, TEXT_ONLY, default, foreign, is_number, run_problems
from loops.loop import TokenParams
from loops.score import ScoreParams


def resolve_text(request: Request, card: ModelCard) -> ResolvedRequest:
    params, problems = text_params(request, card)
    problems += _whole_text_problems(request)
    problems += input_problems(request.inputs, card.programs[request.task], request.task)
    if problems:
        raise UserError("the request cannot run: " + "; ".join(problems))
    return ResolvedRequest(request=replace(request, seed=params.seed), params=params, negative_prompt="")


def text_params(request: Request, card: ModelCard) -> tuple[TokenParams, list[str]]:
    """What a text loop of the card runs with, and everything that is wrong with it; its length is checked once it is
    tokens. The params are of use where nothing is wrong."""
    text = card.sampling.text
    if text is None:
        raise UserError(f"card {card.name!r} has a text task, but its sampling has no text part; write one")
    values: dict[str, Any] = {
        "max_tokens": default(request.max_tokens, text.max_tokens),
        "temperature": default(request.temperature, text.temperature),
        "top_p": default(request.top_p, text.top_p),
        "top_k": default(request.top_k, text.top_k),
        "stop": default(request.stop, ()),
        "seed": default(request.seed, secrets.randbelow(2**31)),
    }
    problems = _text_problems(values)
    if not problems:
        values |= {name: float(values[name]) for name in ("temperature", "top_p")}
        values["stop"] = tuple(values["stop"])
    return TokenParams(**values), problems


def _whole_text_problems(request: Request) -> list[str]:
    """What is wrong with a request for a text beside the values that its loop runs with."""
    found = foreign(request, (*CLIP_ONLY, "refine"))
    if not isinstance(request.prompt, str):
        found.append(f"prompt: got {request.prompt!r}, expected a string")
    elif request.messages is not None and request.prompt:
        found.append(f"prompt: got {request.prompt!r} beside messages, expected one of the two; leave prompt empty")
    if request.messages is not None:
        found += _message_problems(request.messages)
    if request.output != "video":
        found.append(f"output: got {request.output!r}, expected nothing (a text request gives text)")
    found += run_problems(request)
    if request.capture:
        found.append(f"capture: got {request.capture!r}, expected nothing (a text ROLLOUT keeps log-probs always)")
    return found


def _text_problems(values: dict[str, Any]) -> list[str]:
    """Everything that is wrong with the settled values of a text loop."""
    found: list[str] = []
    for name, low, high, text in (
        ("max_tokens", 1, math.inf, "at least 1"),
        ("top_k", 0, math.inf, "at least 0 (0 keeps every token)"),
        ("seed", 0, MAX_SEED, "0 .. 2^63 - 1"),
    ):
        value = values[name]
        if not is_number(value, numbers.Integral) or not low <= value <= high:
            found.append(f"{name}: got {value!r}, expected a whole number, {text}")
    temperature, top_p, stop = values["temperature"], values["top_p"], values["stop"]
    if not (is_number(temperature, numbers.Real) and math.isfinite(temperature) and temperature >= 0):
        found.append(f"temperature: got {temperature!r}, expected a number >= 0 (0 takes the most likely token)")
    if not (is_number(top_p, numbers.Real) and 0 < top_p <= 1):
        found.append(f"top_p: got {top_p!r}, expected a number in (0, 1] (1 keeps every token)")
    if not isinstance(stop, (tuple, list)) or not all(isinstance(s, str) and s for s in stop):
        found.append(f"stop: got {stop!r}, expected a tuple of strings that are not empty")
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


def resolve_score(request: Request, card: ModelCard) -> ResolvedRequest:
    score = card.sampling.score
    if score is None:
        raise UserError(f"card {card.name!r} has a score task, but its sampling has no score part; write one")
    found = foreign(request, (*(name for name in CLIP_ONLY if name != "frames"), *TEXT_ONLY, "refine", "seed"))
    if not isinstance(request.prompt, str):
        found.append(f"prompt: got {request.prompt!r}, expected a string")
    frames = default(request.frames, score.frames)
    if frames is not None and not (is_number(frames, numbers.Integral) and frames >= 1):
        found.append(f"frames: got {frames!r}, expected a whole number, at least 1")
    if request.output != "video":
        found.append(f"output: got {request.output!r}, expected nothing (a score request gives a score)")
    if request.capture:
        found.append(f"capture: got {request.capture!r}, expected nothing (a score has no trajectory)")
    found += run_problems(request) + input_problems(request.inputs, card.programs[request.task], request.task)
    if found:
        raise UserError("the request cannot run: " + "; ".join(found))
    assert request.inputs is not None
    given = len(request.inputs["pixels"])
    params = ScoreParams(
        frames=given if frames is None else min(int(frames), given),
        rows=score.rows,
        divisor=score.divisor,
        grid=score.grid,
    )
    return ResolvedRequest(request=request, params=params, negative_prompt="")


# -- numbers
