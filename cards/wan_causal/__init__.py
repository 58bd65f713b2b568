"""Wan2.1 made causal: its weights under block-causal attention, a clip chunk by chunk with a slab KV cache.

The state dict and the config are those of diffusers' ``WanTransformer3DModel``, and any Wan2.1 folder is a source
(CausVid, arXiv 2412.07772; Self Forcing, arXiv 2506.08009). Sizes are those of ``cards.wan21``; chunk and window are
options of the card's loop.
"""
