"""Randomness as a pure function of (seed, what for, where in the run).

Nothing in training draws from a generator that lives on: each draw has its own address, so a resumed run needs no
generator state and one process draws what two would.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def address_seed(*address: int | str) -> int:
    """63-bit seed of an address such as ``(seed, "noise", step, row)``."""
    digest = hashlib.sha256("/".join(map(str, address)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator_at(*address: int | str) -> torch.Generator:
    """A CPU generator seeded by the address."""
    return torch.Generator("cpu").manual_seed(address_seed(*address))


def noise_like(x: Tensor, *address: int | str) -> Tensor:
    """Standard normal noise shaped as ``x``, drawn on the CPU in float32."""
    return torch.randn(x.shape, generator=generator_at(*address)).to(x.device)
