"""Paged KV: keys and values of growing sequences in a pool of equal blocks, allocated once.

An entry is one sequence, addressed by (namespace, label): a request or session, and a guidance branch. Its blocks may
be shared: with entries that begin with the same tokens under the same root (weights version, adapters, precision: see
``keys.PrefixRoot``), and with entries forked from it. A shared block is copied before it is written. All namespaces
draw on the one pool. Knows nothing about models or schedules; not thread-safe.

A prefix that was computed in another request may differ in the last bits from one computed here, as any two forwards
of different shapes may. Whoever needs results that do not depend on what is cached computes prompts in steps of
``block_tokens`` from position 0, so that a block's values are the same whoever computes it; or shares nothing by
opening with ``root=None``.

Legend: L layers, N blocks, P positions in a block, T tokens, K key-value heads, D head width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cards.errors import UserError
from inference.cache.blocks import BlockAllocator


@dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """Sizes of a pool."""

    layers: int
    blocks: int
    block_tokens: int = 16
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for name in ("layers", "blocks", "block_tokens", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"paged KV: got {name}={getattr(self, name)}, expected at least 1")

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return 2 * self.layers * self.block_tokens * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def pool_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens when nothing is shared: what admission reserves."""
        return -(-tokens // self.block_tokens)


@dataclass(eq=False)
class PagedEntry:
    """One sequence in a pool. Only the pool changes it."""

    namespace: Hashable
    label: str
    root: str | None
    cached: int
    """Leading tokens that were in the pool when it was opened: the forward starts after them."""
    tokens: list[int]
    """Token ids as far as they are known: of the prompt, then as ``record`` adds them."""
    table: list[int]
    """Blocks, in order."""
    filled: list[int]
    """Tokens kept, a layer; they differ within a forward alone."""
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the leading full blocks that were published or found."""
    closed: bool = False

    @property
    def length(self) -> int:
        """Tokens kept in every layer."""
        return min(self.filled)


class PagedPool:
    """See the module's docstring."""

    def __init__(self, spec: PagedSpec):
        self.spec = spec
        shape = (spec.layers, spec.blocks, spec.block_tokens, spec.kv_heads, spec.head_dim)
        with torch.inference_mode(False):  # a pool that is made within a forward must stay writable after it
            self.k_LNPKD = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
            self.v_LNPKD = torch.zeros_like(self.k_LNPKD)
        self.blocks = BlockAllocator(spec.blocks)
        self.hit_tokens = 0
        """Prompt tokens that were found."""
        self.missed_tokens = 0
        """Prompt tokens, under a root, that were not."""
        self._entries: dict[tuple[Hashable, str], PagedEntry] = {}
        self._root_of: dict[int, str] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that entries reference; cached prefixes are not counted, they give way at once."""
        return self.blocks.in_use * self.spec.block_bytes

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def longest(self) -> int:
        """Tokens of the longest entry."""
        return max((entry.filled[0] for entry in self._entries.values()), default=0)

    # -- entries

    def open(self, namespace: Hashable, label: str, prompt_token_ids: Sequence[int], *, root: str | None) -> PagedEntry:
        """A new entry that holds as much of the prompt as is cached: ``entry.cached`` tokens.

        At least the prompt's last token is left to compute, because the next token is read off its output.
        ``root``: ``PrefixRoot.digest`` of the component, or None to share nothing.
        """
        self._refuse_open(namespace, label)
        tokens = [int(token) for token in prompt_token_ids]
        found: list[int] = []
        hashes: list[bytes] = []
        if root is not None:
            for digest in _chain(root, tokens[:-1], self.spec.block_tokens):
                block = self.blocks.find(digest)
                if block is None:
                    break
                found.append(block)
                hashes.append(digest)
        self.blocks.share(found)
        cached = len(found) * self.spec.block_tokens
        if root is not None:
            self.hit_tokens += cached
            self.missed_tokens += len(tokens) - cached
        entry = PagedEntry(
            namespace=namespace,
            label=label,
            root=root,
            cached=cached,
            tokens=tokens,
            table=found,
            filled=[cached] * self.spec.layers,
            hashes=hashes,
        )
        self._entries[namespace, label] = entry
        return entry

    def entry(self, namespace: Hashable, label: str) -> PagedEntry:
        found = self._entries.get((namespace, label))
        if found is None:
            labels = sorted(known for space, known in self._entries if space == namespace)
            raise UserError(f"paged KV: {namespace!r} has no entry {label!r}; it has: {', '.join(labels) or 'none'}")
        return found

    def fork(self, entry: PagedEntry, label: str, *, namespace: Hashable | None = None) -> PagedEntry:
        """A second sequence that begins as ``entry`` is now; it costs no block until one of them is written."""
        self._check_open(entry)
        space = entry.namespace if namespace is None else namespace
        self._refuse_open(space, label)
        if len(set(entry.filled)) > 1:
            raise UserError("paged KV: got a fork within a forward, expected one between forwards")
        self.blocks.share(entry.table)
        twin = PagedEntry(
            namespace=space,
            label=label,
            root=entry.root,
            cached=entry.length,
            tokens=list(entry.tokens),
            table=list(entry.table),
            filled=list(entry.filled),
            hashes=list(entry.hashes),
        )
        self._entries[space, label] = twin
        return twin

    def free(self, entry: PagedEntry) -> None:
        """Gives the entry's blocks back; full blocks of known tokens stay findable until they are evicted."""
        self._check_open(entry)
        entry.closed = True
        self.blocks.release(reversed(entry.table))  # the tail of a prefix is worth less than its head
        entry.table = []
        entry.filled = [0] * self.spec.layers
        del self._entries[entry.namespace, entry.label]

    def close(self, namespace: Hashable) -> int:
        """Frees every entry of a namespace, none if it has none; gives how many."""
        entries = [entry for (space, _), entry in self._entries.items() if space == namespace]
        for entry in entries:
            self.free(entry)
        return len(entries)

    # -- keys and values

    def append(self, entry: PagedEntry, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Adds tokens to one layer; every layer gets the same tokens, each in its turn.

        Raises ``PoolExhausted`` before anything is written; only a forward's first layer can.
        """
        self._check_open(entry)
        spec = self.spec
        for tensor in (k_TKD, v_TKD):
            if tuple(tensor.shape[1:]) != (spec.kv_heads, spec.head_dim) or tensor.dtype != spec.dtype:
                raise UserError(
                    f"paged KV: got {list(tensor.shape)} {tensor.dtype}, "
                    f"expected (T, K, D) = [T, {spec.kv_heads}, {spec.head_dim}] {spec.dtype}"
                )
        if k_TKD.shape != v_TKD.shape:
            raise UserError(f"paged KV: got {len(k_TKD)} keys and {len(v_TKD)} values, expected as many")
        if torch.is_grad_enabled() and (k_TKD.requires_grad or v_TKD.requires_grad):
            raise UserError("paged KV: got keys with a gradient graph, which a pool would cut; use torch.no_grad()")
        count = len(k_TKD)
        if count == 0:
            return
        start = entry.filled[layer]
        self._make_room(entry, start, start + count)
        size = spec.block_tokens
        places = [entry.table[i // size] * size + i % size for i in range(start, start + count)]
        index = torch.tensor(places, device=spec.device)
        self._flat(self.k_LNPKD, layer)[index] = k_TKD.detach()
        self._flat(self.v_LNPKD, layer)[index] = v_TKD.detach()
        entry.filled[layer] = start + count
        self._publish(entry)

    def gather(self, entry: PagedEntry, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (T, K, D) of the tokens kept in one layer: contiguous copies."""
        self._check_open(entry)
        table = torch.tensor(entry.table, dtype=torch.long, device=self.spec.device)
        count = entry.filled[layer]
        return (
            self.k_LNPKD[layer].index_select(0, table).flatten(0, 1)[:count],
            self.v_LNPKD[layer].index_select(0, table).flatten(0, 1)[:count],
        )

    def record(self, entry: PagedEntry, token_ids: Sequence[int]) -> None:
        """Tells the ids of the tokens after the known ones, in order and none left out, so that a later prompt that
        repeats them shares their blocks."""
        self._check_open(entry)
        entry.tokens.extend(int(token) for token in token_ids)
        self._publish(entry)

    def truncate(self, entry: PagedEntry, length: int) -> None:
        """Forgets the tokens from ``length`` on in all layers, and their ids, e.g. of drafts that were rejected."""
        self._check_open(entry)
        if not 0 <= length <= entry.length:
            raise UserError(f"paged KV: got length {length}, expected 0 .. {entry.length}")
        self._cut(entry, length)
        entry.tokens = entry.tokens[:length]

    def rollback(self, entry: PagedEntry) -> None:
        """Undoes a forward that failed midway: every layer keeps ``entry.length`` tokens; known ids stay."""
        self._check_open(entry)
        self._cut(entry, entry.length)

    # -- cached prefixes

    def evict(self, blocks: int | None = None) -> int:
        """Forgets up to so many cached blocks that no entry references (all by default); gives how many."""
        return self.blocks.evict(self.blocks.cached if blocks is None else blocks)

    def forget_root(self, root: str) -> int:
        """Blocks of a root are found no more, for a weight sync; entries that hold them keep them. Gives how many."""
        known = [block for block, owner in self._root_of.items() if owner == root and self.blocks.published(block)]
        for block in known:
            self.blocks.withdraw(block)
        self._root_of = {block: owner for block, owner in self._root_of.items() if self.blocks.published(block)}
        return len(known)

    # -- parts

    def _refuse_open(self, namespace: Hashable, label: str) -> None:
        if (namespace, label) in self._entries:
            raise UserError(f"paged KV: {label!r} of {namespace!r} is open already; free it first or use another label")

    def _check_open(self, entry: PagedEntry) -> None:
        if entry.closed or self._entries.get((entry.namespace, entry.label)) is not entry:
            raise UserError(f"paged KV: {entry.label!r} of {entry.namespace!r} was freed, or is of another pool")

    def _flat(self, store_LNPKD: Tensor, layer: int) -> Tensor:
        """(N * P, K, D) view of one layer."""
        return store_LNPKD[layer].flatten(0, 1)

    def _make_room(self, entry: PagedEntry, start: int, end: int) -> None:
        """Blocks for tokens ``start .. end``, each written block owned by this entry alone."""
        size = self.spec.block_tokens
        first = start // size
        shared = [i for i in range(first, len(entry.table)) if self.blocks.references(entry.table[i]) > 1]
        extra = max(0, self.spec.blocks_for(end) - len(entry.table))
        new = self.blocks.allocate(len(shared) + extra, f"paged KV, {entry.label!r} of {entry.namespace!r}")
        for i, copy in zip(shared, new, strict=False):
            original = entry.table[i]
            self.k_LNPKD[:, copy] = self.k_LNPKD[:, original]
            self.v_LNPKD[:, copy] = self.v_LNPKD[:, original]
            entry.table[i] = copy
            self.blocks.release([original])
        for block in entry.table[first:]:
            self.blocks.withdraw(block)  # found by its content no more, once written
        entry.table += new[len(shared) :]

    def _cut(self, entry: PagedEntry, length: int) -> None:
        keep = self.spec.blocks_for(length)
        self.blocks.release(reversed(entry.table[keep:]))
        entry.table = entry.table[:keep]
        entry.filled = [min(filled, length) for filled in entry.filled]
        entry.hashes = entry.hashes[: length // self.spec.block_tokens]

    def _publish(self, entry: PagedEntry) -> None:
        """Makes full blocks of known tokens findable."""
        if entry.root is None:
            return
        known = min(entry.length, len(entry.tokens)) // self.spec.block_tokens
        for index in range(len(entry.hashes), known):
            size = self.spec.block_tokens
            before = entry.hashes[-1] if entry.hashes else _root_hash(entry.root)
            digest = _block_hash(before, entry.tokens[index * size : (index + 1) * size])
            entry.hashes.append(digest)
            self.blocks.publish(entry.table[index], digest)
            self._root_of[entry.table[index]] = entry.root


def _root_hash(root: str) -> bytes:
    return hashlib.sha256(root.encode()).digest()


def _block_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a block: of all before it, and its own tokens."""
    return hashlib.sha256(before + b",".join(str(token).encode() for token in tokens)).digest()


def _chain(root: str, tokens: Sequence[int], size: int) -> list[bytes]:
    """Hashes of the full blocks of ``tokens``."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        hashes.append(_block_hash(hashes[-1] if hashes else _root_hash(root), tokens[start : start + size]))
    return hashes
