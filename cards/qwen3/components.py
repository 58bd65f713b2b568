"""What Qwen3's components compute: prompt to token ids, a forward that gives the next token's logits, and one
that gives the log-probs of a whole text.

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


def tokenize(
    tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], context: int, **template: Any
) -> dict[str, Tensor]:
    """``ids`` (1, L) of plain text, or of chat messages (``role``, ``content``) by the tokenizer's own chat template,
    which reads ``template``.

    Raises ``UserError`` for more than ``context`` tokens, a template that is missing or one that refuses the messages.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt).input_ids
    elif tokenizer.chat_template is None:
        raise UserError("got chat messages, but the tokenizer of this model has no chat template: give a plain prompt")
    else:
        try:
            ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False, **template)
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


def token_log_probs(lm: Any, tensors: Tensors, static: Mapping[str, Any]) -> Tensor:
    """(B, L) float64: log p of each of ``ids`` (B, L) after those before it in its row, at ``static["temperature"]``.

    ``mask`` (B, L) is 1 for tokens and 0 for padding, which may be on either side; padding and a row's first token
    count 0. One forward over whole rows, without a cache: what training recomputes.
    """
    ids_BL, mask_BL = tensors["ids"], tensors["mask"]
    positions_BL = (mask_BL.long().cumsum(1) - 1).clamp(min=0)
    logits_BLV = lm(input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, use_cache=False).logits
    log_p_BLV = torch.log_softmax(logits_BLV[:, :-1].double() / static["temperature"], dim=-1)
    log_p_BL = log_p_BLV.gather(2, ids_BL[:, 1:, None])[..., 0]
    follows_BL = mask_BL[:, 1:].bool() & mask_BL[:, :-1].bool()
    return torch.nn.functional.pad(log_p_BL.masked_fill(~follows_BL, 0.0), (1, 0))


OPERATIONS: dict[tuple[str, str], Callable[[Any, Tensors, Mapping[str, Any]], Tensor]] = {
    ("causal_lm", "next_logits"): next_logits,
    ("causal_lm", "token_log_probs"): token_log_probs,
}

PREPARE: dict[str, Callable[..., dict[str, Tensor]]] = {"tokenize": tokenize}
