"""Worst-case activations of Qwen3's forward, in bytes, from a module's config and the size of its input.

Counts what lives at once at the widest point of a forward without gradient, in float32. Fitted to counted allocations
of small configs (``tests/cards/test_memory.py``); scratch memory inside a kernel is not part of it. The keys and values
that outlive the forward are not either: they are a pool's, or what a request holds (:func:`held_bytes`).

Legend: d width, f width of the MLP, q width of all query heads, k of all key heads, n new tokens, t all of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cards.memory import ForwardSize

FLOAT_BYTES = 4
GATHERED = 16
"""Tokens of a page: a past is read in whole pages."""


def next_logits_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The forward over new tokens, of which the last one's logits are kept.

    Rows with a past are counted as a batch of unequal lengths has them: with a mask, and where several tokens are new
    with keys and values repeated for every query head.
    """
    d, f, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, k = heads * head, key_heads * head
    n, past = size.text_tokens, size.past_tokens
    t = n + past
    attention = n * (2 * d + 4 * q + 2 * k) + 2 * k * (t + past + GATHERED)
    mask = 0
    if past:
        mask = n * t // 4
        attention += 5 * n * t // 4
        if n > 1 and 1 < key_heads < heads:
            attention += 2 * q * t
    block = max(attention, n * (5 * d + 3 * f)) + mask
    logits = n * 4 * d + config["vocab_size"]
    return FLOAT_BYTES * size.rows * (max(block, logits) + n * (2 * head + 2))


def token_log_probs_bytes(config: Mapping[str, Any], size: ForwardSize) -> int:
    """The forward over whole rows with the logits of every token, which are softened in float64."""
    vocabulary = size.rows * size.text_tokens * config["vocab_size"]
    return next_logits_bytes(config, size) + FLOAT_BYTES * 6 * vocabulary


def held_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """Keys and values of so many tokens in every layer, in float32."""
    width = config["num_key_value_heads"] * config["head_dim"]
    return FLOAT_BYTES * 2 * config["num_hidden_layers"] * width * tokens


PEAK_BYTES: dict[tuple[str, str], Callable[[Mapping[str, Any], ForwardSize], int]] = {
    ("causal_lm", "next_logits"): next_logits_bytes,
}
"""(component kind, operation) -> bytes, of what a text is made with."""

HELD_BYTES: dict[str, Callable[[Mapping[str, Any], int], int]] = {"causal_lm": held_bytes}
"""Component kind -> bytes that a request of so many tokens holds from step to step, where no pool holds them."""
