"""The nodes of refined text to video: the instruction is rewritten, then what :mod:`cards.wan21` does with a prompt.

The rewritten prompt takes the place of the request's for the nodes after it; a request that asks for no refinement
leaves the first node out.
"""

from __future__ import annotations

from cards.program import Node, Program
from cards.wan21.program import TEXT_TO_VIDEO

REFINE = "refine"
"""Id of the node and of its loop."""


def refined(program: Program = TEXT_TO_VIDEO) -> Program:
    """``program`` behind the refinement of its prompt."""
    node = Node(id=REFINE, loop=REFINE, reads=("prompt",), writes="prompt", when="refined")
    return program.model_copy(update={"nodes": (node, *program.nodes)})
