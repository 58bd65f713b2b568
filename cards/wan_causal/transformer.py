"""Wan's transformer under block-causal attention: the library's module, blocks and state dict, another attention.

Without ``causal`` it is the library's forward, bit for bit. :func:`block_causal` runs a whole clip in one forward, in
which a chunk sees itself and the chunks before it; :func:`teacher_forced` runs a clean and a noisy clip in one, in
which a noisy chunk sees the clean chunks before it and itself. :class:`FromStore` and :class:`FromSnapshot` run one
chunk whose past is in a store of keys and values. All of them attend chunk by chunk without a mask, so that they add
up the same numbers in the same order.

What a forward attends to travels as an argument through the blocks, and nothing of it stays on the module: activation
checkpointing may run a block again at any time, and finds the past as it was.

Legend: B batch, L tokens, H heads, D head width, K timesteps of a row, N width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, _get_qkv_projections
from torch import Tensor, nn

from cards.chunks import settled_window, visible_chunks

KV = tuple[Tensor, Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries, keys, values), each (B, L, H, D) -> (B, L, H, D)."""


class Past(Protocol):
    """Keys and values that do not change any more."""

    def gather(self, layer: int) -> KV:
        """(B, L, H, D) each, oldest first."""


class Store(Protocol):
    """Keys and values of one rollout's chunks, such as ``loops.slab.SlabKV``."""

    def put(self, layer: int, chunk: int, k_BLHD: Tensor, v_BLHD: Tensor) -> None:
        """Appends the next chunk, or overwrites one."""

    def gather(self, layer: int) -> KV:
        """What the newest chunk sees, itself among it."""

    def before(self, chunk: int) -> Past:
        """What ``chunk`` sees besides itself, whatever is written later."""


class Attend(Protocol):
    """What a layer's queries attend to."""

    def __call__(self, layer: int, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, attention: Attention) -> Tensor: ...


# -- what is attended to


@dataclass(frozen=True)
class Span:
    """A run of queries and the runs of keys that they see."""

    queries: slice
    keys: tuple[slice, ...]


