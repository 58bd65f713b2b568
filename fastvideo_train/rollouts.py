"""How a run's rollouts are executed: ``rollout=in_process``, ``process`` or ``async``. Settings, checks, the runner.

Knows no method by name. Everything that cannot work is told before weights load.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from cards.errors import UserError, unknown_name
from fastvideo_train.host_memory import keep_freed_memory
from inference.engine import Engine
from inference.remote.process import EngineProcess
from methods.method import Method
from methods.roles import Roles
from methods.rollout import InProcess, RolloutRunner
from methods.rollout_process import BEHAVIOUR, Asynchronous, SeparateProcess


@dataclass(frozen=True)
class RolloutSettings(ABC):
    """Base of the ways to run rollouts; fields are the keys of ``conf/rollout/<name>.yaml``."""

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]] = ()
    """That the trainer keeps for it, beside the method's."""
    engines: ClassVar[int] = 0
    """Engine processes of a rank."""

    @abstractmethod
    def make(self, engine: Engine, roles: Roles, max_rows: int) -> RolloutRunner:
        """The runner of a rank, beside its engine, whose forwards have up to ``max_rows``; starts nothing yet."""

    def problems(self, method: Method) -> list[str]:
        """What makes it unfit for the method."""
        return []


@dataclass(frozen=True)
class InProcessRollouts(RolloutSettings):
    name: ClassVar[str] = "in_process"

    def make(self, engine: Engine, roles: Roles, max_rows: int) -> RolloutRunner:
        return InProcess(engine, roles)


@dataclass(frozen=True)
class ProcessRollouts(RolloutSettings):
    """An engine process a rank.

    Args:
        device: of its components; None takes the trainer's.
        threads: of torch in it; None takes the trainer's.
        chunk_mib: MiB of a piece of a tensor on its way.
        restarts: deaths of the process that a run survives.
    """

    name: ClassVar[str] = "process"
    engines: ClassVar[int] = 1

    device: str | None = None
    threads: int | None = None
    chunk_mib: int = 16
    restarts: int = 1

    def make(self, engine: Engine, roles: Roles, max_rows: int) -> RolloutRunner:
        return SeparateProcess(self._process(engine, max_rows), roles, restarts=self.restarts)

    def _process(self, engine: Engine, max_rows: int) -> EngineProcess:
        device = engine.device if self.device is None else torch.device(self.device)
        return EngineProcess(
            device,
            setup=keep_freed_memory if device.type == "cpu" else None,
            threads=self.threads,
            batching=engine.batching,
            max_rows=max_rows,
            kv_bytes=engine.kv_bytes,
            share_prefixes=engine.share_prefixes,
            chunk=self.chunk_mib * 2**20,
        )

    def problems(self, method: Method) -> list[str]:
        found = []
        if not method.rolls_out:
            found.append(
                f"rollout={self.name}: method {method.name} has no rollouts to give away; use rollout=in_process"
            )
        counts = (("threads", self.threads, 1), ("chunk_mib", self.chunk_mib, 1), ("restarts", self.restarts, 0))
        for key, value, low in counts:
            if value is not None and (not isinstance(value, int) or value < low):
                found.append(f"rollout.{key}: got {value!r}, expected a whole number of at least {low}")
        if self.device is not None and not _is_device(self.device):
            found.append(f"rollout.device: got {self.device!r}, expected cpu, cuda or cuda:<number>, or null")
        return found


@dataclass(frozen=True)
class AsyncRollouts(ProcessRollouts):
    """An engine process a rank that samples a step ahead."""

    name: ClassVar[str] = "async"
    roles: ClassVar[tuple[str, ...]] = (BEHAVIOUR,)

    def make(self, engine: Engine, roles: Roles, max_rows: int) -> RolloutRunner:
        return Asynchronous(self._process(engine, max_rows), roles, restarts=self.restarts)

    def problems(self, method: Method) -> list[str]:
        found = super().problems(method)
        if method.rolls_out and type(method).rollout_plan is Method.rollout_plan:
            found.append(
                f"rollout=async: method {method.name} cannot say a step ahead what it rolls out (it has no "
                "rollout_plan); use rollout=process or rollout=in_process"
            )
        return found


SETTINGS: dict[str, type[RolloutSettings]] = {
    settings.name: settings for settings in (InProcessRollouts, ProcessRollouts, AsyncRollouts)
}


def make_settings(options: Mapping[str, Any]) -> RolloutSettings:
    """Settings of a config; raises ``UserError`` that lists the valid names for a wrong name or key."""
    values = dict(options)
    name = str(values.pop("name", None))
    if name not in SETTINGS:
        raise unknown_name("rollout", name, SETTINGS)
    known = [field.name for field in fields(SETTINGS[name])]
    unknown = sorted(set(values) - set(known))
    if unknown:
        expected = ", ".join(known) if known else "none"
        raise UserError(f"rollout={name}: unknown key(s) {', '.join(unknown)}; expected {expected}")
    return SETTINGS[name](**values)


def _is_device(name: Any) -> bool:
    try:
        return torch.device(name).type in ("cpu", "cuda")
    except (RuntimeError, TypeError):
        return False
