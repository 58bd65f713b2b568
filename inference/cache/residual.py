"""Residual cache: what step skipping remembers between the steps of one request.

An entry belongs to one (request, guidance branch) and is reached by no other. It is read back only under the tag that
it was kept with, such as the ``CacheKey`` of the request's first step: after a weight sync or a change of adapters the
tag differs and the entry is a miss. Knows nothing about when a step may be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch import Tensor

from inference.cache.budget import ByteBudget
from inference.cache.feature import tensor_bytes


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor
    tag: Hashable
    size_bytes: int


class ResidualCache:
    """Named tensors of each (request, branch); ``close`` frees a request's."""

    def __init__(self, budget: ByteBudget):
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._budget = budget
        self._requests: dict[Hashable, dict[tuple[str, str], _Kept]] = {}

    def put(self, request: Hashable, branch: str, name: str, tensor: Tensor, *, tag: Hashable) -> None:
        """Keeps a copy without graph, in place of what had this name. Raises ``CacheExhausted``; then it has none.

        A copy, because a merged forward's result is split into views that keep the whole batch alive.
        """
        self.discard(request, branch, name)
        size = tensor_bytes(tensor)
        self._budget.reserve(size, f"residual cache, request {request!r}, branch {branch!r}")
        self.bytes += size
        self._requests.setdefault(request, {})[branch, name] = _Kept(tensor.detach().clone(), tag, size)

    def get(self, request: Hashable, branch: str, name: str, *, tag: Hashable) -> Tensor | None:
        """The kept tensor, which is not to be written to; None when there is none of this tag."""
        kept = self._requests.get(request, {}).get((branch, name))
        if kept is None or kept.tag != tag:
            self.misses += 1
            return None
        self.hits += 1
        return kept.tensor

    def discard(self, request: Hashable, branch: str, name: str) -> int:
        """Forgets one tensor if it is there; gives its bytes."""
        kept = self._requests.get(request, {}).pop((branch, name), None)
        if kept is None:
            return 0
        self.bytes -= kept.size_bytes
        self._budget.release(kept.size_bytes)
        return kept.size_bytes

    def close(self, request: Hashable) -> int:
        """Forgets everything of a request; gives the bytes freed."""
        freed = sum(self.discard(request, branch, name) for branch, name in list(self._requests.get(request, {})))
        self._requests.pop(request, None)
        return freed

    def drop(self, stale: Callable[[Hashable], bool]) -> int:
        """Forgets what has a ``stale`` tag, whosever it is; gives the bytes freed."""
        found = [(r, *k) for r, kept in self._requests.items() for k, value in kept.items() if stale(value.tag)]
        return sum(self.discard(*where) for where in found)

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._requests.values())
