"""What Qwen3's components compute: prompt to token ids, and one forward that gives the next token's logits.

The forward is called as transformers' ``generate`` calls it, so the logits of one request are those of the library bit
for bit. Nothing here knows of requests, sampling or batching.

Legend: B batch, L new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cards.errors import UserError

Tensors = Mapping[str, Tensor]


# -- prepare: slots -> tensors of a call


def tokenize(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], context: int) -> dict[str, Tensor]:
    """``ids`` (1, L) of plain text, or of chat messages (``role``, ``content``) by the tokenizer's own chat template.

    Raises ``UserError`` for more than ``context`` tokens, a template that is missing or one that refuses the messages.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    elif tokenizer.chat_template is None:
        raise UserError("got chat messages, but the tokenizer of this model has no chat template: give a plain prompt")
    else:
        try:
            ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template raises what it likes
            raise UserError(f"the chat template of this model does not take the messages: {error}") from error
    if len(ids) > context:
        raise UserError(f"got a prompt of {len(ids)} tokens, the model's context holds {context}: shorten the prompt")
    return {"ids": torch.tensor([ids], dtype=torch.long)}


# -- operations


def next_logits(lm: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """(B, V) logits after ``ids`` (B, L), which follow the tokens of the handle ``state``; appends them to it.

    A tuple of handles, of any lengths, is one a row; a forward over several that fails leaves all as they were.
    """
    from transformers import DynamicCache

    kv = static["state"]
    if isinstance(kv, tuple):
        cache = kv[0].together(kv)
        try:
            return lm(**cache.inputs(tensors["ids"].tolist()), logits_to_keep=1).logits[:, -1]
        except Exception:
            cache.rollback()
            raise
    if kv.cache is None:
        kv.cache = DynamicCache(config=lm.config)
    return lm(input_ids=tensors["ids"], cache=kv.cache, use_cache=True, logits_to_keep=1).logits[:, -1]


OPERATIONS: dict[tuple[str, str], Callable[[Any, Tensors, Mapping[str, Any]], Tensor]] = {
    ("causal_lm", "next_logits"): next_logits,
}

PREPARE: dict[str, Callable[..., dict[str, Tensor]]] = {"tokenize": tokenize}
