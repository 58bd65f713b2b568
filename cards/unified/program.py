"""The nodes of refined text to video: the instruction is rewritten, then what :mod:`cards.wan21` does with a prompt.

The rewritten prompt takes the place of the request's for the nodes after it; a request that asks for no refinement
leaves the first node out.
"""

from __future__ import annotations

from collections.abc import Sequence

from cards.program import Node, Program
from cards.wan21.program import TEXT_TO_VIDEO

REFINE = "refine"
"""Id of the node and of its loop."""


def refined(program: Program = TEXT_TO_VIDEO, refinements: Sequence[str] = (REFINE,)) -> Program:
    """``program`` behind the refinements of its prompt, one after the other."""
    nodes = (Node(id=name, loop=name, reads=("prompt",), writes="prompt", when="refined") for name in refinements)
    return program.model_copy(update={"nodes": (*nodes, *program.nodes)})
