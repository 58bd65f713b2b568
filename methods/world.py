"""Ranks of a data-parallel run, as far as a method must know them. A single process is a world of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from cards.errors import UserError


@dataclass(frozen=True)
class World:
    """Which slice of a global batch is ours, and how to see the whole."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, what: str) -> slice:
        """Our slice of ``count`` global items; raises ``UserError`` when they do not divide evenly."""
        if count % self.size:
            raise UserError(f"{what}: got {count}, expected a multiple of the {self.size} devices")
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Every rank's array, concatenated along the first axis in rank order."""
        if self.size == 1:
            return values
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # NCCL moves tensors of the current GPU only
        mine = torch.from_numpy(np.ascontiguousarray(values)).to(device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return torch.cat(parts).cpu().numpy()

    def mean(self, metrics: dict[str, float]) -> dict[str, float]:
        """Mean over ranks of metrics that every rank has; NaN on a rank leaves it out."""
        if self.size == 1:
            return metrics
        table = self.gather(np.array([list(metrics.values())], dtype=np.float64))
        known = np.isfinite(table)
        total = np.where(known, table, 0).sum(0)
        count = known.sum(0)
        means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return dict(zip(metrics, means.tolist(), strict=True))
