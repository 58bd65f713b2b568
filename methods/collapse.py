"""Collapse watch: a few-step student that turns to solid colour or to stills says so before anyone looks at samples.

Knows latents and a baseline; the loss curves of distribution matching show neither.

Legend: B rows, C latent channels, T latent frames, H W latent cells.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor


class CollapseWarning(UserWarning):
    """Samples have lost their contrast or their motion."""


def contrast(x0_BCTHW: Tensor) -> float:
    """Mean over frames and channels of the variance within a frame: near 0 for solid colour."""
    return x0_BCTHW.detach().float().var(dim=(-2, -1), correction=0).mean().item()


def motion(x0_BCTHW: Tensor) -> float:
    """Mean absolute difference of neighbouring latent frames: near 0 for a still; 0 for a single frame."""
    if x0_BCTHW.shape[2] < 2:
        return 0.0
    return x0_BCTHW.detach().float().diff(dim=2).abs().mean().item()


@dataclass
class CollapseWatch:
    """Compares each iteration with the first ones of its kind and warns once.

    Args:
        baseline: iterations of a kind that make its baseline.
        floor: share of the baseline below which a figure counts as collapsed.
        patience: iterations in a row that must be collapsed; the first of them is when it began.
    """

    baseline: int = 5
    floor: float = 0.25
    patience: int = 10
    first: dict[str, list[float]] = field(default_factory=dict)
    """Kind and figure -> its first values."""
    began: dict[str, int] = field(default_factory=dict)
    """Figure -> first step of the present row of low values."""
    warned: bool = False

    def observe(self, step: int, kind: str, figures: dict[str, float]) -> None:
        """``figures``: name -> value at training step ``step``; ``kind``: what they are comparable with, such as the
        rung that the samples left at, for an early one is smoother whatever the student."""
        for name, value in figures.items():
            first = self.first.setdefault(f"{kind}/{name}", [])
            if len(first) < self.baseline:
                first.append(value)
                continue
            usual = sum(first) / len(first)
            if value >= self.floor * usual:
                self.began.pop(name, None)
                continue
            since = self.began.setdefault(name, step)
            if step - since + 1 >= self.patience and not self.warned:
                self.warned = True
                warnings.warn(
                    f"the samples collapse since step {since}: {name} is {value:.3g}, the first iterations had "
                    f"{usual:.3g}. Lower lr= and method.critic_lr, or raise method.ttur",
                    CollapseWarning,
                    stacklevel=2,
                )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return asdict(self)

    @classmethod
    def restored(cls, state: dict[str, Any]) -> CollapseWatch:
        return cls(**state)
