"""Messages between two processes of one run: any picklable object, its tensors as raw bytes beside the pickle.

A tensor is sent by value, its own rows alone and not the storage that it is a view of, and arrives contiguous on the
CPU in memory of its own. For a parent and the child that it started: what arrives is unpickled.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


def send(connection: Connection, message: object) -> int:
    """Sends a message and gives its bytes. Raises ``OSError`` when nobody is at the other end."""
    stream = io.BytesIO()
    parts: list[memoryview] = []
    _Pickler(stream, protocol=5, buffer_callback=lambda buffer: parts.append(buffer.raw())).dump(message)
    head = pickle.dumps([part.nbytes for part in parts])
    body = stream.getbuffer()
    connection.send_bytes(head)
    connection.send_bytes(body)
    for part in parts:
        connection.send_bytes(part)
    return len(head) + body.nbytes + sum(part.nbytes for part in parts)


def receive(connection: Connection) -> Any:
    """Waits for the next message. Raises ``EOFError`` or ``OSError`` when nobody is at the other end any more."""
    return receive_counted(connection)[0]


def receive_counted(connection: Connection) -> tuple[Any, int]:
    """:func:`receive`, and the bytes of the message."""
    head = connection.recv_bytes()
    sizes = pickle.loads(head)
    body = connection.recv_bytes()
    parts = [receive_bytes(connection, size).numpy() for size in sizes]
    return pickle.loads(body, buffers=parts), len(head) + len(body) + sum(sizes)


def receive_bytes(connection: Connection, size: int, chunk: int | None = None) -> Tensor:
    """uint8 (size,): so many bytes, sent in pieces of ``chunk``, or in one."""
    memory = torch.empty(size, dtype=torch.uint8)
    view = memory.numpy().data
    begin = 0
    while True:
        end = size if chunk is None else min(size, begin + chunk)
        got = connection.recv_bytes_into(view[begin:end])
        if got != end - begin:
            raise OSError(f"got {got} bytes, expected {end - begin}")
        begin = end
        if begin >= size:
            return memory


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its elements; a view where it lies so already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _tensor, (pickle.PickleBuffer(raw(obj)), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)
