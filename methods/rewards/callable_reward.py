"""A Python function as a reward, named by its dotted path.

Knows how to find the function and how to survive it. The function itself is the user's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cards.errors import UserError, unknown_name
from methods.rewards.reward import Reward, RewardBatch, Scores, attempt, clean

RewardFunction = Callable[[Any, Sequence[str], Sequence[Any]], Sequence[float | None]]


class CallableReward(Reward):
    """``function(videos, prompts, metadata) -> one number a sample``; None, NaN or an infinity = not scored.

    Args:
        function: dotted path, ``package.module.function``, importable from the working directory or the environment.
        name: as logged.
        learned: whether a model decides, so that the run is watched for reward hacking.

    When the call raises, its samples are tried one by one, so that one bad sample costs no other its score."""

    def __init__(self, *, function: str, name: str = "callable", learned: bool = False) -> None:
        self.name = name
        self.learned = learned
        self.function = function
        self.version = f"1 {function}"

    def check(self) -> None:
        self._resolve()

    def score(self, batch: RewardBatch) -> Scores:
        function = self._resolve()
        try:
            return Scores(values=self._call(function, batch))
        except (UserError, MemoryError):
            raise
        except Exception:  # find out whose fault it was
            results, reasons = attempt(
                self.name, len(batch), lambda i: float(self._call(function, batch.select([i]))[0])
            )
            return Scores(values=clean([np.nan if value is None else value for value in results]), reasons=reasons)

    def _call(self, function: RewardFunction, batch: RewardBatch) -> np.ndarray:
        got = function(batch.videos_BFHWC, list(batch.prompts), list(batch.metadata))
        if np.asarray(got, dtype=object).ndim != 1 or len(got) != len(batch):
            shape = np.asarray(got, dtype=object).shape
            raise UserError(
                f"reward {self.name}: {self.function} returned {type(got).__name__} of shape {shape} for {len(batch)}"
                f" samples; expected a flat sequence of {len(batch)} numbers (None where a sample has no score)"
            )
        return clean([np.nan if value is None else float(value) for value in got])

    def _resolve(self) -> RewardFunction:
        module_name, _, attribute = self.function.rpartition(".")
        if not module_name:
            raise UserError(
                f"reward {self.name}: function got {self.function!r}, expected a dotted path like"
                " my_package.rewards.score; add the module's name"
            )
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # a user's module can raise anything on import
            raise UserError(
                f"reward {self.name}: function got {self.function!r}, but importing {module_name!r} failed"
                f" ({type(error).__name__}: {error}); expected an importable module; put its folder on PYTHONPATH"
            ) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            raise unknown_name(
                f"function in {module_name}",
                attribute,
                [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")],
            )
        return function
