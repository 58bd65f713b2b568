"""Slab KV against plain concatenation: the window is the first sinks and the last chunks, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cards.errors import UserError
from inference.cache.budget import ByteBudget, CacheExhausted
from inference.cache.slab import SlabKV, SlabPool, SlabSpec
from loops.slab import SlabHandle

BATCH, TOKENS, HEADS, WIDTH = 2, 3, 2, 4


def spec_of(*, window: int = 3, sink: int = 0, layers: int = 2) -> SlabSpec:
    return SlabSpec(
        layers=layers,
        batch=BATCH,
        chunk_tokens=TOKENS,
        window_chunks=window,
        sink_chunks=sink,
        heads=HEADS,
        head_dim=WIDTH,
    )


def open_slab(spec: SlabSpec, training: bool = False) -> SlabKV:
    return SlabPool(ByteBudget(2**20)).open("request", "conditional", spec, training=training)


def chunk(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS, HEADS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def concatenated(chunks: list[tuple[Tensor, Tensor]], window: int, sink: int) -> tuple[Tensor, Tensor]:
    """The oracle: keep everything, cut at the end."""
    seen = chunks if len(chunks) <= window + sink else chunks[:sink] + chunks[len(chunks) - window :]
    return torch.cat([k for k, _ in seen], 1), torch.cat([v for _, v in seen], 1)


@pytest.mark.parametrize("training", [False, True])
@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(1, 4),
    sink=st.integers(0, 2),
    writes=st.lists(st.tuples(st.booleans(), st.integers(0, 10)), min_size=1, max_size=14),
)
def test_the_window_equals_plain_concatenation(
    training: bool, window: int, sink: int, writes: list[tuple[bool, int]]
) -> None:
    slab = open_slab(spec_of(window=window, sink=sink, layers=1), training)
    chunks: list[tuple[Tensor, Tensor]] = []
    for seed, (overwrite, pick) in enumerate(writes):
        new = chunk(seed)
        if overwrite and chunks:
            visible = [i for i in range(len(chunks)) if i < sink or i >= len(chunks) - window]
            index = visible[pick % len(visible)]
            slab.overwrite(0, index, *new)
            chunks[index] = new
        else:
            assert slab.append(0, *new) == len(chunks)
            chunks.append(new)
        for got, expected in zip(slab.gather(0), concatenated(chunks, window, sink), strict=True):
            assert torch.equal(got, expected)


def test_layers_advance_by_themselves() -> None:
    slab = open_slab(spec_of())
    first, second = chunk(1), chunk(2)
    slab.append(0, *first)
    assert slab.gather(1)[0].shape == (BATCH, 0, HEADS, WIDTH)
    slab.append(1, *second)
    assert torch.equal(slab.gather(0)[0], first[0])
    assert torch.equal(slab.gather(1)[1], second[1])


@pytest.mark.parametrize("training", [False, True])
def test_a_chunk_outside_the_window_is_not_overwritten(training: bool) -> None:
    slab = open_slab(spec_of(window=2, sink=1), training)
    for seed in range(5):
        slab.append(0, *chunk(seed))
    for gone in (1, 2, 5, -1):
        with pytest.raises(UserError, match=r"expected one in the window: \[0, 3, 4\]"):
            slab.overwrite(0, gone, *chunk(9))


@pytest.mark.parametrize("training", [False, True])
def test_a_snapshot_does_not_follow_later_writes(training: bool) -> None:
    slab = open_slab(spec_of(window=2), training)
    chunks = [chunk(seed) for seed in range(2)]
    empty = slab.snapshot()
    for new in chunks:
        slab.append(0, *new)
    snapshot = slab.snapshot()
    slab.overwrite(0, 1, *chunk(8))
    slab.append(0, *chunk(9))
    for got, expected in zip(snapshot.gather(0), concatenated(chunks, 2, 0), strict=True):
        assert torch.equal(got, expected)
    assert empty.gather(0)[0].shape[1] == 0


def test_gradients_of_earlier_chunks_are_those_of_plain_concatenation() -> None:
    """A rollout in which each chunk attends to the window, then is overwritten by its context pass."""

    def attend(query: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        weights = torch.einsum("bthd,bshd->bhts", query, kv[0]).softmax(-1)
        return torch.einsum("bhts,bshd->bthd", weights, kv[1])

    def rollout(weight: Tensor, slab: SlabKV | None) -> Tensor:
        kept: list[tuple[Tensor, Tensor]] = []
        total = torch.zeros((), dtype=torch.float64)
        for seed in range(4):
            x = chunk(seed)[0]
            for noisy in (True, False):
                kv = ((x + noisy) @ weight, torch.sin((x + noisy) @ weight))
                if slab is None:
                    kept = [*kept, kv] if noisy else [*kept[:-1], kv]
                    seen = concatenated(kept, 2, 1)
                else:
                    if noisy:
                        slab.append(0, *kv)
                    else:
                        slab.overwrite(0, seed, *kv)
                    seen = slab.gather(0)
                total = total + attend(x, seen).double().square().sum()
        return total

    gradients = []
    for slab in (None, open_slab(spec_of(window=2, sink=1), training=True)):
        weight = torch.eye(WIDTH).requires_grad_()
        rollout(weight, slab).backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_a_checkpointed_forward_recomputes_on_its_snapshot() -> None:
    """Recomputed in the backward, after the window has moved on: the gradient is the one without checkpointing."""

    def run(checkpointed: bool) -> Tensor:
        slab = open_slab(spec_of(window=1), training=True)
        weight = torch.eye(WIDTH).requires_grad_()
        total = torch.zeros(())
        for seed in range(3):
            x = chunk(seed)[0]
            slab.append(0, x @ weight, (x @ weight).tanh())
            snapshot = slab.snapshot()

            def forward(x: Tensor, snapshot: Any = snapshot, weight: Tensor = weight) -> Tensor:
                k, v = snapshot.gather(0)
                return ((x @ weight) * k).softmax(-1) * v

            y = checkpoint(forward, x, use_reentrant=False) if checkpointed else forward(x)
            total = total + y.square().sum()
        total.backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(run(True), run(False))


def test_an_in_place_slab_refuses_a_graph() -> None:
    slab = open_slab(spec_of())
    k, v = chunk(0)
    with pytest.raises(UserError, match="training=True"):
        slab.append(0, k.requires_grad_(), v)
    with torch.no_grad():
        slab.append(0, k, v)
    assert not slab.gather(0)[0].requires_grad


def test_shapes_are_checked() -> None:
    k, v = chunk(0)
    with pytest.raises(UserError, match=r"expected \(B, T, H, D\) = \[2, 3, 2, 4\]"):
        open_slab(spec_of()).append(0, k[:, :2], v[:, :2])
    with pytest.raises(UserError, match=r"torch\.float64"):
        open_slab(spec_of()).append(0, k.double(), v.double())
    with pytest.raises(UserError, match="window_chunks=0"):
        spec_of(window=0)


def test_bytes_are_reserved_once_and_returned() -> None:
    spec = spec_of(window=2, sink=1)
    expected = 2 * 2 * 3 * BATCH * TOKENS * HEADS * WIDTH * 4  # k and v, layers, chunks, ..., bytes of a float32
    assert spec.slab_bytes == expected
    budget = ByteBudget(2 * expected)
    pool = SlabPool(budget)
    slab = pool.open("a", "conditional", spec)
    pool.open("a", "unconditional", spec)
    for seed in range(6):
        slab.append(0, *chunk(seed))
    assert pool.bytes == budget.used_bytes == 2 * expected
    with pytest.raises(CacheExhausted, match=f"got {expected} bytes to keep, expected at most 0"):
        pool.open("b", "conditional", spec)
    with pytest.raises(UserError, match="is open already"):
        pool.open("a", "conditional", spec)
    assert pool.close("a") == 2 * expected
    assert (pool.close("a"), len(pool), budget.used_bytes) == (0, 0, 0)
    with pytest.raises(UserError, match="was closed"):
        slab.append(0, *chunk(0))


def test_training_counts_every_chunk_it_keeps() -> None:
    spec = spec_of(window=1, layers=1)
    budget = ByteBudget(2 * spec.chunk_bytes)
    pool = SlabPool(budget)
    slab = pool.open("a", "main", spec, training=True)
    slab.append(0, *chunk(0))
    slab.append(0, *chunk(1))
    slab.overwrite(0, 1, *chunk(2))
    assert pool.bytes == budget.used_bytes == 2 * spec.chunk_bytes
    with pytest.raises(CacheExhausted):
        slab.append(0, *chunk(3))
    assert slab.chunks(0) == 2
    pool.close("a")
    assert budget.used_bytes == 0


@given(
    window=st.integers(1, 3),
    sink=st.integers(0, 2),
    before=st.integers(0, 7),
    puts=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=24),
    rests=st.booleans(),
)
@settings(deadline=None)
def test_a_slab_goes_back_to_its_mark_to_the_bit(
    window: int, sink: int, before: int, puts: list[tuple[int, bool]], rests: bool
) -> None:
    """Whatever was appended and overwritten since, layer by layer, at rest too; what follows is as if it was not."""
    spec = spec_of(window=window, sink=sink)
    handle, plain = SlabHandle(spec), SlabHandle(spec)
    for slab in (handle.store, plain.store):
        for index in range(before):
            for layer in range(2):
                slab.put(layer, index, *chunk(10 * index + layer))
    handle.mark()
    for number, (layer, again) in enumerate(puts):
        newest = handle.store.chunks(layer) - 1
        handle.store.put(layer, newest if again and newest >= before else newest + 1, *chunk(1000 + number))
    if rests:
        handle.rest()
    assert handle.rollback()
    if rests:
        handle.wake()
    for extra in range(4):
        for layer in range(2):
            assert handle.store.chunks(layer) == plain.store.chunks(layer) == before + extra
            for ours, theirs in zip(handle.store.gather(layer), plain.store.gather(layer), strict=True):
                assert torch.equal(ours, theirs)
            for slab in (handle.store, plain.store):
                slab.put(layer, before + extra, *chunk(2000 + 10 * extra + layer))


def test_a_committed_slab_keeps_what_was_appended_and_holds_nothing_back() -> None:
    handle = SlabHandle(spec_of(window=2))
    for index in range(5):
        if index == 2:
            handle.mark()
        for layer in range(2):
            handle.store.put(layer, index, *chunk(index))
    handle.commit()
    assert handle.rollback()
    assert handle.store.chunks(0) == 5
    assert handle.contents()["left"] == [[], []]
    assert torch.equal(handle.store.gather(0)[0], torch.cat([chunk(3)[0], chunk(4)[0]], dim=1))
