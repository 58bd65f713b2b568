"""EngineProcess: an engine with memory and threads of its own, to which weights are streamed and requests are sent.

Its owner is one thread. A process that dies is told as :class:`EngineProcessDied` by the next call that needs it, and
``start`` may be called again; it never outlives its owner.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from cards.errors import UserError
from cards.source import resolve_folder
from inference.artifact import Artifact
from inference.instance import ModelInstance
from inference.remote import wire
from inference.remote.messages import Failed, Host, RolledOut, RollOut, Weights, WorkerSettings
from inference.remote.skeleton import Skeleton
from inference.remote.weight_stream import policy_tensors, send_weights
from inference.remote.worker import serve
from inference.request import Request

CHUNK = 16 * 2**20
"""Bytes of a piece of a tensor on its way."""
GRACE = 5.0
"""Seconds that a process has to end by itself."""


class EngineProcessDied(RuntimeError):
    """The process is gone, and what it was doing with it."""


class EngineProcessError(RuntimeError):
    """Something failed inside the process, which lives on; the message holds its traceback."""


@dataclass(frozen=True)
class SyncCost:
    """What a sync sent and took."""

    tensors: int
    bytes: int
    seconds: float
    """From the first tensor's digest to the process' word that the weights are in place."""


def trainable_components(instance: ModelInstance) -> list[str]:
    """Components whose weights may differ from their folder's."""
    return [cid for cid, c in instance.card.components.items() if c.trainable and cid in instance.residents]


def skeletons_of(instance: ModelInstance) -> dict[str, Skeleton]:
    """Component -> skeleton of what an instance may have trained; of a sharded one, before it is sharded."""
    return {cid: Skeleton.of(instance.module(cid)) for cid in trainable_components(instance)}


