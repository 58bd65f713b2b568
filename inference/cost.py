"""CostBook: predicted device seconds of a forward, the one currency of scheduling, admission and routing.

Starts from the card's cost model and learns from observed seconds, per (component, shape signature, rows). Knows
nothing about who is scheduled or what a forward computes, and imports no torch. Not thread-safe: the engine's thread
owns it; ``figures`` and ``save`` belong on that thread too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import platform
import re
import statistics
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cards.card import CostModel, ModelCard

if TYPE_CHECKING:
    from loops.loop import ModelCall

log = logging.getLogger("fastvideo.cost")

SCHEMA = 1
FLOOR_SECONDS = 1e-6
"""No forward is predicted to cost less, so that nothing is ever free."""
SETTLING = 5
"""Observations until an average takes over from the low median, which a slow first forward does not move."""
SMOOTHING = 0.2
"""Weight of a new observation in the average."""
CLIP = 2.0
"""A new observation counts as at most this many times the average, and at least as its inverse."""


@dataclass(frozen=True)
class Workload:
    """One forward, as far as its cost goes."""

    component: str
    """Component id on the card."""
    signature: str
    """Operation, static inputs and shapes without the batch dim: :func:`signature_of`. One that was never observed
    (such as "" before the tensors exist) is predicted from the nearest number of tokens."""
    rows: int
    """Length of the batch dim, at least 1."""
    tokens: int
    """Tokens a row, for the card's cost model."""


def signature_of(call: ModelCall) -> str:
    """Operation, inputs and static inputs as text: calls of one signature differ in rows and values alone. A state
    that a call carries, such as the KV of its request, is not part of it."""
    inputs = tuple((name, tensor.dtype, tensor.shape[1:]) for name, tensor in call.tensors.items())
    static = tuple((name, str(value)) for name, value in call.static.items() if name != "state")
    return _signature(call.method, inputs, static)


@functools.lru_cache(maxsize=4096)
def _signature(method: str, inputs: tuple[tuple[str, Any, Any], ...], static: tuple[tuple[str, str], ...]) -> str:
    """The text, made once for the many calls that it is of."""
    shapes = [f"{name}:{str(dtype).removeprefix('torch.')}{list(shape)}" for name, dtype, shape in sorted(inputs)]
    return "; ".join([method, *shapes, *(f"{name}={value}" for name, value in sorted(static))])


def workload_of(call: ModelCall, tokens: int) -> Workload:
    """A call's workload; ``tokens`` a row as the card's geometry counts them."""
    return Workload(call.component, signature_of(call), call.rows, tokens)


@functools.lru_cache
def device_name(device: str) -> str:
    """What figures are bound to: the GPU's product name, or the CPU's model and how many cores may be used."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found[1] if found else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{device}: {model}, {cores} cores"


@dataclass
class _Average:
    """A robust running average of the seconds of one (component, signature, rows)."""

    tokens: int
    seconds: float = 0.0
    count: int = 0
    first: list[float] = field(default_factory=list)
    """The first SETTLING observations, seconds."""

    def take(self, seconds: float) -> None:
        self.count += 1
        if self.count <= SETTLING:
            self.first.append(seconds)
            self.seconds = statistics.median_low(self.first)
        else:
            clipped = min(max(seconds, self.seconds / CLIP), self.seconds * CLIP)
            self.seconds += SMOOTHING * (clipped - self.seconds)


class _Entry(BaseModel):
    """An average as it is stored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    component: str
    signature: str
    rows: int = Field(ge=1)
    tokens: int = Field(ge=0)
    seconds: float = Field(ge=FLOOR_SECONDS)
    count: int = Field(ge=1)
    first: list[float]


