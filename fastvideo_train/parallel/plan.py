"""Plans: ``single``, ``ddp`` (replicas) and ``fsdp2`` (sharded by ``fully_shard``). A plan, not a rewrite.

The module, its roles and its rollouts are the same under every plan; a plan picks Lightning's strategy and shards the
roles' modules in ``configure_model``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cards.card import ModelCard
from cards.errors import unknown_name


class Plan(ABC):
    """How a run uses its devices.

    Args:
        activation_checkpointing: recompute each block's activations in the backward.
    """

    name: str

    def __init__(self, *, activation_checkpointing: bool = False):
        self.activation_checkpointing = activation_checkpointing

    @abstractmethod
    def strategy(self, devices: int, *, optimizers: int = 1) -> Any:
        """Lightning's strategy, for a module of so many optimizers: with several, a backward reaches the parameters of
        one alone."""

    def shard(self, module: nn.Module, mesh: DeviceMesh | None) -> None:  # noqa: B027 - replicas have nothing to shard
        """Shards a role's module in place; the default leaves it whole."""

    def problems(self, card: ModelCard, devices: int) -> list[str]:
        """What makes the plan unfit, before weights load."""
        found = []
        if self.name not in card.parallelism:
            found.append(f"parallel: card {card.name!r} allows {', '.join(card.parallelism)}, got {self.name!r}")
        if devices < 1:
            found.append(f"devices: got {devices}, expected at least 1")
        return found


class Single(Plan):
    name = "single"

    def strategy(self, devices: int, *, optimizers: int = 1) -> Any:
        return "auto"

    def problems(self, card: ModelCard, devices: int) -> list[str]:
        found = super().problems(card, devices)
        if devices > 1:
            found.append(f"parallel=single runs on 1 device, got devices={devices}; use parallel=ddp or parallel=fsdp2")
        return found


class DDP(Plan):
    name = "ddp"

    def strategy(self, devices: int, *, optimizers: int = 1) -> Any:
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(
            process_group_backend=None, gradient_as_bucket_view=True, find_unused_parameters=optimizers > 1
        )


class FSDP2(Plan):
    """Each transformer block and then the rest is sharded over all devices."""

    name = "fsdp2"

    def strategy(self, devices: int, *, optimizers: int = 1) -> Any:
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(
            data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        )

    def shard(self, module: nn.Module, mesh: DeviceMesh | None) -> None:
        from torch.distributed.fsdp import fully_shard

        assert mesh is not None
        # Also the root gives its whole weights back after a forward: roles are blended and saved shard by shard.
        for part in (*blocks(module), module):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)


PLANS: dict[str, type[Plan]] = {"single": Single, "ddp": DDP, "fsdp2": FSDP2}


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a diffusers transformer: its largest ModuleList."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()), default=nn.ModuleList())
    return list(largest)


def make_plan(name: str, **options: Any) -> Plan:
    """The plan called ``name``; raises ``UserError`` with the list of names."""
    if name not in PLANS:
        raise unknown_name("parallel plan", name, PLANS)
    return PLANS[name](**options)
