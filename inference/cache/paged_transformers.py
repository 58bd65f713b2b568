"""Paged entries as the ``cache`` (``past_key_values``) of a transformers causal LM with full attention.

A batch of entries of different lengths is LEFT-padded: pasts end at one column and the new tokens follow, so the last
column of the logits belongs to each row's last token. New tokens may differ in number too; they are left-padded among
themselves, so a row can have padding before its past and again between its past and its new tokens. The attention mask
of :meth:`PagedCache.inputs` hides both and its position ids count real tokens alone; padding is never stored.

One entry alone needs no padding and hands the model the same contiguous tensors as transformers' ``DynamicCache``.

Legend: B rows, K key-value heads, T columns, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from cards.errors import UserError
from inference.cache.paged import PagedEntry, PagedPool, PagedSpec


def paged_spec(
    config: PreTrainedConfig,
    *,
    blocks: int,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PagedSpec:
    """The pool's sizes for a causal LM; raises ``UserError`` for attention that is not full."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise UserError(f"paged KV: got layers of {', '.join(sorted(set(kinds)))}, expected full_attention alone")
    heads = getattr(text, "num_key_value_heads", None)
    width = getattr(text, "head_dim", None)
    return PagedSpec(
        layers=text.num_hidden_layers,
        blocks=blocks,
        block_tokens=block_tokens,
        kv_heads=text.num_attention_heads if heads is None else heads,
        head_dim=text.hidden_size // text.num_attention_heads if width is None else width,
        dtype=dtype,
        device=device,
    )


class PagedCache(Cache):
    """A view of entries, one a row; the pool owns everything. Make one for each set of rows."""

    def __init__(self, pool: PagedPool, entries: Sequence[PagedEntry]):
        if not entries:
            raise UserError("paged KV: got a batch of no entries, expected one or more")
        self.pool = pool
        self.entries = tuple(entries)
        self.new_tokens: tuple[int, ...] | None = None
        """Tokens of each row in the next forward; None when no row is padded."""
        super().__init__(layers=[_PagedLayer(self, layer) for layer in range(pool.spec.layers)])

    def inputs(self, token_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Arguments of the model's forward for each row's next tokens, this cache among them.

        Rows of equal past and equal new tokens need no mask and get none.
        """
        if len(token_ids) != len(self.entries) or not all(token_ids):
            raise UserError(
                f"paged KV: got tokens for {len(token_ids)} rows, expected one token or more for each of "
                f"{len(self.entries)}"
            )
        device = torch.device(self.pool.spec.device)
        past = [entry.length for entry in self.entries]
        new = [len(row) for row in token_ids]
        columns = max(new)
        ids_BT = torch.tensor([[0] * (columns - len(row)) + list(row) for row in token_ids], device=device)
        arguments: dict[str, Any] = {"input_ids": ids_BT, "cache": self, "use_cache": True}
        if len(set(past)) == len(set(new)) == 1:
            self.new_tokens = None
            return arguments
        self.new_tokens = tuple(new)
        mask_rows, position_rows = [], []
        for before, count in zip(past, new, strict=True):
            gap = columns - count
            mask_rows.append([0] * (max(past) - before) + [1] * before + [0] * gap + [1] * count)
            position_rows.append([0] * gap + list(range(before, before + count)))
        arguments["attention_mask"] = torch.tensor(mask_rows, device=device)
        arguments["position_ids"] = torch.tensor(position_rows, device=device)
        return arguments

    def rollback(self) -> None:
        """Undoes a forward that failed midway, such as one that found the pool exhausted at a later row."""
        for entry in self.entries:
            self.pool.rollback(entry)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens of every row; a number below 0, as the library's caches take it."""
        if tokens_to_remove > 0:
            raise UserError(f"paged KV: got crop({tokens_to_remove}), expected 0 or minus the tokens to remove")
        for entry in self.entries:
            self.pool.truncate(entry, max(0, entry.length + tokens_to_remove))

    def reset(self) -> None:
        """Forgets all tokens of every row."""
        for entry in self.entries:
            self.pool.truncate(entry, 0)


class _PagedLayer(CacheLayerMixin):
    """One layer of a :class:`PagedCache`."""

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: PagedCache, layer: int):
        super().__init__()
        self.is_initialized = True
        self._owner = owner
        self._layer = layer

    @property
    def batch_size(self) -> int:
        return len(self._owner.entries)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pool was allocated with all layers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores each row's real new tokens; gives past and new ones (B, K, T, D), left-padded with zeros."""
        pool, entries = self._owner.pool, self._owner.entries
        rows, heads, columns, width = key_states.shape
        if rows != len(entries):
            raise UserError(f"paged KV: got {rows} rows, expected one for each of {len(entries)} entries")
        counts = self._owner.new_tokens
        if counts is None:
            counts = (columns,) * rows
        past = self.get_seq_length()
        k_BKTD = key_states.new_zeros(rows, heads, past + columns, width)
        v_BKTD = torch.zeros_like(k_BKTD)
        k_BKTD[:, :, past:] = key_states
        v_BKTD[:, :, past:] = value_states
        for row, (entry, count) in enumerate(zip(entries, counts, strict=True)):
            before = entry.filled[self._layer]
            k_TKD, v_TKD = pool.gather(entry, self._layer)
            k_BKTD[row, :, past - before : past] = k_TKD.transpose(0, 1)
            v_BKTD[row, :, past - before : past] = v_TKD.transpose(0, 1)
            new = slice(columns - count, columns)
            pool.append(
                entry, self._layer, key_states[row, :, new].transpose(0, 1), value_states[row, :, new].transpose(0, 1)
            )
        return k_BKTD, v_BKTD

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Columns of the longest past."""
        return max(entry.filled[self._layer] for entry in self._owner.entries)

    def get_max_length(self) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UserError("paged KV: rows are not reordered in place; fork the entries and make a new PagedCache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.empty(0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def offload(self) -> None:
        raise UserError("paged KV: a pool is not offloaded layer by layer; close its namespaces instead")
