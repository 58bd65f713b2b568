"""An auxiliary task for the text encoder: which place does each object's word have in the scene?

Real text encoders were trained on language before a generator meets them; the tiny one learns from denoising alone,
and that tells it next to nothing about "the red circle is left of the blue square": swapping the two objects moved the
words' embeddings by 2 %. A linear head on the embeddings, thrown away afterwards, asks of every object's words whether
the object is left, right, above or below the other, or alone.

Legend: B captions, L tokens, D text width.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from methods.shapeworld.scene import RELATIONS, Scene, parse

ALONE = len(RELATIONS)
CLASSES = len(RELATIONS) + 1
IGNORED = -100
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@cache
def places(caption: str) -> tuple[tuple[str, int], ...]:
    """(colour, class) of each object that a caption names; colours tell the objects of a scene apart."""
    if not caption:
        return ()
    scene: Scene = parse(caption)
    if scene.relation is None:
        return tuple((thing.colour, ALONE) for thing in scene.things)
    first, second = scene.things
    relation = str(scene.relation)
    return (
        (first.colour, RELATIONS.index(relation)),
        (second.colour, RELATIONS.index(OPPOSITE[relation])),
    )


def place_labels(tokenizer: PreTrainedTokenizerBase, captions: list[str], ids_BL: Tensor) -> Tensor:
    """Classes (B, L) of the tokens of each object's colour and of its shape, the word behind it; IGNORED elsewhere."""
    labels_BL = torch.full_like(ids_BL, IGNORED)
    for row, caption in enumerate(captions):
        for colour, label in places(caption):
            hits = (ids_BL[row] == tokenizer.convert_tokens_to_ids("▁" + colour)).nonzero()
            for hit in hits.flatten().tolist():
                labels_BL[row, hit : hit + 2] = label
    return labels_BL


class PlaceHead(nn.Linear):
    """Linear read-out of places from token embeddings."""

    def __init__(self, width: int):
        super().__init__(width, CLASSES)

    def loss(self, hidden_BLD: Tensor, labels_BL: Tensor) -> Tensor:
        """Mean cross-entropy over the labelled tokens; 0 when there are none."""
        if not bool((labels_BL != IGNORED).any()):
            return hidden_BLD.sum() * 0.0
        return nn.functional.cross_entropy(self(hidden_BLD).flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED)
