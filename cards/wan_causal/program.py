"""The nodes of causal text to video: encode the prompt, then chunks that are denoised and decoded in turn.

There is no negative prompt, since the rollout is unguided, and no decode node: the loop gives the video with the
latents.
"""

from __future__ import annotations

from cards.program import Node, Program

TEXT_TO_VIDEO = Program(
    nodes=(
        Node(id="encode_prompt", component="text_encoder", op="encode", reads=("prompt",), writes="text"),
        Node(id="denoise", loop="denoise", reads=("text",), writes="latents"),
    )
)