class _File(BaseModel):
    """A book as it is stored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int
    card: str
    device: str
    entries: list[_Entry]


class CostBook:
    """See the module's docstring.

    Args:
        card_digest: the card that the figures are of.
        device: name of the device that they were measured on, as :func:`device_name` gives it.
        priors: component -> the card's cost model of it; a component without one takes the model's defaults.
        max_entries: (component, signature, rows) that are kept; the one observed longest ago leaves first.
    """

    def __init__(
        self,
        *,
        card_digest: str,
        device: str,
        priors: Mapping[str, CostModel] | None = None,
        max_entries: int = 4096,
    ):
        if max_entries < 1:
            raise ValueError(f"max_entries: got {max_entries}, expected at least 1")
        self.card_digest = card_digest
        self.device = device
        self.max_entries = max_entries
        self._priors = {} if priors is None else dict(priors)
        self._averages: OrderedDict[tuple[str, str, int], _Average] = OrderedDict()
        self._groups: dict[str, dict[str, dict[int, _Average]]] = {}
        """Component -> signature (observed last comes last) -> rows -> average; the same objects."""

    @classmethod
    def of(cls, card: ModelCard, device: str, *, max_entries: int = 4096) -> CostBook:
        """A book whose priors are the card's cost models: of a component, else of the first loop that binds it."""
        priors: dict[str, CostModel] = dict(card.costs)
        for loop in card.loops.values():
            for component in loop.components.values():
                priors.setdefault(component, loop.cost)
        return cls(card_digest=card.digest, device=device, priors=priors, max_entries=max_entries)

    def __len__(self) -> int:
        return len(self._averages)

    # -- learning and predicting

    def observe(self, work: Workload, seconds: float) -> None:
        """Takes the device seconds that a forward took, all of its rows together."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds of {work.component}: got {seconds}, expected a finite number >= 0")
        if work.rows < 1:
            raise ValueError(f"rows of {work.component}: got {work.rows}, expected at least 1")
        key = (work.component, work.signature, work.rows)
        average = self._averages.get(key)
        if average is None:
            average = _Average(work.tokens)
        average.take(max(seconds, FLOOR_SECONDS))
        self._keep(key, average)

    def predict(self, work: Workload) -> float:
        """Device seconds of one forward, never below FLOOR_SECONDS.

        The average of this batch size; else affine in rows over the batch sizes known of this signature; else the
        signature of the component that is nearest in tokens, scaled as the cost model says; else the cost model.
        """
        known = self._groups.get(work.component, {})
        group = known.get(work.signature)
        if group is None and known:
            group = min(reversed(known.values()), key=lambda g: _distance(_tokens(g), work.tokens))
        if group is None:
            return self._prior(work.component, work.tokens, work.rows)
        seconds = self._in_batch(group, work.component, work.rows)
        if _tokens(group) != work.tokens:
            seconds *= self._prior(work.component, work.tokens, work.rows)
            seconds /= self._prior(work.component, _tokens(group), work.rows)
        return max(seconds, FLOOR_SECONDS)

    def request_seconds(self, forwards: Iterable[tuple[Workload, int]]) -> float:
        """Device seconds of a whole request: each forward with how often it runs."""
        return sum(self.predict(work) * times for work, times in forwards)

    def figures(self, requests: Mapping[str, Iterable[tuple[Workload, int]]] | None = None) -> dict[str, Any]:
        """The routing figure, ready for JSON: seconds of one step of every known key, and of the named requests."""
        named = {} if requests is None else requests
        return {
            "card": self.card_digest,
            "device": self.device,
            "steps": [
                {
                    "component": component,
                    "signature": signature,
                    "rows": rows,
                    "seconds": average.seconds,
                    "observations": average.count,
                }
                for (component, signature, rows), average in self._averages.items()
            ],
            "requests": {name: self.request_seconds(forwards) for name, forwards in named.items()},
        }

    def _prior(self, component: str, tokens: int, rows: int) -> float:
        cost = self._priors.get(component)
        if cost is None:
            cost = CostModel()
        return max(cost.base_seconds + cost.per_token_seconds * tokens * rows, FLOOR_SECONDS)

    def _in_batch(self, group: Mapping[int, _Average], component: str, rows: int) -> float:
        """Seconds at a batch size from the sizes known of one signature."""
        if rows in group:
            return group[rows].seconds
        if len(group) == 1:
            ((known, average),) = group.items()
            scale = average.seconds / self._prior(component, average.tokens, known)
            return scale * self._prior(component, average.tokens, rows)
        base, per_row = affine_fit([(n, a.seconds, min(a.count, SETTLING)) for n, a in group.items()])
        return base + per_row * rows

    def _keep(self, key: tuple[str, str, int], average: _Average) -> None:
        component, signature, rows = key
        self._averages[key] = average
        self._averages.move_to_end(key)
        signatures = self._groups.setdefault(component, {})
        group = signatures.pop(signature, {})
        group[rows] = average
        signatures[signature] = group
        while len(self._averages) > self.max_entries:
            (component, signature, rows), _ = self._averages.popitem(last=False)
            signatures = self._groups[component]
            del signatures[signature][rows]
            if not signatures[signature]:
                del signatures[signature]

    # -- on disk

    @property
    def file_name(self) -> str:
        """One file a card and device, so that several machines may share the folder."""
        device = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")
        return f"costs-{self.card_digest[:12]}-{device}.json"

    def save(self, folder: Path) -> bool:
        """Writes the book into ``folder``: all of it or nothing, whenever the process dies. A folder that cannot be
        written to is a warning and False: figures are a convenience."""
        stored = _File(
            schema_version=SCHEMA,
            card=self.card_digest,
            device=self.device,
            entries=[
                _Entry(
                    component=component,
                    signature=signature,
                    rows=rows,
                    tokens=average.tokens,
                    seconds=average.seconds,
                    count=average.count,
                    first=average.first,
                )
                for (component, signature, rows), average in self._averages.items()
            ],
        )
        path = folder / self.file_name
        temporary = folder / f".{self.file_name}.{os.getpid()}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(stored.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            log.warning("the cost figures were not saved to %s: %s", path, error)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        return True

    def load(self, folder: Path) -> bool:
        """Takes over the figures of ``folder``. No file is False; a file that is corrupt, of another schema, card or
        device is a warning and False, and the book stays as it was."""
        path = folder / self.file_name
        try:
            stored = _File.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return False
        except (OSError, ValidationError) as error:
            log.warning("the cost figures in %s are ignored, they cannot be read: %s", path, error)
            return False
        for what, got, expected in (
            ("schema_version", stored.schema_version, SCHEMA),
            ("card", stored.card, self.card_digest),
            ("device", stored.device, self.device),
        ):
            if got != expected:
                log.warning("the cost figures in %s are ignored: got %s %r, expected %r", path, what, got, expected)
                return False
        for entry in stored.entries:
            average = _Average(entry.tokens, entry.seconds, entry.count, entry.first)
            self._keep((entry.component, entry.signature, entry.rows), average)
        return True


def affine_fit(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """(base, slope), both >= 0, of the weighted least-squares line through (x, y, weight) of at least two x."""
    rows = list(points)
    total = sum(w for _, _, w in rows)
    mean_x = sum(w * x for x, _, w in rows) / total
    mean_y = sum(w * y for _, y, w in rows) / total
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in rows) / sum(w * (x - mean_x) ** 2 for x, _, w in rows)
    if slope < 0:
        return mean_y, 0.0
    base = mean_y - slope * mean_x
    if base < 0:
        return 0.0, sum(w * x * y for x, y, w in rows) / sum(w * x * x for x, _, w in rows)
    return base, slope


def _tokens(group: Mapping[int, _Average]) -> int:
    return next(iter(group.values())).tokens


def _distance(a: int, b: int) -> float:
    """How far two numbers of tokens are apart, as a ratio."""
    return abs(math.log((a + 1) / (b + 1)))
