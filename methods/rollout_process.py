"""Rollouts by an engine process: in step with the updates, or one step ahead of them while they run.

Both send the weights that changed before they sample; what comes back has the bits that this process' engine would give
for the same weights. A process that died is started again, given the same weights and asked for the same requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from cards.errors import UserError
from inference.artifact import Artifact
from inference.remote.process import EngineProcess, EngineProcessDied, SyncCost, skeletons_of
from inference.remote.skeleton import Skeleton
from inference.request import Request
from methods.roles import Roles, local
from methods.rollout import RolloutPlan, RolloutRunner, Sampled

BEHAVIOUR = "behaviour"
"""Role of asynchronous rollouts: the weights that sampled the batch that is trained on, or is under way."""
log = logging.getLogger("fastvideo.rollouts")
T = TypeVar("T")


class RolloutsLost(UserError):
    """The engine process died more often than may be forgiven."""


@dataclass
class RolloutCost:
    """Of one training step."""

    wait_seconds: float = 0.0
    """That training stood still for rollouts, without the syncs."""
    syncs: list[SyncCost] = field(default_factory=list)

    @property
    def sync_seconds(self) -> float:
        """That training stood still to send weights."""
        return sum(sync.seconds for sync in self.syncs)


class SeparateProcess(RolloutRunner):
    """An engine process samples while training waits.

    Args:
        process: not started yet.
        restarts: deaths of the process that are forgiven in a run; sharded roles forgive none, since the other ranks
            would have to send their weights again too.
    """

    def __init__(self, process: EngineProcess, roles: Roles, *, restarts: int = 1):
        self.process = process
        self.roles = roles
        self.restarts = restarts
        self.deaths = 0
        self.cost = RolloutCost()
        self._staleness = 0
        self._skeletons: dict[str, dict[str, Skeleton]] = {}

    def prepare(self) -> None:
        self._skeletons = {role: skeletons_of(self.roles.instance(role)) for role in self.roles.names}

    def start(self) -> None:
        self.process.start()

    def close(self) -> None:
        self.process.close()

    def metrics(self) -> dict[str, float]:
        return {
            "train/staleness": float(self._staleness),
            "time/sync_seconds": self.cost.sync_seconds,
            "time/rollout_wait_seconds": self.cost.wait_seconds,
        }

    def roll_out(self, requests: Sequence[Request], *, role: str, step: int) -> Sampled:
        self.cost = RolloutCost()
        artifacts = self._sample(requests, role, step, slot=role)
        return Sampled(artifacts, None if self.roles.moves(role) else role, step)

    def _sample(self, requests: Sequence[Request], role: str, version: int, *, slot: str) -> list[Artifact]:
        """By the role's weights of now, with training waiting."""

        def sample() -> list[Artifact]:
            self._sync(slot, role, version)
            began = time.perf_counter()
            artifacts = self.process.roll_out(slot, requests).artifacts
            self.cost.wait_seconds += time.perf_counter() - began
            return artifacts

        return self._forgiving(sample)

    def _sync(self, slot: str, role: str, version: int) -> None:
        if self.process.pid is None:
            self.process.start()
        instance = self.roles.instance(role)
        self.process.host(slot, instance, self._skeletons.get(role))
        self.cost.syncs.append(self.process.sync(slot, instance, version))

    def _forgiving(self, act: Callable[[], T]) -> T:
        """Does it again where the process died, as often as that is forgiven."""
        while True:
            try:
                return act()
            except EngineProcessDied as death:
                self._count(death)

    def _count(self, death: EngineProcessDied) -> None:
        """Raises ``RolloutsLost`` for one too many."""
        self.deaths += 1
        sharded = any(hasattr(parameter, "to_local") for parameter in self.roles.parameters())
        if sharded or self.deaths > self.restarts:
            raise RolloutsLost(
                f"{death}. Rollouts are lost for the {_times(self.deaths)} time in this run, rollout.restarts forgives "
                f"{0 if sharded else self.restarts}; go on from the last checkpoint with resume=auto"
            ) from death
        log.warning("%s; it is started again and rolls out the same batch", death)


