"""Prompts for reinforcement learning: an endless stream that is a pure function of (seed, position).

Knows text files. Every rank can draw the same global list and take its slice, and a resumed run needs one integer.
Sources that make prompts up live in files of their own (``shapeworld_prompts.py``).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastvideo_train.data.sampler import shuffled
from fastvideo_train.data.video_folder import DataError, summary

_PROMPT_KEYS = ("prompt", "caption")
_SUFFIXES = (".txt", ".jsonl")
FAR = 10**9
"""A position that no run reaches."""


@dataclass(frozen=True)
class Prompt:
    """One thing to generate."""

    text: str  # not empty
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what a reward may need beside the text


class PromptSource(ABC):
    """An endless, seeded, exactly resumable stream of prompts.

    Args:
        seed: of the order or of the draws.
    """

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.position = 0  # of the next prompt in the stream

    @abstractmethod
    def at(self, position: int) -> Prompt:
        """The prompt at one position of the stream; the same on every call and every rank."""

    def held_out(self, count: int) -> list[Prompt]:
        """Up to ``count`` prompts for an evaluation: from far down the stream, or what a source keeps for it."""
        return [self.at(FAR + i) for i in range(count)]

    @abstractmethod
    def digest(self) -> str:
        """Changes when the stream would: a resumed run compares it."""

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts."""
        start, self.position = self.position, self.position + n
        return [self.at(position) for position in range(start, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seed": self.seed, "digest": self.digest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``.

        Raises:
            DataError: the stream is another one now: other prompts or another seed.
        """
        for name, value in (("seed", self.seed), ("digest", self.digest())):
            if state[name] != value:
                raise DataError(
                    f"cannot resume the prompt order: its {name} was {state[name]} in the checkpoint and is {value} "
                    "now; restore the same prompts and seed, or start a new run"
                )
        self.position = state["position"]


class FilePrompts(PromptSource):
    """Prompts of a file, in a new shuffle each pass.

    Args:
        path: ``.txt`` with one prompt a line, or ``.jsonl`` with ``{"prompt" | "caption": ..., other keys}`` a line,
            the other keys becoming the prompt's metadata. Blank lines are allowed.
        seed: of the shuffles.

    Raises:
        DataError: no such file, another suffix, no prompts, or bad lines (each named).
    """

    def __init__(self, *, path: str | Path, seed: int) -> None:
        super().__init__(seed=seed)
        self.path = Path(path)
        self.prompts = read_prompts(self.path)

    def at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self.prompts))
        return self.prompts[shuffled(len(self.prompts), self.seed, epoch)[offset]]

    def digest(self) -> str:
        content = json.dumps([[prompt.text, dict(prompt.metadata)] for prompt in self.prompts], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a .txt or .jsonl file, in order; never empty. Raises as ``FilePrompts`` does."""
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(f"prompt file {path}: unknown suffix {path.suffix!r}; expected one of: {', '.join(_SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"prompt file {path} does not exist; expected a .txt with one prompt a line, or a .jsonl")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"prompt file {path}: not UTF-8 text ({error}); save it as UTF-8") from error
    prompts: list[Prompt] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(Prompt(line.strip()) if path.suffix.lower() == ".txt" else _parse(line))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        raise DataError(summary(f"prompt file {path}: {len(problems)} bad line(s)", problems))
    if not prompts:
        raise DataError(f"prompt file {path} is empty; expected at least one prompt")
    return prompts


def _parse(line: str) -> Prompt:
    """One line of JSON; a ``ValueError`` says what is wrong with it."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"got a JSON {type(record).__name__}, expected an object with a prompt")
    key = next((key for key in _PROMPT_KEYS if key in record), None)
    text = None if key is None else record.pop(key)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"no prompt; expected a text under one of: {', '.join(_PROMPT_KEYS)}")
    return Prompt(text.strip(), record)
