"""Regional torch.compile of a component, and CUDA graphs on top of it.

A diffusers model names its repeated blocks; one of them is compiled and the code serves all, so the first request
waits for one block and not for the model. torch keys what it compiled by shape, and a sync writes new weights into the
memory that the graphs read, so neither needs to be told. Compiled results differ in the last bits from the library's:
a component that is compiled has entries of its own in the caches, and C1 holds within its tolerance only.
"""

from __future__ import annotations

from torch import nn

from cards.errors import UserError
from inference.instance import ModelInstance
from inference.sleep import state_of


def compile_component(instance: ModelInstance, component: str, *, cuda_graphs: bool = False) -> None:
    """Compiles a component in place, for all who share its module; a second time is no harm.

    Args:
        cuda_graphs: captures every shape's kernels as one graph, for small batches that the CPU cannot feed. Results
            are copied out, since the next replay writes over them.

    Raises ``UserError`` for CUDA graphs on another device, and for a component that was compiled the other way.
    """
    resident = instance.resident(component)
    wanted = "graphs" if cuda_graphs else "regional"
    device = instance.device_of(component)
    if cuda_graphs and device.type != "cuda":
        raise UserError(f"cuda_graphs: got device {str(device)!r}, expected cuda; leave cuda_graphs out")
    if resident.compiled == wanted:
        return
    if resident.compiled:
        raise UserError(f"{component!r} was compiled as {resident.compiled!r}, expected {wanted!r}; load it again")
    for region in _regions(resident.module):
        region.compile(mode="reduce-overhead" if cuda_graphs else None)
    for sharer in state_of(resident.peek()).residents:
        sharer.compiled = wanted


def _regions(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks that a diffusers model names, else the module whole."""
    names = getattr(module, "_repeated_blocks", None)
    blocks = [m for m in module.modules() if names and type(m).__name__ in names]
    return blocks if blocks else [module]