class Asynchronous(SeparateProcess):
    """The engine process samples the next step's batch while this one's is trained on.

    The batch of step t + 1 is sampled by the weights as they are when the updates of step t begin, so from step 1 on a
    batch is one step old. Those weights are kept in the role ``BEHAVIOUR``, which checkpoints hold: a run that goes on
    from one has no batch under way and samples it again, to the same bits.

    Before the first batch is there, and after a death, training waits for it.
    """

    def __init__(self, process: EngineProcess, roles: Roles, *, restarts: int = 1):
        super().__init__(process, roles, restarts=restarts)
        self.ahead: Callable[[int], RolloutPlan | None] = lambda step: None
        """Step -> what the method will roll out then; None beyond the end."""
        self._flight: tuple[int, tuple[Request, ...]] | None = None
        """(step, requests) of the batch that is under way."""
        self._keep: str | None = None
        """Role that ``BEHAVIOUR`` becomes when the updates are done."""

    def start(self) -> None:
        self._flight = None
        super().start()

    def roll_out(self, requests: Sequence[Request], *, role: str, step: int) -> Sampled:
        self.cost = RolloutCost()
        flight, self._flight = self._flight, None
        artifacts = None if flight is None else self._arrived(flight, requests, step)
        version = max(0, step - 1)
        if artifacts is None:
            artifacts = self._sample(requests, BEHAVIOUR, version, slot=BEHAVIOUR)
        self._staleness = step - version
        moves = self.roles.moves(role)
        if moves:  # its weights of now are gone once the optimizer has stepped
            copy_role(self.roles, role, BEHAVIOUR)
        self._keep = None if moves else role
        self._begin(role, step)
        return Sampled(artifacts, None if moves else BEHAVIOUR, version)

    def _arrived(
        self, flight: tuple[int, tuple[Request, ...]], requests: Sequence[Request], step: int
    ) -> list[Artifact] | None:
        """The batch that was under way, None where it died with its process."""
        if flight[0] != step or not _alike(flight[1], requests):
            raise UserError(
                f"rollout=async: step {step} asks for {len(requests)} requests, which are not the {len(flight[1])} of "
                f"step {flight[0]} that were begun ahead; a method rolls out once a step, what its rollout_plan says"
            )
        began = time.perf_counter()
        try:
            return self.process.results().artifacts
        except EngineProcessDied as death:
            self._count(death)
            return None
        finally:
            self.cost.wait_seconds += time.perf_counter() - began

    def _begin(self, role: str, step: int) -> None:
        """Sends the weights of now and begins the next step's batch."""
        plan = self.ahead(step + 1)
        if plan is None:
            return
        if plan.role != role:
            raise UserError(
                f"rollout=async: rollout_plan names role {plan.role!r}, the step before rolled out {role!r}"
            )

        def begin() -> None:
            self._sync(BEHAVIOUR, role, step)
            self.process.submit(BEHAVIOUR, plan.requests)

        self._forgiving(begin)
        self._flight = (step + 1, plan.requests)

    def end_updates(self) -> None:
        if self._keep is not None:
            copy_role(self.roles, self._keep, BEHAVIOUR)
            self._keep = None


@torch.no_grad()
def copy_role(roles: Roles, source: str, target: str) -> None:
    """``target <- source``, exactly."""
    new = roles.parameters_of(source)
    for key, parameter in roles.parameters_of(target).items():
        local(parameter).copy_(local(new[key]))
    for component, name in roles.joined(target).items():
        others = roles[roles.joined(source)[component]].parameters()
        for parameter, other in zip(roles[name].parameters(), others, strict=True):
            local(parameter).copy_(local(other))
    roles.changed(target)


def _alike(ours: Sequence[Request], theirs: Sequence[Request]) -> bool:
    """By prompts and seeds: requests may hold tensors, which have no plain equality."""
    return [(r.prompt, r.seed) for r in ours] == [(r.prompt, r.seed) for r in theirs]


def _times(count: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(count, f"{count}th")