class EngineProcess:
    """See the module's docstring.

    Args:
        device: where its components are.
        threads: of torch inside an operation; None takes the owner's.
        chunk: bytes of a piece of a tensor on its way.
        setup: a function of a module that the process calls first.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        threads: int | None = None,
        batching: str = "shape",
        max_rows: int = 32,
        kv_bytes: int = 0,
        share_prefixes: bool = True,
        chunk: int = CHUNK,
        setup: Callable[[], object] | None = None,
    ):
        self.device = str(device)
        self.threads = threads
        self.batching = batching
        self.max_rows = max_rows
        self.kv_bytes = kv_bytes
        self.share_prefixes = share_prefixes
        self.chunk = chunk
        self.setup = setup
        self.sent_bytes = 0
        """Of requests and models, without weights."""
        self.received_bytes = 0
        """Of results."""
        self._process: Any = None
        self._connection: Connection | None = None
        self._hosted: dict[str, Mapping[str, str | None]] = {}
        """Slot -> adapter of each component there."""
        self._known: dict[tuple[str, str], dict[str, bytes]] = {}
        """(slot, component) -> digest of each tensor that is there."""
        self._versions: dict[str, int] = {}
        self._flight: str | None = None
        """Slot of the requests that are under way."""

    # -- its life

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Begins the process, if it does not run; returns before it is ready. It has no model yet."""
        if self.alive:
            return
        self._forget()
        settings = WorkerSettings(
            device=self.device,
            threads=torch.get_num_threads() if self.threads is None else self.threads,
            batching=self.batching,
            max_rows=self.max_rows,
            kv_bytes=self.kv_bytes,
            share_prefixes=self.share_prefixes,
            matmul_precision=torch.get_float32_matmul_precision(),
        )
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, settings, self.setup), name="engine", daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours

    def close(self) -> None:
        """Ends the process, in the middle of requests too."""
        process, connection = self._process, self._connection
        self._forget()
        if connection is not None:
            connection.close()
        if process is not None:
            process.terminate()
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()

    def _forget(self) -> None:
        self._process = self._connection = self._flight = None
        self._hosted, self._known, self._versions = {}, {}, {}

    # -- what it does

    def host(self, slot: str, instance: ModelInstance, skeletons: Mapping[str, Skeleton] | None = None) -> None:
        """Gives the process a model like ``instance``, if the slot has none; :meth:`sync` gives it its weights."""
        if slot in self._hosted:
            return
        adapters = {cid: instance.resident(cid).adapter for cid in trainable_components(instance)}
        found = skeletons_of(instance) if skeletons is None else skeletons
        folder = resolve_folder(instance.card.source, instance.card.root)
        self._ask(Host(slot, instance.card, folder, found, adapters))
        self._hosted[slot] = adapters

    def sync(self, slot: str, instance: ModelInstance, version: int) -> SyncCost:
        """Brings the slot's weights to those of ``instance``, and calls them ``version``: what the slot has already is
        not sent again.

        Raises ``EngineProcessError``, after which the slot has its old weights, whole.
        """
        began = time.perf_counter()
        tensors = size = 0
        for component, adapter in self._hosted[slot].items():
            known = self._known.get((slot, component))
            live = policy_tensors(instance, component, adapter, whole=known is None)
            self._send(Weights(slot, component, version, whole=known is None))
            self._known.pop((slot, component), None)  # unknown until it is confirmed
            with self._told():
                sent, count = send_weights(self._open, live, {} if known is None else known, self.chunk)
            self._answer()
            self._known[slot, component] = {**({} if known is None else known), **sent}
            tensors, size = tensors + len(sent), size + count
        self._versions[slot] = version
        return SyncCost(tensors, size, time.perf_counter() - began)

    def submit(self, slot: str, requests: Sequence[Request]) -> None:
        """Begins the requests on the slot's weights; :meth:`results` waits for them. Nothing else may come between."""
        assert self._flight is None
        self._send(RollOut(slot, tuple(requests)))
        self._flight = slot

    def results(self) -> RolledOut:
        """What the requests that are under way gave, in their order.

        Raises what they raised, and ``EngineProcessError`` for artifacts of other weights than were asked for.
        """
        slot, self._flight = self._flight, None
        assert slot is not None
        rolled = self._answer()
        assert isinstance(rolled, RolledOut)
        self._check_version(slot, rolled.artifacts)
        return rolled

    def roll_out(self, slot: str, requests: Sequence[Request]) -> RolledOut:
        """:meth:`submit` and :meth:`results`."""
        self.submit(slot, requests)
        return self.results()

    def _check_version(self, slot: str, artifacts: Sequence[Artifact]) -> None:
        expected = self._versions[slot]
        for artifact in artifacts:
            found = {cid: artifact.provenance.weights_versions[cid] for cid in self._hosted[slot]}
            if any(version != expected for version in found.values()):
                raise EngineProcessError(f"a rollout came from weights of version {found}, expected {expected}")

    # -- messages

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise EngineProcessDied("the engine process does not run; start it first")
        return self._connection

    @contextlib.contextmanager
    def _told(self) -> Any:
        """A broken connection is the end of the process."""
        try:
            yield
        except (EOFError, OSError) as failure:
            raise self._death() from failure

    def _death(self) -> EngineProcessDied:
        process = self._process
        assert process is not None
        process.join(GRACE)
        code, pid = process.exitcode, process.pid
        self.close()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return EngineProcessDied(
            f"the engine process (pid {pid}) died: {how}. Signal 9 is often the kernel's answer to a machine without "
            "free memory; what it wrote before is above"
        )

    def _send(self, message: object) -> None:
        with self._told():
            self.sent_bytes += wire.send(self._open, message)

    def _ask(self, message: object) -> Any:
        self._send(message)
        return self._answer()

    def _answer(self) -> Any:
        with self._told():
            wait([self._open, self._process.sentinel])
            answer, size = wire.receive_counted(self._open)
        if isinstance(answer, Failed):
            if answer.user:
                raise UserError(answer.message)
            raise EngineProcessError(f"the engine process failed:\n{answer.message}")
        if isinstance(answer, RolledOut):
            self.received_bytes += size
        return answer
