"""Slab KV: the keys and values that a chunked causal rollout attends to, chunk by chunk.

A chunk is a fixed number of tokens (latent frames x patches). Attention sees the first ``sink_chunks`` and the last
``window_chunks`` chunks, oldest first. A chunk is appended once and may be overwritten, as each denoising step of it
and the context-noise pass after them do.

Two stores of the same window. :class:`Slab` holds one preallocated slab a layer, written in place; the window rolls by
moving chunks within it. :class:`TrainingSlab` keeps every chunk as the tensor it was given and never writes in place,
so that autograd of earlier chunks stays valid and a snapshot costs nothing. Both give bitwise the same tokens.
:class:`SlabHandle` is a request's store as its calls carry it. Knows nothing about requests or budgets.

Legend: B batch, T tokens, H heads, D head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from cards.chunks import visible_chunks
from cards.errors import UserError

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class SlabSpec:
    """Sizes of one rollout's KV."""

    layers: int
    batch: int
    chunk_tokens: int
    window_chunks: int
    """Most recent chunks that attention sees, the current one among them."""
    sink_chunks: int = 0
    """First chunks of the rollout that attention sees for ever, beyond the window."""
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for name in ("layers", "batch", "chunk_tokens", "window_chunks", "heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"slab KV: got {name}={getattr(self, name)}, expected at least 1")
        if self.sink_chunks < 0:
            raise UserError(f"slab KV: got sink_chunks={self.sink_chunks}, expected 0 or more")

    @property
    def chunk_shape(self) -> tuple[int, int, int, int]:
        """(B, T, H, D) of the keys, or the values, of one chunk in one layer."""
        return (self.batch, self.chunk_tokens, self.heads, self.head_dim)

    @property
    def chunk_bytes(self) -> int:
        """Keys and values of one chunk in one layer."""
        return 2 * self.batch * self.chunk_tokens * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def slab_bytes(self) -> int:
        """The whole window in all layers: what a rollout without gradient holds from its start."""
        return self.layers * (self.sink_chunks + self.window_chunks) * self.chunk_bytes

    def visible(self, chunks: int) -> list[int]:
        """Indices of the chunks that attention sees once ``chunks`` were appended."""
        return visible_chunks(chunks, self.window_chunks, self.sink_chunks)


@dataclass(frozen=True)
class Snapshot:
    """The window as it was, for a forward that is recomputed later, e.g. by activation checkpointing."""

    spec: SlabSpec
    chunks: tuple[tuple[KV, ...], ...]
    """[layer][visible chunk] -> keys and values (B, T, H, D)."""

    def gather(self, layer: int) -> KV:
        """Keys and values (B, T, H, D) that attention saw, oldest first."""
        return _joined(self.spec, self.chunks[layer])


class SlabKV(ABC):
    """See the module's docstring. Layers advance one by one within a forward, so each counts its own chunks."""

    def __init__(self, spec: SlabSpec):
        self.spec = spec
        self.closed = False
        self._chunks = [0] * spec.layers

    def chunks(self, layer: int) -> int:
        """Chunks appended to a layer so far, those outside the window included."""
        return self._chunks[layer]

    def append(self, layer: int, k_BTHD: Tensor, v_BTHD: Tensor) -> int:
        """Adds the next chunk, rolling the window when it is full; gives the chunk's index in the rollout."""
        self._check(k_BTHD, v_BTHD)
        index = self._chunks[layer]
        self._append(layer, index, k_BTHD, v_BTHD)
        self._chunks[layer] += 1
        return index

    def overwrite(self, layer: int, chunk: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        """Replaces a chunk that attention still sees."""
        self._check(k_BTHD, v_BTHD)
        visible = self.spec.visible(self._chunks[layer])
        if chunk not in visible:
            raise UserError(f"slab KV, layer {layer}: got chunk {chunk}, expected one in the window: {visible}")
        self._overwrite(layer, chunk, visible.index(chunk), k_BTHD, v_BTHD)

    def put(self, layer: int, chunk: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        """Appends ``chunk`` where it is the next one, else overwrites it; in the store's dtype."""
        k_BTHD, v_BTHD = k_BTHD.to(self.spec.dtype), v_BTHD.to(self.spec.dtype)
        if chunk == self._chunks[layer]:
            self.append(layer, k_BTHD, v_BTHD)
        else:
            self.overwrite(layer, chunk, k_BTHD, v_BTHD)

    @abstractmethod
    def gather(self, layer: int) -> KV:
        """Keys and values (B, T, H, D) that attention sees, oldest first."""

    def snapshot(self) -> Snapshot:
        """The window now; later writes do not change it."""
        return self._frozen([self.spec.visible(chunks) for chunks in self._chunks])

    def before(self, chunk: int) -> Snapshot:
        """What ``chunk`` sees besides itself, whether it was appended or is the next one; later writes do not change
        it."""
        if chunk not in (self._chunks[0] - 1, self._chunks[0]):
            raise UserError(f"slab KV: got chunk {chunk}, expected the newest of {self._chunks[0]} or the next one")
        return self._frozen([[c for c in self.spec.visible(chunk + 1) if c != chunk]] * self.spec.layers)

    def _frozen(self, seen: Sequence[Sequence[int]]) -> Snapshot:
        """``seen``: [layer] -> chunks."""
        layers = (tuple(self._frozen_chunk(layer, c) for c in chunks) for layer, chunks in enumerate(seen))
        return Snapshot(self.spec, tuple(layers))

    @abstractmethod
    def _frozen_chunk(self, layer: int, chunk: int) -> KV:
        """A chunk in the window, in tensors that later writes do not change."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that the store holds."""

    @abstractmethod
    def _append(self, layer: int, index: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None: ...

    @abstractmethod
    def _overwrite(self, layer: int, chunk: int, slot: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None: ...

    def _check(self, *tensors: Tensor) -> None:
        if self.closed:
            raise UserError("slab KV: got a write to a slab whose namespace was closed; open it again")
        for tensor in tensors:
            if tuple(tensor.shape) != self.spec.chunk_shape or tensor.dtype != self.spec.dtype:
                raise UserError(
                    f"slab KV: got a chunk of {list(tensor.shape)} {tensor.dtype}, "
                    f"expected (B, T, H, D) = {list(self.spec.chunk_shape)} {self.spec.dtype}"
                )


class Slab(SlabKV):
    """In-place store for inference. ``gather`` gives views: read them before the next write."""

    def __init__(self, spec: SlabSpec):
        super().__init__(spec)
        slots = spec.sink_chunks + spec.window_chunks
        shape = (spec.layers, spec.batch, slots * spec.chunk_tokens, spec.heads, spec.head_dim)
        with torch.inference_mode(False):  # a slab that is made within a forward must stay writable after it
            self._k_LBTHD = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
            self._v_LBTHD = torch.zeros_like(self._k_LBTHD)
        self._mark: list[int] | None = None
        """Chunks of each layer at the mark."""
        self._left: list[list[KV]] = [[] for _ in range(spec.layers)]
        """Of each layer, chunks from before the mark that have left the window since."""
        self._moved = [0] * spec.layers
        """Slots by which a layer's window has rolled since the mark."""
        self._rolling = False

    @property
    def bytes(self) -> int:
        return self.spec.slab_bytes

    def gather(self, layer: int) -> KV:
        tokens = len(self.spec.visible(self._chunks[layer])) * self.spec.chunk_tokens
        return self._k_LBTHD[layer, :, :tokens], self._v_LBTHD[layer, :, :tokens]

    def _frozen_chunk(self, layer: int, chunk: int) -> KV:
        slot = self.spec.visible(self._chunks[layer]).index(chunk)
        return self._slot(self._k_LBTHD, layer, slot).clone(), self._slot(self._v_LBTHD, layer, slot).clone()

    def contents(self) -> dict[str, Any]:
        """All that it holds, in host memory."""
        tokens = len(self.spec.visible(max(self._chunks))) * self.spec.chunk_tokens
        k, v = (store[:, :, :tokens].cpu().clone() for store in (self._k_LBTHD, self._v_LBTHD))
        left = [[(k.cpu(), v.cpu()) for k, v in chunks] for chunks in self._left]
        return {"chunks": [*self._chunks], "k": k, "v": v, "mark": self._mark, "left": left, "moved": [*self._moved]}

    def fill(self, contents: dict[str, Any]) -> None:
        """Takes what :meth:`contents` gave, of a slab of this spec."""
        self._chunks, self._mark, self._moved = [*contents["chunks"]], contents["mark"], [*contents["moved"]]
        device = self.spec.device
        self._left = [[(k.to(device), v.to(device)) for k, v in chunks] for chunks in contents["left"]]
        for store, kept in ((self._k_LBTHD, contents["k"]), (self._v_LBTHD, contents["v"])):
            store[:, :, : kept.shape[2]].copy_(kept)

    # -- a mark to go back to

    def mark(self) -> None:
        """From here on :meth:`rollback` may undo what is appended, at the cost of keeping the chunks that leave the
        window. A chunk from before the mark is not to be overwritten."""
        assert self._mark is None
        self._mark = [*self._chunks]

    def commit(self) -> None:
        """What was appended since the mark stays; without a mark, nothing."""
        layers = range(self.spec.layers)
        self._mark, self._left, self._moved = None, [[] for _ in layers], [0 for _ in layers]

    def rollback(self) -> bool:
        """The window as it was at the mark, to the bit; without a mark, nothing. False where it cannot be had again,
        after an interrupt amid a move of chunks."""
        if self._rolling:
            return False
        if self._mark is not None:
            for layer, before in enumerate(self._mark):
                self._unroll(layer, before)
                self._chunks[layer] = before
        self.commit()
        return True

    def _unroll(self, layer: int, before: int) -> None:
        """Moves a layer's chunks back to where they lay when it had ``before`` of them."""
        slots, sinks = self.spec.sink_chunks + self.spec.window_chunks, self.spec.sink_chunks
        moved, left = self._moved[layer], self._left[layer]
        if moved == 0:
            return
        for slot in reversed(range(sinks + len(left), min(before, slots))):
            for store in (self._k_LBTHD, self._v_LBTHD):
                self._slot(store, layer, slot).copy_(self._slot(store, layer, slot - moved))
        for slot, (k_BTHD, v_BTHD) in enumerate(left, start=sinks):
            self._write(layer, slot, k_BTHD, v_BTHD)

    def _keep_oldest(self, layer: int) -> None:
        """Before a roll: the chunk that leaves, where it is from before the mark."""
        sinks, window = self.spec.sink_chunks, self.spec.window_chunks
        if self._mark is not None and self._chunks[layer] - window < self._mark[layer]:
            k, v = (self._slot(store, layer, sinks).clone() for store in (self._k_LBTHD, self._v_LBTHD))
            self._left[layer].append((k, v))

    def _append(self, layer: int, index: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        _refuse_graph(k_BTHD, v_BTHD)
        slots = self.spec.sink_chunks + self.spec.window_chunks
        if index >= slots:
            self._keep_oldest(layer)
            self._rolling = True
            for store in (self._k_LBTHD, self._v_LBTHD):
                for slot in range(self.spec.sink_chunks, slots - 1):
                    self._slot(store, layer, slot).copy_(self._slot(store, layer, slot + 1))
            self._moved[layer] += self._mark is not None
            self._rolling = False
        self._write(layer, min(index, slots - 1), k_BTHD, v_BTHD)

    def _overwrite(self, layer: int, chunk: int, slot: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        _refuse_graph(k_BTHD, v_BTHD)
        self._write(layer, slot, k_BTHD, v_BTHD)

    def _write(self, layer: int, slot: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        self._slot(self._k_LBTHD, layer, slot).copy_(k_BTHD.detach())
        self._slot(self._v_LBTHD, layer, slot).copy_(v_BTHD.detach())

    def _slot(self, store_LBTHD: Tensor, layer: int, slot: int) -> Tensor:
        tokens = self.spec.chunk_tokens
        return store_LBTHD[layer, :, slot * tokens : (slot + 1) * tokens]


class Reserves(Protocol):
    """A bound in bytes."""

    def reserve(self, size_bytes: int, purpose: str) -> None:
        """Takes bytes, or raises."""


class TrainingSlab(SlabKV):
    """Store for rollouts with gradient: every chunk stays, as the tensor it was given."""

    def __init__(self, spec: SlabSpec, budget: Reserves | None = None):
        """``budget``: what each chunk's bytes are taken from; None counts nothing."""
        super().__init__(spec)
        self._budget = budget
        self._kept: list[list[KV]] = [[] for _ in range(spec.layers)]

    @property
    def bytes(self) -> int:
        """Chunks kept; tensors that only a graph still holds, such as overwritten ones, are not counted."""
        return sum(len(kept) for kept in self._kept) * self.spec.chunk_bytes

    def gather(self, layer: int) -> KV:
        return _joined(self.spec, self._window(layer))

    def _frozen_chunk(self, layer: int, chunk: int) -> KV:
        return self._kept[layer][chunk]

    def _window(self, layer: int) -> list[KV]:
        return [self._kept[layer][chunk] for chunk in self.spec.visible(self._chunks[layer])]

    def _append(self, layer: int, index: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        if self._budget is not None:
            self._budget.reserve(self.spec.chunk_bytes, f"slab KV in training, chunk {index} of layer {layer}")
        self._kept[layer].append((k_BTHD, v_BTHD))

    def _overwrite(self, layer: int, chunk: int, slot: int, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        self._kept[layer][chunk] = (k_BTHD, v_BTHD)


@runtime_checkable
class SlabSource(Protocol):
    """Where a request's slab is held; whoever supplies it frees what is left when the request ends."""

    def open_slab(self, spec: SlabSpec) -> Slab:
        """An empty slab of the request."""

    def close_slab(self) -> None:
        """Frees the request's slab."""


class SlabHandle:
    """The store of one rollout as its calls carry it.

    Args:
        source: where the slab is held; None makes one of its own.
        training: keeps every chunk with its graph, in tensors of their own.
    """

    batch_key: ClassVar[None] = None
    """A chunk's forward is merged with no other's."""

    def __init__(self, spec: SlabSpec, source: SlabSource | None = None, *, training: bool = False):
        self._spec = spec
        self._source = source
        self._contents: dict[str, Any] | None = None
        self._store: SlabKV | None = TrainingSlab(spec) if training else self._open()

    @property
    def store(self) -> SlabKV:
        assert self._store is not None, "a slab at rest was used"
        return self._store

    def rest(self) -> None:
        """Moves what it holds to host memory and frees the slab, until :meth:`wake`."""
        assert isinstance(self._store, Slab)
        self._contents, self._store = self._store.contents(), None
        if self._source is not None:
            self._source.close_slab()

    def wake(self) -> None:
        """Inverse of :meth:`rest`."""
        assert self._contents is not None
        slab, contents = self._open(), self._contents
        slab.fill(contents)
        self._store, self._contents = slab, None

    # -- a rollout that goes on later

    @property
    def resting(self) -> bool:
        return self._store is None

    def mark(self) -> None:
        """See :meth:`Slab.mark`."""
        assert isinstance(self._store, Slab)
        self._store.mark()

    def commit(self) -> None:
        """See :meth:`Slab.commit`."""
        assert isinstance(self._store, Slab)
        self._store.commit()

    def rollback(self) -> bool:
        """See :meth:`Slab.rollback`; one at rest is rolled back where it is."""
        if self._store is not None:
            assert isinstance(self._store, Slab)
            return self._store.rollback()
        slab = Slab(replace(self._spec, device="cpu"))
        assert self._contents is not None
        slab.fill(self._contents)
        done, self._contents = slab.rollback(), slab.contents()
        return done

    def contents(self) -> dict[str, Any]:
        """All that it holds, in host memory; at rest too. Not to be written to."""
        if self._store is None:
            assert self._contents is not None
            return self._contents
        assert isinstance(self._store, Slab)
        return self._store.contents()

    @classmethod
    def at_rest(cls, spec: SlabSpec, source: SlabSource | None, contents: dict[str, Any]) -> SlabHandle:
        """One that holds what :meth:`contents` of another gave; no slab is opened until :meth:`wake`."""
        handle = cls.__new__(cls)
        handle._spec, handle._source, handle._contents, handle._store = spec, source, contents, None
        return handle

    def _open(self) -> Slab:
        return Slab(self._spec) if self._source is None else self._source.open_slab(self._spec)

    def __getstate__(self) -> dict[str, Any]:
        """For a saved state, whose slab is its own when it is resumed."""
        contents = self._store.contents() if isinstance(self._store, Slab) else self._contents
        return {"_spec": self._spec, "_source": None, "_contents": contents, "_store": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._contents is None:
            raise TypeError("a slab for training cannot be saved")
        self.wake()


def _joined(spec: SlabSpec, chunks: Sequence[KV]) -> KV:
    if not chunks:
        nothing = torch.zeros(spec.batch, 0, spec.heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
        return nothing, nothing
    return torch.cat([k for k, _ in chunks], dim=1), torch.cat([v for _, v in chunks], dim=1)


def _refuse_graph(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UserError(
            "slab KV: got a chunk with a gradient graph, which an in-place slab would cut; "
            "open the slab with training=True or run under torch.no_grad()"
        )
