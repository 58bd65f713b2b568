"""Loop kind -> loop. Every miss lists the valid names."""

from __future__ import annotations

from cards.errors import unknown_name
from cards.program import Node
from loops.ar_decode import ARDecodeLoop
from loops.component import ComponentLoop
from loops.denoise import DenoiseLoop
from loops.loop import Loop

LOOPS: dict[str, Loop] = {"ar_decode": ARDecodeLoop(), "diffusion_denoise": DenoiseLoop()}


def loop_of_kind(kind: str) -> Loop:
    """The loop that a card names; raises ``UserError`` with the list of kinds."""
    if kind not in LOOPS:
        raise unknown_name("loop kind", kind, LOOPS)
    return LOOPS[kind]


def component_loop(node: Node) -> Loop:
    """The one-step loop of a component node."""
    return ComponentLoop(node)
