"""The contract of an interceptor: it changes what goes into a call, or what comes out, of the requests that ask for it.

Which interceptors exist is the deployment's choice (``Engine(interceptors=...)``); a request merely sets their
parameters (``Request.extensions``), which are validated when it is submitted. An interceptor keeps nothing between
calls, so interleaved requests equal serial ones, and an exception that it raises fails its request alone.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from loops.loop import ModelCall


class Parameters(BaseModel):
    """Base of an interceptor's parameters: frozen, and an unknown one is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Place:
    """Where in a request a call stands."""

    kind: str
    """Kind of the component on the card, e.g. ``transformer``."""
    step: int
    """Steps that the call's loop has done."""


class Interceptor(ABC):
    """Base of all interceptors; ``before`` and ``after`` may be left out."""

    name: ClassVar[str]
    """Key of its parameters in ``Request.extensions``."""
    exact: ClassVar[bool] = False
    """True when results keep their bits with its default parameters, so that an exact engine may have it."""
    claims: ClassVar[frozenset[str]] = frozenset()
    """What it alone may change: ``<kind>.<operation>.input`` or ``.output``. Two that claim the same do not go
    together."""
    parameters: ClassVar[type[Parameters]] = Parameters

    def before(self, call: ModelCall, place: Place, parameters: Any) -> ModelCall:
        """The call to evaluate in place of ``call``; with the same number of rows."""
        return call

    def after(self, call: ModelCall, output: Tensor, place: Place, parameters: Any) -> Tensor:
        """The result in place of ``output``, which is not to be written to."""
        return output
