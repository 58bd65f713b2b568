"""ZeroInit: the first velocities of a flow are zero, as CFG-Zero* proposes.

Fan et al., "CFG-Zero*: Improved Classifier-Free Guidance for Flow Matching Models" (2025), section on zero-init: early
in sampling the learnt velocity of an underfitted model is farther from the true one than zero is.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from inference.extend.interceptor import Interceptor, Parameters, Place
from loops.loop import ModelCall


class ZeroInitParameters(Parameters):
    """Of one request."""

    steps: int = Field(default=1, ge=0, strict=True)
    """Solver steps whose velocity is zero."""


class ZeroInit(Interceptor):
    """``extensions={"zero_init": {"steps": 1}}``."""

    name = "zero_init"
    claims = frozenset({"transformer.velocity.output"})
    parameters = ZeroInitParameters

    def after(self, call: ModelCall, output: Tensor, place: Place, parameters: ZeroInitParameters) -> Tensor:
        hit = place.kind == "transformer" and call.method == "velocity" and place.step < parameters.steps
        return output.new_zeros(output.shape) if hit else output
