"""Skeleton: a module without its parameters' values, to be built in another process and filled there.

Carries the module's own structure (LoRA layers too), its buffers, and how the parameters lie in memory: the one that is
built has the same strides and addresses modulo ``storage.ALIGNMENT``, so that it computes the same bits.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cards.errors import UserError
from inference.storage import Block, Place, allocate, layout


@dataclass(frozen=True)
class _Spot:
    """Where a parameter lies."""

    parameter: int
    """In the order of ``module.parameters()``."""
    block: int
    offset: int
    """Bytes from the block's first."""
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """See the module's docstring."""

    pickled: bytes
    blocks: tuple[tuple[int, int], ...]
    """(bytes, address modulo ``storage.ALIGNMENT``)."""
    spots: tuple[_Spot, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Skeleton:
        """Raises ``UserError`` for a module that is sharded or cannot be pickled."""
        parameters = list(module.parameters())
        if any(hasattr(parameter, "to_local") for parameter in parameters):
            raise UserError("got a sharded module; expected whole weights: take its skeleton before it is sharded")
        blocks, places = layout(parameters)
        memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in parameters}
        try:
            pickled = pickle.dumps(copy.deepcopy(module, memo), protocol=5)
        except (pickle.PicklingError, AttributeError, TypeError) as failure:
            raise UserError(f"{type(module).__name__} cannot be sent to another process: {failure}") from None
        number = {id(p): i for i, p in enumerate(parameters)}
        spots = tuple(_Spot(number[id(p.tensor)], p.block, p.offset, tuple(p.size), p.stride) for p in places)
        return cls(pickled, tuple((block.size, block.residue) for block in blocks), spots)

    def build(self, device: torch.device | str) -> nn.Module:
        """The module with memory for its parameters, whose values are not there yet."""
        module = pickle.loads(self.pickled)
        parameters = list(module.parameters())
        blocks = [allocate(size, residue, torch.device(device)) for size, residue in self.blocks]
        real = {id(p): _empty(p, device) for p in parameters if not p.numel()}
        for spot in self.spots:
            old = parameters[spot.parameter]
            real[id(old)] = nn.Parameter(_view(old, spot, blocks[spot.block]), old.requires_grad)
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[name] = real[id(parameter)]
        return module.to(device)


def _empty(parameter: Tensor, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)


def _view(parameter: Tensor, spot: _Spot, block: Block) -> Tensor:
    return Place(parameter, spot.block, spot.offset, torch.Size(spot.size), spot.stride).view(block)
