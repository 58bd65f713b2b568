"""CLIPScore: does the picture show what the prompt says, by CLIP ViT-L/14.

Knows the model and its scale; ``clip_base`` does the work.
"""

from __future__ import annotations

from methods.rewards.clip_base import ClipReward


class CLIPScore(ClipReward):
    """exp(logit_scale) cos(image, text) / 100 with CLIP ViT-L/14 (arXiv 2103.00020; as a metric arXiv 2104.08718).

    The logit scale of the released model is 100, so this is its plain cosine."""

    name = "clip_score"
    divisor = 100.0
