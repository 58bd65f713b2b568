"""The nodes of Wan2.1 image to video: those of text to video, and two that encode the first frame.

``condition`` (1, 4 + C, T, H, W): which latent frames are given, and the latents of the frame followed by grey ones.
``image_embeds`` (1, N, D): what the image encoder sees in it.
"""

from __future__ import annotations

from cards.program import Input, Node, Program

IMAGE = "image"
IMAGE_TO_VIDEO = Program(
    inputs=(Input(name=IMAGE, dtype="uint8", shape=("height", "width", 3), low=0, high=255),),
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
        Node(id="encode_image", component="image_encoder", op="encode_image", reads=(IMAGE,), writes="image_embeds"),
        Node(id="encode_condition", component="vae", op="encode_condition", reads=(IMAGE,), writes="condition"),
        Node(id="denoise", loop="denoise", reads=("text", "condition", "image_embeds"), writes="latents"),
        Node(id="decode", component="vae", op="decode", reads=("latents",), writes="video", when="pixels"),
    ),
)
