"""The nodes of Wan2.1 text to video: encode the prompt (and the negative one when guided), denoise, decode."""

from __future__ import annotations

from cards.program import Node, Program

TEXT_TO_VIDEO = Program(
    nodes=(
        Node(id="encode_prompt", component="text_encoder", op="encode", reads=("prompt",), writes="text"),
        Node(
            id="encode_negative",
            component="text_encoder",
            op="encode",
            reads=("negative_prompt",),
            writes="negative_text",
            when="guided",
        ),
        Node(id="denoise", loop="denoise", reads=("text",), writes="latents"),
        Node(id="decode", component="vae", op="decode", reads=("latents",), writes="video", when="pixels"),
    )
)
