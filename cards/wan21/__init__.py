"""Wan2.1 text to video (arXiv 2503.20314): card, component operations and program.

Real modules: diffusers ``WanTransformer3DModel`` and ``AutoencoderKLWan``, transformers ``UMT5EncoderModel``.
Sizes: ``tiny`` (bundled weights in ``weights/tiny``, trained by ``scripts/pretrain``), ``1.3b``, ``14b``.
"""