@dataclass(frozen=True)
class Spans:
    """A whole forward's attention, run by run."""

    spans: tuple[Span, ...]

    def __call__(self, layer: int, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, attention: Attention) -> Tensor:
        parts = [
            attention(q_BLHD[:, span.queries], _runs(k_BLHD, span.keys), _runs(v_BLHD, span.keys))
            for span in self.spans
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _runs(tokens_BLHD: Tensor, runs: Sequence[slice]) -> Tensor:
    parts = [tokens_BLHD[:, run] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True)
class FromStore:
    """One chunk without gradient: its keys and values are written where it belongs, then the window is read."""

    store: Store
    chunk: int

    def __call__(self, layer: int, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, attention: Attention) -> Tensor:
        self.store.put(layer, self.chunk, k_BLHD, v_BLHD)
        return attention(q_BLHD, *self.store.gather(layer))


class FromSnapshot:
    """One chunk with gradient: its past is frozen, and its own keys and values are kept until :meth:`commit`.

    A block that is run again by activation checkpointing reads the same past and writes nothing.
    """

    def __init__(self, store: Store, chunk: int):
        self._store = store
        self._chunk = chunk
        self._past = store.before(chunk)
        self._own: dict[int, KV] | None = {}

    def __call__(self, layer: int, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, attention: Attention) -> Tensor:
        if self._own is not None:
            self._own[layer] = (k_BLHD, v_BLHD)
        past_k, past_v = self._past.gather(layer)
        return attention(q_BLHD, torch.cat([past_k, k_BLHD], dim=1), torch.cat([past_v, v_BLHD], dim=1))

    def commit(self, *, keep_graph: bool) -> None:
        """Writes the chunk into the store, cut from its graph unless ``keep_graph``; once, after the forward."""
        assert self._own is not None
        own, self._own = self._own, None
        for layer, (k, v) in sorted(own.items()):
            self._store.put(layer, self._chunk, *((k, v) if keep_graph else (k.detach(), v.detach())))


@dataclass(frozen=True)
class Causal:
    """How a forward is causal."""

    attend: Attend
    starts: tuple[int, ...]
    """Position of the first latent frame of each part; the parts are equally long and follow each other in time."""


def block_causal(chunks: int, chunk_tokens: int, window: int | None = None, sinks: int = 0) -> Causal:
    """A whole clip: chunk j sees the chunks <= j in its window."""
    window, sinks = settled_window(chunks, window, sinks)
    return Causal(Spans(tuple(_seen(j, chunk_tokens, window, sinks) for j in range(chunks))), (0,))


def teacher_forced(chunks: int, chunk_tokens: int, window: int | None = None, sinks: int = 0) -> Causal:
    """A clean clip, then a noisy one, along the frames: noisy chunk j sees the clean chunks < j and itself."""
    window, sinks = settled_window(chunks, window, sinks)
    clean = [_seen(j, chunk_tokens, window, sinks) for j in range(chunks)]
    noisy = []
    for j in range(chunks):
        own = slice((chunks + j) * chunk_tokens, (chunks + j + 1) * chunk_tokens)
        past = _token_runs([i for i in visible_chunks(j + 1, window, sinks) if i != j], chunk_tokens)
        noisy.append(Span(own, (*past, own)))
    return Causal(Spans((*clean, *noisy)), (0, 0))


def _seen(chunk: int, chunk_tokens: int, window: int, sinks: int) -> Span:
    own = slice(chunk * chunk_tokens, (chunk + 1) * chunk_tokens)
    return Span(own, _token_runs(visible_chunks(chunk + 1, window, sinks), chunk_tokens))


def _token_runs(chunks: Sequence[int], chunk_tokens: int) -> tuple[slice, ...]:
    """Runs of tokens of ascending chunks; neighbours make one run."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1][1] = chunk + 1
        else:
            runs.append([chunk, chunk + 1])
    return tuple(slice(first * chunk_tokens, end * chunk_tokens) for first, end in runs)


# -- the module


@dataclass(frozen=True)
class _Layer:
    """What a block hands to its self-attention in place of the rotary embedding."""

    index: int
    cos_1L1D: Tensor
    sin_1L1D: Tensor
    attend: Attend


class ChunkAttnProcessor(WanAttnProcessor):  # type: ignore[misc]
    """Self-attention that asks ``attend``; the library's own where it is given a plain rotary embedding. Stateless."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        layer = rotary_emb
        if not isinstance(layer, _Layer):
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        query, key, value = _get_qkv_projections(attn, hidden_states, None)
        q_BLHD, k_BLHD, v_BLHD = (
            t.unflatten(2, (attn.heads, -1)) for t in (attn.norm_q(query), attn.norm_k(key), value)
        )
        q_BLHD, k_BLHD = (_rotated(t, layer.cos_1L1D, layer.sin_1L1D) for t in (q_BLHD, k_BLHD))
        out_BLHD = layer.attend(layer.index, q_BLHD, k_BLHD, v_BLHD, self._attention)
        out = attn.to_out[0](out_BLHD.flatten(2, 3).type_as(q_BLHD))
        return attn.to_out[1](out)

    def _attention(self, q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor) -> Tensor:
        return dispatch_attention_fn(
            q_BLHD,
            k_BLHD,
            v_BLHD,
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )


def _rotated(tokens_BLHD: Tensor, cos_1L1D: Tensor, sin_1L1D: Tensor) -> Tensor:
    """``WanAttnProcessor``'s rotary embedding."""
    x1, x2 = tokens_BLHD.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_1L1D[..., 0::2], sin_1L1D[..., 1::2]
    out = torch.empty_like(tokens_BLHD)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out.type_as(tokens_BLHD)


def rotary(rope: Any, cells: tuple[int, int, int], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(cos, sin), each (1, L, 1, D), of tokens at (frames, height, width) ``cells`` for each of the ``starts``.

    The library's table where it reaches; beyond it, frames are computed as the table was.
    """
    frames, height, width = cells
    sizes = [rope.t_dim, rope.h_dim, rope.w_dim]
    tables = []
    for table in (rope.freqs_cos, rope.freqs_sin):
        _, rows_h, rows_w = table.split(sizes, dim=1)
        tables.append((rows_h[:height].view(1, height, 1, -1), rows_w[:width].view(1, 1, width, -1)))
    parts: list[list[Tensor]] = [[], []]
    for start in starts:
        for part, rows_t, (rows_h, rows_w) in zip(parts, _frame_rows(rope, start, frames), tables, strict=True):
            grid = (frames, height, width, -1)
            axes = [rows.expand(grid) for rows in (rows_t.view(frames, 1, 1, -1), rows_h, rows_w)]
            part.append(torch.cat(axes, dim=-1).reshape(1, frames * height * width, 1, -1))
    cos, sin = (part[0] if len(part) == 1 else torch.cat(part, dim=1) for part in parts)
    return cos, sin


def _frame_rows(rope: Any, start: int, frames: int) -> tuple[Tensor, Tensor]:
    """Rows (frames, t_dim) of the frame axis."""
    cos, sin = rope.freqs_cos[:, : rope.t_dim], rope.freqs_sin[:, : rope.t_dim]
    if start + frames > rope.max_seq_len:
        positions = torch.arange(start, start + frames, device=cos.device)
        return get_1d_rotary_pos_embed(
            rope.t_dim, positions, use_real=True, repeat_interleave_real=True, freqs_dtype=torch.float64
        )
    return cos[start : start + frames], sin[start : start + frames]


def _per_token(embedding: Tensor, tokens: int) -> Tensor:
    """(B, K, ...) -> (B, L, ...): each timestep's embedding for its tokens."""
    return embedding.repeat_interleave(tokens // embedding.shape[1], dim=1)


class CausalWanTransformer3DModel(WanTransformer3DModel):  # type: ignore[misc]
    """See the module's docstring. It reads any folder of ``WanTransformer3DModel`` and saves one."""

    def to_json_string(self) -> str:
        """The config names the library's class, which loads the folder unchanged."""
        return super().to_json_string().replace(f'"{type(self).__name__}"', f'"{WanTransformer3DModel.__name__}"')

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        causal: Causal | None = None,
        action: Tensor | None = None,
    ) -> Any:
        """The library's forward, or a causal one: then a tuple of the velocity (B, C, T, H, W).

        Args:
            hidden_states: latents (B, C, T, H, W); under ``causal`` all its parts, one after the other in T.
            timestep: (B,), or (B, K) for K equal runs of the tokens, such as one a chunk.
            action: (B, N), or (B, K, N), added to the embedding of the timestep; under ``causal`` alone.
        """
        if causal is None:
            return super().forward(
                hidden_states,
                timestep,
                encoder_hidden_states,
                encoder_hidden_states_image,
                return_dict=return_dict,
                attention_kwargs=attention_kwargs,
            )
        install(self)
        patch = self.config.patch_size
        cells = tuple(n // p for n, p in zip(hidden_states.shape[2:], patch, strict=True))
        tokens = math.prod(cells)
        parts = len(causal.starts)
        starts = [start // patch[0] for start in causal.starts]
        cos, sin = rotary(self.rope, (cells[0] // parts, cells[1], cells[2]), starts)
        hidden_BLN = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2).contiguous()
        runs = timestep.shape[1] if timestep.ndim == 2 else None
        temb, modulation, text, _ = self.condition_embedder(
            timestep.flatten(), encoder_hidden_states, None, timestep_seq_len=runs
        )
        if action is not None:
            embedder = self.condition_embedder
            temb = temb + action.to(temb.dtype)
            modulation = embedder.time_proj(embedder.act_fn(temb))
        if runs is None:
            modulation = modulation.unflatten(1, (6, -1))
        else:
            temb = _per_token(temb, tokens)
            modulation = _per_token(modulation.unflatten(2, (6, -1)), tokens)
        recompute = torch.is_grad_enabled() and self.gradient_checkpointing
        for index, block in enumerate(self.blocks):
            layer = _Layer(index, cos, sin, causal.attend)
            if recompute:
                hidden_BLN = self._gradient_checkpointing_func(block, hidden_BLN, text, modulation, layer)
            else:
                hidden_BLN = block(hidden_BLN, text, modulation, layer)
        return (self._unpatched(hidden_BLN, temb, cells),)

    def _unpatched(self, hidden_BLN: Tensor, temb: Tensor, cells: Sequence[int]) -> Tensor:
        """Output norm, projection and patches back to latent cells, as the library's forward ends."""
        if temb.ndim == 3:
            both = (self.scale_shift_table.unsqueeze(0).to(temb.device) + temb.unsqueeze(2)).chunk(2, dim=2)
            shift, scale = (half.squeeze(2) for half in both)
        else:
            shift, scale = (self.scale_shift_table.to(temb.device) + temb.unsqueeze(1)).chunk(2, dim=1)
        hidden_BLN = (self.norm_out(hidden_BLN.float()) * (1 + scale) + shift).type_as(hidden_BLN)
        out = self.proj_out(hidden_BLN)
        out = out.reshape(out.shape[0], *cells, *self.config.patch_size, -1)
        return out.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def install(transformer: nn.Module) -> None:
    """Gives every block's self-attention the processor; again is no harm, and a plain forward is as before."""
    for block in transformer.blocks:  # type: ignore[union-attr]
        attention: Any = block.attn1  # type: ignore[union-attr]
        if not isinstance(attention.processor, ChunkAttnProcessor):
            attention.set_processor(ChunkAttnProcessor())
