"""What the owner of an engine process and the process tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cards.card import ModelCard
from inference.artifact import Artifact
from inference.remote.skeleton import Skeleton
from inference.request import Request


@dataclass(frozen=True)
class WorkerSettings:
    """How the engine of the process is set up; as the owner's own, its results have the same bits."""

    device: str
    threads: int
    """torch's threads inside an operation."""
    batching: str
    max_rows: int
    kv_bytes: int
    share_prefixes: bool
    matmul_precision: str
    """As ``torch.get_float32_matmul_precision`` has it."""


@dataclass(frozen=True)
class Host:
    """A model that the process is to have from now on; its skeletons' weights follow."""

    slot: str
    card: ModelCard
    folder: Path
    """Of the card's frozen components."""
    skeletons: Mapping[str, Skeleton]
    """Component -> its module."""
    adapters: Mapping[str, str | None]
    """Component -> its LoRA adapter."""


@dataclass(frozen=True)
class Weights:
    """Weights of a component; tensors follow, as ``weight_stream`` sends them."""

    slot: str
    component: str
    version: int
    whole: bool
    """Every tensor that the component has, not those that changed."""


@dataclass(frozen=True)
class RollOut:
    slot: str
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Hosted:
    """Answer to :class:`Host`."""


@dataclass(frozen=True)
class Synced:
    """Answer to :class:`Weights`."""

    version: int


@dataclass(frozen=True)
class RolledOut:
    """Answer to :class:`RollOut`."""

    artifacts: list[Artifact]
    seconds: float
    """That the requests ran."""


@dataclass(frozen=True)
class Failed:
    """Answer to anything."""

    message: str
    user: bool
    """A ``UserError``: the message says all there is to say."""
