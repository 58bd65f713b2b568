"""NaNWatch: a request whose step gives a value that is not finite fails there, and not as a black clip at its end."""

from __future__ import annotations

import torch

from inference.extend.observer import Observer, Step


class NotFiniteError(RuntimeError):
    """A component gave NaN or infinity."""


class NaNWatch(Observer):
    """Looks at every result of every step; on an accelerator that waits for the device once a step."""

    def on_step(self, step: Step) -> None:
        for call, output in zip(step.plan.calls, step.outputs, strict=True):
            finite = torch.isfinite(output)
            if not bool(finite.all()):
                bad = int(output.numel() - finite.sum())
                branch = "" if call.branch == "main" else f" ({call.branch} branch)"
                raise NotFiniteError(
                    f"{step.plan.label}: {call.component}.{call.method}{branch} gave {bad} of {output.numel()} values "
                    "that are not finite (NaN or infinity)"
                )
