"""The process of an engine: takes models, weights and requests from its owner, one message after the other.

It ends when its owner closes the connection, and at once when its owner is gone, in the middle of a request too. Ctrl-C
is its owner's to answer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from cards.errors import UserError
from inference.engine import Engine
from inference.instance import ModelInstance, Resident
from inference.remote import wire
from inference.remote.messages import Failed, Host, Hosted, RolledOut, RollOut, Synced, Weights, WorkerSettings
from inference.remote.weight_stream import receive_weights
from inference.weight_sync import WeightSyncController


def serve(connection: Connection, settings: WorkerSettings, setup: Callable[[], object] | None = None) -> None:
    """Entry of the process; ``setup`` comes before all else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, daemon=True).start()
    if setup is not None:
        setup()
    torch.set_num_threads(settings.threads)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    worker = Worker(connection, settings)
    try:
        while True:
            wire.send(connection, worker.answer(wire.receive(connection)))
    except (EOFError, OSError):
        return


def _end_with_owner() -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    wait([owner.sentinel])
    os._exit(1)


class Worker:
    """The models of the process and the engine that runs them."""

    def __init__(self, connection: Connection, settings: WorkerSettings):
        self.connection = connection
        self.device = settings.device
        batching: Any = settings.batching
        self.engine = Engine(
            settings.device,
            batching=batching,
            max_rows=settings.max_rows,
            kv_bytes=settings.kv_bytes,
            share_prefixes=settings.share_prefixes,
        )
        self.slots: dict[str, ModelInstance] = {}
        self._bases: dict[Path, ModelInstance] = {}
        """Folder -> the first instance of it, whose frozen components all others share."""

    def answer(self, message: Any) -> Any:
        """Does what a message asks."""
        try:
            if isinstance(message, Host):
                return self.host(message)
            if isinstance(message, Weights):
                return self.sync(message)
            assert isinstance(message, RollOut)
            return self.roll_out(message)
        except (EOFError, OSError):
            raise
        except UserError as failure:
            return Failed(str(failure), user=True)
        except Exception:
            return Failed(traceback.format_exc(), user=False)

    def host(self, message: Host) -> Hosted:
        base = self._bases.get(message.folder)
        if base is None:
            base = ModelInstance.from_folder(message.card, message.folder, self.device, tasks=())
            self._bases[message.folder] = base
        residents = {
            component: Resident(skeleton.build(self.device), adapter=message.adapters[component])
            for component, skeleton in message.skeletons.items()
        }
        self.slots[message.slot] = base.view(residents, card=message.card)
        return Hosted()

    def sync(self, message: Weights) -> Synced:
        """Checks all tensors before the first takes its place; after a failure the old weights are whole."""
        instance = self.slots[message.slot]
        stream = receive_weights(self.connection)
        try:
            first = next(stream, None)
            if first is not None:
                weights = ((name, tensor) for part in ([first], stream) for name, tensor in part)
                WeightSyncController(self.engine).sync(instance, message.component, weights, partial=not message.whole)
        finally:
            for _ in stream:  # what follows in the connection is the next message
                pass
        instance.resident(message.component).version = message.version
        return Synced(message.version)

    def roll_out(self, message: RollOut) -> RolledOut:
        began = time.perf_counter()
        artifacts = self.engine.run_interleaved(message.requests, self.slots[message.slot])
        return RolledOut(artifacts, time.perf_counter() - began)
