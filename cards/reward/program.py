"""The nodes of scoring: the prompt is encoded once, then the frames are compared with it, some in each forward."""

from __future__ import annotations

from cards.program import Input, Node, Program

PIXELS = Input(name="pixels", dtype="uint8", shape=("frames", "height", "width", 3), low=0, high=255)
"""A clip, or a picture as a clip of one frame, RGB."""

SCORE = Program(
    inputs=(PIXELS,),
    nodes=(
        Node(id="encode", component="clip", op="encode", reads=("prompt",), writes="text"),
        Node(id="score", loop="score", reads=("text", "pixels"), writes="score"),
    ),
)
