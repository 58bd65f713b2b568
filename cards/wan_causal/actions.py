"""Actions: a learned vector for each, which is added to a chunk's timestep embedding.

That embedding modulates every block and the output (AdaLN, Peebles and Xie 2023, arXiv 2212.09748) and exists once a
chunk already, so an action costs a vector a chunk, whatever the tokens, and takes the same way through the cached, the
block-causal and the teacher-forced forward. New vectors are zero and change nothing.

Legend: B batch, J chunks, N width.
"""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


class ActionEmbedding(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Action ids (B, J) -> vectors (B, J, N). In diffusers' layout, beside a pipeline's folders and no part of it."""

    @register_to_config
    def __init__(self, num_actions: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(num_actions, width, _weight=torch.zeros(num_actions, width))

    def forward(self, ids_BJ: Tensor) -> Tensor:
        return self.embedding(ids_BJ)
