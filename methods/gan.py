"""A discriminator on a critic's features, for DMD2 (arXiv 2405.14867, Sec. 4.3): small, beside a model that is there.

Knows a diffusers transformer by its ``blocks`` alone.

Legend: B rows, S tokens, D width of the transformer, H width of the head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cards.errors import UserError

WIDTH = 64


class Discriminator(nn.Module):
    """Logit of a row: a two-layer network on each token, averaged. Positive says real.

    Args:
        width: of the tokens.
    """

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    @classmethod
    def for_model(cls, module: nn.Module) -> Discriminator:
        """A head for the module's features, on its device; the same first weights in every run and on every rank."""
        width = last_block(module).ffn.net[-1].out_features  # type: ignore[union-attr, index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = cls(width)
        return head.to(next(module.parameters()).device)

    def forward(self, tokens_BSD: Tensor) -> Tensor:
        return self.net(tokens_BSD.float()).mean(dim=(1, 2))


def last_block(module: nn.Module) -> nn.Module:
    """The block whose output is the features; raises ``UserError`` for a model without ``blocks``."""
    blocks = getattr(module, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise UserError(
            f"method gan: {type(module).__name__} has no list of blocks to read features from; use gan=null"
        )
    return blocks[-1]


@contextlib.contextmanager
def features_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Keeps the output (B, S, D) of the last block of every forward within."""
    kept: list[Tensor] = []

    def keep(_block: nn.Module, _inputs: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = last_block(module).register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()
