"""HPSv2: which picture would people pick for this prompt, by a CLIP-H trained on their rankings.

Knows that its score is a cosine; ``clip_base`` does the work.
"""

from __future__ import annotations

from methods.rewards.clip_base import ClipReward


class HPSScore(ClipReward):
    """cos(image, text) with a fine-tuned CLIP-H, about 0.2 to 0.35 (arXiv 2306.09341; v2.1 has newer weights)."""

    name = "hps_score"
    divisor = None
