"""The order of training rows: infinite, shuffled anew each pass, the same on any number of ranks, exactly resumable.

Knows row numbers only. The order is a function of (seed, rows): sample i of the stream is row i mod n of the shuffle
of pass i div n, so a position is one integer and needs no generator state.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

ENDLESS = 2**31 - 1  # batches; what ``len`` answers


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of row numbers for one rank: global step k holds samples [k*W*b, (k+1)*W*b), rank r its r-th slice of b.

    A batch may span two passes over the data, so no row is ever dropped. ``len`` is finite (2**31 - 1) on purpose: a
    trainer that thinks a loader has no length fetches one batch ahead, and a checkpoint would then point past it.

    Args:
        rows: size of the data set, > 0.
        batch_size: rows a rank and step (b).
        seed: of the order.
        rank: this process, in [0, world_size).
        world_size: data-parallel processes (W).
    """

    def __init__(self, *, rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.samples = 0  # consumed from the stream by all ranks together

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            start = self.samples + self.rank * self.batch_size
            self.samples += self.world_size * self.batch_size  # before the yield: a handed-out batch counts as consumed
            yield [self.row_at(position) for position in range(start, start + self.batch_size)]

    def __len__(self) -> int:
        return ENDLESS

    def row_at(self, position: int) -> int:
        """The row of one sample of the stream."""
        epoch, offset = divmod(position, self.rows)
        return int(shuffled(self.rows, self.seed, epoch)[offset])

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


@lru_cache(maxsize=4)
def shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one pass; two passes can be in use at a time, where a batch spans them."""
    return np.random.default_rng([seed, epoch]).permutation(rows)
