"""PickScore: which picture would people pick for this prompt, by a CLIP-H trained on their choices.

Knows the scale; ``clip_base`` does the work.
"""

from __future__ import annotations

from methods.rewards.clip_base import ClipReward


class PickScore(ClipReward):
    """exp(logit_scale) cos(image, text) / 26 with a fine-tuned CLIP-H (arXiv 2305.01569, eq. 2).

    26 is about the largest raw score, as in Flow-GRPO's and DiffusionNFT's experiments."""

    name = "pick_score"
    divisor = 26.0
