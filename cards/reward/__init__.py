"""Image-text scorers (CLIP, arXiv 2103.00020): card, component operations and program.

Real modules: transformers ``CLIPModel`` and its ``CLIPProcessor``, from a folder as ``save_pretrained`` writes it, or
from the hub. Sizes: ``tiny`` (bundled, trained on ShapeWorld), ``clip-l14``, ``clip-b32``.
"""
