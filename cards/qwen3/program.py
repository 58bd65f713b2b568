"""The nodes of text generation: the loop tokenizes, decodes and gives the completion."""

from __future__ import annotations

from cards.program import Node, Program

TEXT = Program(nodes=(Node(id="decode", loop="decode", reads=("prompt",), writes="completion"),))
