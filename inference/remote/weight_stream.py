"""Weights on their way to another process: tensor by tensor, in chunks, each tensor checked by its sha256.

The sender remembers what the other side has and sends what differs. Sharded tensors are gathered one at a time, on
every rank alike, so that no rank holds a whole model twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from inference.instance import ModelInstance
from inference.remote import wire


class DamagedWeights(RuntimeError):
    """A tensor arrived with other bytes than were sent."""


@dataclass(frozen=True)
class TensorHead:
    """What goes before a tensor's bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    sha256: bytes
    chunk: int
    """Bytes a piece."""


@dataclass(frozen=True)
class StreamEnd:
    """What goes after the last tensor."""


def policy_tensors(instance: ModelInstance, component: str, adapter: str | None, *, whole: bool) -> dict[str, Tensor]:
    """The live tensors of a component by their names at the other end, where LoRA has the adapter ``adapter``.

    Without ``whole`` those that are the instance's own: of an instance with an adapter, that adapter's alone.
    """
    resident = instance.resident(component)
    state = resident.module.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if not resident.adapter:
        return tensors
    ours, theirs = f".{resident.adapter}.", f".{adapter}."
    own = {name.replace(ours, theirs): value for name, value in tensors.items() if ours in name}
    return {**tensors, **own} if whole else own


def send_weights(
    connection: Connection, tensors: Mapping[str, Tensor], known: Mapping[str, bytes], chunk: int
) -> tuple[dict[str, bytes], int]:
    """Sends the tensors whose digest is not the known one; gives the digests of those and their bytes."""
    sent: dict[str, bytes] = {}
    total = 0
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        data = wire.raw(full)
        digest = hashlib.sha256(data).digest()
        if known.get(name) == digest:
            continue
        wire.send(connection, TensorHead(name, full.dtype, tuple(full.shape), data.nbytes, digest, chunk))
        for begin in range(0, max(1, data.nbytes), chunk):
            connection.send_bytes(data[begin : begin + chunk])
        sent[name] = digest
        total += data.nbytes
    wire.send(connection, StreamEnd())
    return sent, total


def receive_weights(connection: Connection) -> Iterator[tuple[str, Tensor]]:
    """The tensors that :func:`send_weights` sends, each once it is whole and checked. Reads to the end of the stream
    before it raises ``DamagedWeights``."""
    damaged: list[str] = []
    while isinstance(head := wire.receive(connection), TensorHead):
        data = wire.receive_bytes(connection, head.size, head.chunk)
        if hashlib.sha256(data.numpy().data).digest() != head.sha256:
            damaged.append(head.name)
        if not damaged:
            yield head.name, data.view(head.dtype).reshape(head.shape)
    if damaged:
        raise DamagedWeights(f"{len(damaged)} tensor(s) arrived with other bytes than were sent, first {damaged[0]}")
