"""A prompt refiner and a generator on one card: a language model rewrites an instruction, Wan2.1 makes the video of it.

Real modules: transformers ``Qwen3ForCausalLM`` before those of :mod:`cards.wan21`; both are trained, each by itself.
Sizes: ``tiny`` (a bundled refiner that ``scripts/pretrain/refiner.py`` trained, before the bundled Wan), ``1.3b``,
``14b``.
"""
