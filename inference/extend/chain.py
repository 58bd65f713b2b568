"""The interceptors of an engine, checked against each other, and applied to the calls of the requests that ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from cards.errors import UserError, unknown_name
from inference.extend.interceptor import Interceptor, Place
from loops.loop import ModelCall

Settled = Mapping[str, Any]
"""Name of an interceptor -> its validated parameters, for the interceptors that a request asked for."""


class Chain:
    """Interceptors in the order in which ``before`` goes through them; ``after`` goes backwards.

    Raises ``UserError`` for two of one name, two that claim the same, and in exact mode for one that is not exact.
    """

    def __init__(self, interceptors: Sequence[Interceptor] = (), *, exact: bool = False):
        self._by_name: dict[str, Interceptor] = {}
        claimed: dict[str, str] = {}
        problems = []
        for one in interceptors:
            if one.name in self._by_name:
                problems.append(f"two interceptors are called {one.name!r}")
            self._by_name[one.name] = one
            for claim in sorted(one.claims):
                if claim in claimed:
                    problems.append(f"{claimed[claim]!r} and {one.name!r} both change {claim}")
                claimed[claim] = one.name
            if exact and not one.exact:
                problems.append(f"{one.name!r} changes results, and the engine is exact")
        if problems:
            raise UserError("the interceptors do not go together: " + "; ".join(problems) + "; leave one of each out")

    def settle(self, extensions: Mapping[str, Mapping[str, Any]] | None) -> Settled:
        """Validated parameters of what a request asks for; raises ``UserError`` that names every problem."""
        settled: dict[str, Any] = {}
        problems: list[str] = []
        for name, values in ({} if extensions is None else extensions).items():
            if name not in self._by_name:
                raise unknown_name("extension", name, self._by_name)
            try:
                settled[name] = self._by_name[name].parameters.model_validate(dict(values))
            except ValidationError as error:
                problems += [f"{'.'.join([name, *map(str, e['loc'])])}: {e['msg']}" for e in error.errors()]
        if problems:
            raise UserError("the extensions cannot be used: " + "; ".join(problems))
        return settled

    def before(self, call: ModelCall, place: Place, settled: Settled) -> ModelCall:
        for name, one in self._by_name.items():
            if name in settled:
                call = one.before(call, place, settled[name])
        return call

    def after(self, call: ModelCall, output: Tensor, place: Place, settled: Settled) -> Tensor:
        for name, one in reversed(self._by_name.items()):
            if name in settled:
                output = one.after(call, output, place, settled[name])
        return output

    @staticmethod
    def key(settled: Settled) -> tuple[Any, ...]:
        """What a cached result's key needs in addition."""
        return tuple((name, values.model_dump_json()) for name, values in sorted(settled.items()))
