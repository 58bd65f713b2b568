"""Workflows: one thing asked for, several requests to the engine, each made of what the earlier ones gave.

A workflow is a generator function. It yields the requests that may run now, each with the model that runs it, and is
sent their artifacts in that order: a chain yields one at a time, a fan-out several at once, a nested workflow is a
``yield from``. What it returns is the result. Many run on one engine: the steps of all their requests share its rounds
and, batched, its forwards. Knows no model and no scheduler.

    def best_of(clips, scores, prompt):
        made = yield [Ask(Request(prompt=prompt, seed=seed), clips) for seed in range(4)]
        judged = yield [Ask(score_request(prompt, artifact), scores) for artifact in made]
        ...

A request that fails raises at the ``yield``, once all that were yielded with it are over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from inference.artifact import Artifact
from inference.handle import Handle
from inference.instance import ModelInstance
from inference.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class Ask:
    """A request and the model that runs it."""

    request: Request
    instance: ModelInstance


Workflow = Generator[Sequence[Ask], list[Artifact], T]
"""One run of a workflow: yields requests, is sent their artifacts, returns its result."""
Open = Callable[[Ask], Handle]
"""Makes a checked handle of a request; raises where it is not valid."""


class Flowing(Generic[T]):
    """A workflow under way: which of its requests are open, and what became of it."""

    def __init__(self, workflow: Workflow[T], open_handle: Open):
        self._workflow = workflow
        self._open = open_handle
        self._handles: list[Handle] = []
        self._result: list[T] = []
        self._failure: BaseException | None = None
        self._turn(lambda: next(self._workflow))

    @property
    def over(self) -> bool:
        return bool(self._result) or self._failure is not None

    def handles(self) -> list[Handle]:
        """Those of the open requests that are not done; asks for the next ones when all are, () once it is over."""
        while not self.over:
            pending = [handle for handle in self._handles if not handle.done]
            if pending:
                return pending
            self._turn(self._answer)
        return []

    def result(self) -> T:
        """Raises what the workflow failed with."""
        if self._failure is not None:
            raise self._failure
        return self._result[0]

    def _answer(self) -> Sequence[Ask]:
        try:
            artifacts = [handle.result() for handle in self._handles]
        except Exception as failure:
            return self._workflow.throw(failure)
        return self._workflow.send(artifacts)

    def _turn(self, go_on: Callable[[], Sequence[Ask]]) -> None:
        """Lets the workflow run to its next ``yield`` and opens what it asks for."""
        try:
            asked = go_on()
            while True:
                try:
                    self._handles = [self._open(ask) for ask in asked]
                    return
                except Exception as failure:  # a request that is not valid is the workflow's own to hear of
                    asked = self._workflow.throw(failure)
        except StopIteration as end:
            self._result = [end.value]
        except Exception as failure:
            self._failure = failure


def chain(*steps: Callable[[list[Artifact]], Ask]) -> Workflow[list[Artifact]]:
    """One request after the other; each step makes its own of the artifacts before it. Gives all artifacts."""
    made: list[Artifact] = []
    for step in steps:
        made += yield [step(made)]
    return made
