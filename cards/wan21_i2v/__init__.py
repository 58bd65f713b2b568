"""Wan2.1 image to video (arXiv 2503.20314): as ``cards.wan21``, from a first frame.

Real modules: those of Wan2.1 text to video and a transformers ``CLIPVisionModel``. Sizes: ``14b`` (480p weights) by
folder or hub id, and any plain diffusers folder of a ``WanImageToVideoPipeline``; none is bundled.
"""
