"""The tensors that a request brings, checked against what its program declares.

Knows names, dtypes, shapes and ranges; knows nothing of what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cards.errors import unknown_name
from cards.program import Input, Program


def input_problems(inputs: Any, program: Program, task: str) -> list[str]:
    """Everything that is wrong with a request's ``inputs``: one message each, none where they are as declared."""
    declared = {brought.name: brought for brought in program.inputs}
    if not declared:
        if inputs is None:
            return []
        return [f"inputs: got {_said(inputs)}, expected nothing (task {task!r} does not have it)"]
    given = {} if inputs is None else inputs
    if not isinstance(given, Mapping):
        return [f"inputs: got {_said(inputs)}, expected a mapping with {', '.join(declared)}"]
    found = [str(unknown_name("input", str(name), declared)) for name in given if name not in declared]
    for name, brought in declared.items():
        problem = _problem(given.get(name), brought)
        if problem is not None:
            found.append(f"inputs[{name!r}]: got {problem}, expected {brought}")
    return found


def _problem(value: Any, declared: Input) -> str | None:
    """What was got where it is not what was declared."""
    if not isinstance(value, Tensor):
        return "nothing" if value is None else _said(value)
    fits = value.ndim == len(declared.shape) and all(
        length > 0 if isinstance(wanted, str) else length == wanted
        for length, wanted in zip(value.shape, declared.shape, strict=True)
    )
    if not fits or value.dtype != getattr(torch, declared.dtype):
        return _said(value)
    low, high = value.amin().item(), value.amax().item()
    if not declared.low <= low <= high <= declared.high:  # a NaN is in no range
        return f"values from {low:g} to {high:g}"
    return None


def _said(value: Any) -> str:
    """A short account of a value: a tensor by its dtype and shape, never by its numbers."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) if value else 'nothing'}"
    return f"a {type(value).__name__}"
