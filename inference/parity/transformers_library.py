"""The other side of the ladder for transformers models: the library's own generation and forward on a card's folder.

Shares no code with our loops: only the folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cards.card import ModelCard
from cards.source import resolve_folder


class GenerateLibrary:
    """``AutoModelForCausalLM`` with its tokenizer and ``generate``, in the card's dtype."""

    def __init__(self, card: ModelCard, device: torch.device, folder: Path | None = None):
        """``folder``: of the model, where it is not the card's."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = resolve_folder(card.source, card.root) if folder is None else folder
        dtype = next(getattr(torch, c.dtype) for c in card.components.values() if c.kind == "causal_lm")
        self.device = device
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tokens(self, prompt: str) -> Tensor:
        """Ids (1, L) of a plain prompt."""
        return self.tokenizer(prompt, return_tensors="pt").input_ids

    @torch.no_grad()
    def next_logits(self, ids_1L: Tensor) -> Tensor:
        """Logits (1, V) of the next token, as ``generate`` asks the model for its first one."""
        return self.model(input_ids=ids_1L.to(self.device), use_cache=True, logits_to_keep=1).logits[:, -1]

    def greedy(self, ids_1L: Tensor, max_tokens: int) -> tuple[list[int], Tensor]:
        """Tokens of ``generate(do_sample=False)`` and the log-prob (N,) float64 of each, by its own logits."""
        out = self.model.generate(
            input_ids=ids_1L.to(self.device),
            attention_mask=torch.ones_like(ids_1L, device=self.device),
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        chosen = out.sequences[0, ids_1L.shape[1] :].tolist()
        rows = zip(out.logits, chosen, strict=True)
        return chosen, torch.stack([torch.log_softmax(logits[0].double(), -1)[token].cpu() for logits, token in rows])

    def forced(self, prompt_1L: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Log-probs (N,) float64 of tokens after a prompt, from one forward over the whole text with gradient."""
        ids_1L = torch.cat([prompt_1L, torch.tensor([list(token_ids)])], 1).to(self.device)
        logits_NV = self.model(input_ids=ids_1L, use_cache=False).logits[0, prompt_1L.shape[1] - 1 : -1]
        rows = torch.arange(len(token_ids))
        return torch.log_softmax(logits_NV.detach().double(), -1).cpu()[rows, list(token_ids)]


class ClipLibrary:
    """``CLIPModel`` and ``CLIPProcessor``, in the card's dtype."""

    def __init__(self, card: ModelCard, device: torch.device):
        from transformers import CLIPModel, CLIPProcessor

        folder = resolve_folder(card.source, card.root)
        dtype = next(getattr(torch, c.dtype) for c in card.components.values() if c.kind == "scorer")
        self.device = device
        self.length = card.sampling.max_sequence_length
        self.model: Any = CLIPModel.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.processor: Any = CLIPProcessor.from_pretrained(folder)

    def inputs(self, prompt: str, frames_FHWC: Tensor) -> dict[str, Tensor]:
        """What the processor makes of a prompt and uint8 frames."""
        return self.processor(
            text=[prompt],
            images=list(frames_FHWC.numpy()),
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=self.length,
        )

    @torch.no_grad()
    def forward(self, prompt: str, frames_FHWC: Tensor) -> Any:
        """``CLIPOutput``: ``logits_per_image`` (F, 1), ``text_embeds`` (1, D), ``image_embeds`` (F, D)."""
        inputs = {name: t.to(self.device) for name, t in self.inputs(prompt, frames_FHWC).items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        return self.model(**inputs)
