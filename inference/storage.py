"""Memory behind a module's tensors: how much it is, and copies of it that compute the same bits.

A kernel may round differently with where a tensor begins (weights mapped from a file begin at any multiple of eight
bytes), so a copy begins at the same address modulo ``ALIGNMENT`` and keeps the strides. Tensors that overlap in memory
still do in a copy. Knows modules as sets of tensors only.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes; the widest vector of a CPU and more than any kernel of a GPU looks at."""


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list({id(t): t for t in itertools.chain(module.parameters(), module.buffers())}.values())


@dataclass(frozen=True)
class Block:
    """Bytes of one storage that one or more tensors lie in."""

    storage: torch.UntypedStorage
    begin: int
    end: int
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin

    @property
    def residue(self) -> int:
        """Address of the first byte modulo ``ALIGNMENT``."""
        return (self.storage.data_ptr() + self.begin) % ALIGNMENT

    def data(self) -> Tensor:
        """uint8 (size,): a view."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        return whole.set_(self.storage, self.begin, (self.size,), (1,))


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its block."""

    tensor: Tensor
    block: int
    offset: int
    """Bytes from the block's first."""
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, block: Block) -> Tensor:
        """A tensor like it over another block of the same size."""
        offset = (block.begin + self.offset) // self.tensor.element_size()
        tensor = torch.empty(0, dtype=self.tensor.dtype, device=block.device)
        return tensor.set_(block.storage, offset, self.size, self.stride)


def layout(tensors: Sequence[Tensor]) -> tuple[list[Block], list[Place]]:
    """Blocks that cover the tensors, one for those that overlap, and where each lies; empty tensors have no place."""
    blocks: list[Block] = []
    places: list[Place] = []
    spans = [(t.untyped_storage().data_ptr(), *_span(t), t) for t in tensors if t.numel()]
    for pointer, begin, end, tensor in sorted(spans, key=lambda span: span[:3]):
        last = blocks[-1] if blocks else None
        if last is not None and last.storage.data_ptr() == pointer and begin < last.end:
            blocks[-1] = Block(last.storage, last.begin, max(last.end, end), last.device)
        else:
            blocks.append(Block(tensor.untyped_storage(), begin, end, tensor.device))
        places.append(Place(tensor, len(blocks) - 1, begin - blocks[-1].begin, tensor.shape, tensor.stride()))
    return blocks, places


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and past-the-last byte of a tensor in its storage."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin, item = int(tensor.storage_offset()), tensor.element_size()
    return begin * item, (begin + last + 1) * item


def allocate(size: int, residue: int, device: torch.device) -> Block:
    """A block of new memory that begins at an address of this residue."""
    storage = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device).untyped_storage()
    begin = (residue - storage.data_ptr()) % ALIGNMENT
    return Block(storage, begin, begin + size, device)


def resident_bytes(module: nn.Module) -> int:
    """Bytes of memory that the module's parameters and buffers hold now."""
    return sum(block.size for block in layout(own_tensors(module))[0])


def planned_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that a module without storage will hold once it is loaded in ``dtype``, at most: with the parameters that
    its class keeps in float32, which transformers heeds for float16 alone unless they are ``strict``."""
    kept = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16 or not hasattr(module, "_keep_in_fp32_modules_strict"):
        kept |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    parameters = sum(
        tensor.numel() * (torch.float32 if kept & set(name.split(".")) else dtype).itemsize
        for name, tensor in module.named_parameters()
        if name not in tied
    )
    return parameters + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


@torch.no_grad()
def duplicate(module: nn.Module) -> nn.Module:
    """A copy with memory of its own, which computes the same bits."""
    blocks, places = layout(own_tensors(module))
    copies = []
    for block in blocks:
        new = allocate(block.size, block.residue, block.device)
        new.data().copy_(block.data())
        copies.append(new)
    memo: dict[int, object] = {}
    for place in places:
        tensor = place.view(copies[place.block])
        if isinstance(place.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=place.tensor.requires_grad)
        memo[id(place.tensor)] = tensor
    return copy.deepcopy(module, memo)
