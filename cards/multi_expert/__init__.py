"""Several experts in a chain before a generator: language models that rewrite an instruction one after the other, each
for one attribute, and Wan2.1, which makes the video of what the last one says.

Modules and operations are those of :mod:`cards.unified`, which is the chain of one. Sizes: ``tiny`` (experts that all
begin as one bundled model, which ``scripts/pretrain/experts.py`` trained), ``1.3b``, ``14b``.
"""
