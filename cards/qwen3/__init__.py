"""Qwen3 language models (arXiv 2505.09388): card, component operations and program.

Real modules: transformers ``Qwen3ForCausalLM`` and its tokenizer, from a folder as ``save_pretrained`` writes it, or
from the hub. Sizes: ``0.6b``, ``1.7b``, ``4b``, ``8b``.
"""
