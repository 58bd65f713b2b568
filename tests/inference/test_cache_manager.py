"""CacheManager: one budget, requests that leave nothing behind, syncs that touch one component.

The state machine runs any order of opening, appending, forking, truncating, freeing and evicting, and checks after each
step that every block has exactly the owners that its count says and every entry its own content.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from cards.errors import UserError
from inference.cache.blocks import PoolExhausted
from inference.cache.budget import CacheExhausted
from inference.cache.keys import CacheKey, feature_key
from inference.cache.manager import CacheManager
from inference.cache.paged import PagedEntry, PagedSpec
from inference.cache.slab import SlabSpec
from inference.instance import ModelInstance
from inference.load import card_of
from loops.loop import ModelCall, SamplingParams, WorkPlan, WorkUnit

PAGED = PagedSpec(layers=2, blocks=9, block_tokens=2, kv_heads=1, head_dim=2)
SLAB = SlabSpec(layers=1, batch=1, chunk_tokens=2, window_chunks=2, heads=1, head_dim=2)
CAPACITY = PAGED.pool_bytes + 3 * SLAB.slab_bytes
PARAMS = SamplingParams(
    frames=5,
    height=16,
    width=32,
    steps=4,
    guidance=3.0,
    guidance_policy="sequential",
    solver="unipc",
    shift=3.0,
    seed=7,
)


def content(root: str | None, tokens: list[int], layer: int) -> tuple[Tensor, Tensor]:
    """What a model with this root's weights gives: a function of the whole prefix, as keys and values are."""
    scale = {None: 1.0, "old": 2.0, "new": 3.0}[root]
    prefix_T = torch.tensor([float(token + 1) for token in tokens]).cumsum(0) * scale + layer / 8
    k_TKD = prefix_T[:, None, None].expand(-1, 1, 2).clone()
    return k_TKD, -k_TKD


class AnyOrder(RuleBasedStateMachine):
    """Requests "a" and "b", with every cache, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(CAPACITY)
        self.pool = self.manager.paged_pool("lm", PAGED)
        self.live: dict[PagedEntry, list[int]] = {}
        """Entry -> the tokens that it must hold."""
        self.made = 0

    def label(self) -> str:
        self.made += 1
        return f"{self.made}"

    def caches(self, request: str) -> Any:
        held = self.manager._requests.get(request)
        return self.manager.allocate(request) if held is None else held

    def extend(self, entry: PagedEntry, tokens: list[int]) -> None:
        """A forward over new tokens, undone when the pool is exhausted."""
        whole = self.live[entry] + tokens
        try:
            for layer in range(PAGED.layers):
                k, v = content(entry.root, whole, layer)
                self.pool.append(entry, layer, k[len(self.live[entry]) :], v[len(self.live[entry]) :])
        except PoolExhausted:
            self.pool.rollback(entry)
        else:
            self.live[entry] = whole

    def pick(self, index: int) -> PagedEntry:
        return list(self.live)[index % len(self.live)]

    @rule(
        request=st.sampled_from("ab"),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7),
        root=st.sampled_from([None, "old", "new"]),
    )
    def open(self, request: str, tokens: list[int], root: str | None) -> None:
        entry = self.caches(request).paged(self.pool, self.label(), tokens, root=root)
        assert entry.cached < len(tokens)
        self.live[entry] = tokens[: entry.cached]
        self.extend(entry, tokens[entry.cached :])
        if entry.length != len(tokens):
            self.pool.free(entry)
            del self.live[entry]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), tell=st.booleans())
    def append(self, index: int, tokens: list[int], tell: bool) -> None:
        entry = self.pick(index)
        before = len(self.live[entry])
        self.extend(entry, tokens)
        if tell and len(entry.tokens) == before:
            self.pool.record(entry, self.live[entry][before:])

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20), request=st.sampled_from("ab"), apart=st.booleans())
    def fork(self, index: int, request: str, apart: bool) -> None:
        entry = self.pick(index)
        self.caches(request)
        twin = self.pool.fork(entry, self.label(), namespace=request)
        self.live[twin] = list(self.live[entry])
        if apart:
            self.extend(twin, [0])
            self.extend(entry, [1])

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20), length=st.integers(0, 12))
    def truncate(self, index: int, length: int) -> None:
        entry = self.pick(index)
        length = min(length, entry.length)
        self.pool.truncate(entry, length)
        self.live[entry] = self.live[entry][:length]

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 20))
    def free_entry(self, index: int) -> None:
        entry = self.pick(index)
        self.pool.free(entry)
        del self.live[entry]

    @rule(request=st.sampled_from("ab"), training=st.booleans())
    def slab(self, request: str, training: bool) -> None:
        try:
            slab = self.caches(request).slab(self.label(), SLAB, training=training)
            slab.append(0, torch.zeros(SLAB.chunk_shape), torch.zeros(SLAB.chunk_shape))
        except CacheExhausted:
            assert self.manager.budget.free_bytes < SLAB.slab_bytes

    @rule(request=st.sampled_from("ab"), size=st.integers(1, 9))
    def residual(self, request: str, size: int) -> None:
        try:
            self.caches(request).keep_residual("main", f"{size % 3}", torch.zeros(size), tag=0)
        except CacheExhausted:
            assert self.manager.budget.free_bytes < 4 * size

    @rule(key=st.integers(0, 5), size=st.integers(1, 9))
    def feature(self, key: int, size: int) -> None:
        self.manager.features.put(key, torch.zeros(size))

    @rule(request=st.sampled_from("ab"))
    def free_request(self, request: str) -> None:
        self.manager.free(request)
        self.live = {entry: tokens for entry, tokens in self.live.items() if entry.namespace != request}

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        cached = self.pool.blocks.cached
        assert self.pool.evict(count) == min(count, cached)

    @rule(root=st.sampled_from(["old", "new"]))
    def sync(self, root: str) -> None:
        self.pool.forget_root(root)

    @invariant()
    def every_block_has_the_owners_that_its_count_says(self) -> None:
        owners = Counter(block for entry in self.live for block in entry.table)
        blocks = self.pool.blocks
        assert {b: blocks.references(b) for b in range(blocks.total) if blocks.references(b)} == owners
        assert blocks.in_use == len(owners)
        assert blocks.in_use + blocks.available == blocks.total
        assert sorted([*blocks._free, *blocks._cached, *owners]) == list(range(blocks.total))
        assert all(len(set(entry.table)) == len(entry.table) for entry in self.live)
        assert all(len(entry.table) == PAGED.blocks_for(entry.length) for entry in self.live)

    @invariant()
    def every_entry_holds_its_own_content(self) -> None:
        for entry, tokens in self.live.items():
            assert entry.length == len(tokens)
            for layer in range(PAGED.layers):
                expected = content(entry.root, tokens, layer)
                assert all(torch.equal(a, b) for a, b in zip(self.pool.gather(entry, layer), expected, strict=True))

    @invariant()
    def the_budget_adds_up(self) -> None:
        stats = self.manager.stats()
        parts = PAGED.pool_bytes + stats.feature_bytes + stats.residual_bytes + stats.slab_bytes
        assert stats.reserved_bytes == parts <= stats.capacity_bytes
        assert stats.paged_bytes == self.pool.blocks.in_use * PAGED.block_bytes

    def teardown(self) -> None:
        for request in "ab":
            self.manager.free(request)
        stats = self.manager.stats()
        assert (stats.request_bytes, stats.paged_blocks_in_use, stats.requests) == (0, 0, 0)
        self.pool.evict()
        self.manager.features.clear()
        assert self.pool.blocks.available == self.pool.blocks.total
        assert self.pool.blocks.cached == 0
        self.manager.drop_pool("lm")
        assert self.manager.budget.used_bytes == 0


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_order_leaks_nothing = AnyOrder.TestCase


@pytest.mark.parametrize("seed", range(4))
def test_long_walks_leak_nothing(seed: int) -> None:
    """The same steps, drawn at random and far longer than an example that can be shrunk."""
    draw = random.Random(seed)
    walk = AnyOrder()

    def tokens(most: int) -> list[int]:
        return draw.choices((0, 1), weights=(4, 1), k=draw.randint(1, most))

    steps: dict[Callable[[], None], int] = {
        lambda: walk.open(draw.choice("ab"), tokens(7), draw.choice([None, "old", "new"])): 6,
        lambda: walk.append(draw.randrange(20), tokens(3), draw.random() < 0.7): 6,
        lambda: walk.fork(draw.randrange(20), draw.choice("ab"), draw.random() < 0.5): 3,
        lambda: walk.truncate(draw.randrange(20), draw.randrange(12)): 3,
        lambda: walk.free_entry(draw.randrange(20)): 8,
        lambda: walk.slab(draw.choice("ab"), draw.random() < 0.5): 1,
        lambda: walk.residual(draw.choice("ab"), draw.randint(1, 9)): 1,
        lambda: walk.feature(draw.randrange(5), draw.randint(1, 9)): 1,
        lambda: walk.free_request(draw.choice("ab")): 1,
        lambda: walk.evict(draw.randrange(4)): 1,
        lambda: walk.sync(draw.choice(["old", "new"])): 1,
    }
    needs_an_entry = list(steps)[1:5]
    for _ in range(1500):
        (step,) = draw.choices(list(steps), weights=list(steps.values()))
        if step in needs_an_entry and not walk.live:
            continue
        step()
        walk.every_block_has_the_owners_that_its_count_says()
        walk.every_entry_holds_its_own_content()
        walk.the_budget_adds_up()
    assert walk.pool.hit_tokens > 50
    walk.teardown()


# -- requests


@pytest.fixture
def manager() -> CacheManager:
    return CacheManager(CAPACITY)


def chunk() -> Tensor:
    return torch.zeros(SLAB.chunk_shape)


def test_freeing_a_request_returns_all_of_it_and_nothing_of_others(manager: CacheManager) -> None:
    pool = manager.paged_pool("lm", PAGED)
    for request in ("a", "b"):
        caches = manager.allocate(request)
        caches.keep_residual("conditional", "residual", torch.ones(2), tag=0)
        caches.slab("conditional", SLAB).append(0, chunk(), chunk())
        entry = caches.paged(pool, "conditional", [1, 2, 3], root=None)
        for layer in range(PAGED.layers):
            pool.append(entry, layer, *content(None, [1, 2, 3], layer))
    whole = manager.stats().request_bytes
    assert whole == 2 * (8 + SLAB.slab_bytes + 2 * PAGED.block_bytes)
    manager.free("a")
    assert manager.stats().request_bytes == whole // 2
    assert manager.residual.get("b", "conditional", "residual", tag=0) is not None
    assert pool.entry("b", "conditional").length == 3
    manager.free("a")
    manager.free("b")
    assert manager.stats().request_bytes == 0
    assert manager.stats().requests == 0


def test_a_freed_request_reaches_nothing(manager: CacheManager) -> None:
    caches = manager.allocate("a")
    with pytest.raises(UserError, match="has its caches already"):
        manager.allocate("a")
    manager.free("a")
    again = manager.allocate("a")
    with pytest.raises(UserError, match="'a' was freed"):
        caches.residual("main", "residual", tag=0)
    assert again.residual("main", "residual", tag=0) is None


def test_a_pool_is_made_once_and_counts_whole(manager: CacheManager) -> None:
    pool = manager.paged_pool("lm", PAGED)
    assert manager.paged_pool("lm", PAGED) is pool
    assert manager.stats().reserved_bytes == PAGED.pool_bytes
    with pytest.raises(UserError, match="as it was made"):
        manager.paged_pool("lm", replace(PAGED, blocks=2))
    with pytest.raises(CacheExhausted, match="paged KV pool 'another' of 9 blocks"):
        manager.paged_pool("another", PAGED)
    manager.allocate("a").paged(pool, "main", [1], root=None)
    with pytest.raises(UserError, match="1 entries are open"):
        manager.drop_pool("lm")
    manager.free("a")
    manager.drop_pool("lm")
    assert manager.stats().reserved_bytes == 0
    with pytest.raises(UserError, match="got pool 'lm'"):
        manager.drop_pool("lm")


# -- weights


@pytest.fixture(scope="module")
def loaded(wan_folder: Path) -> ModelInstance:
    return ModelInstance.load(card_of(wan_folder))


@pytest.fixture
def instance(loaded: ModelInstance) -> Iterator[ModelInstance]:
    """Residents of its own, so that a bump stays in its test."""
    yield loaded.view({cid: replace(resident) for cid, resident in loaded.residents.items()})


def denoise_key(instance: ModelInstance) -> CacheKey:
    call = ModelCall("transformer", "denoise", {"latents": torch.zeros(1, 4)})
    return CacheKey.of(
        instance,
        component="transformer",
        loop=next(iter(instance.card.loops)),
        plan=WorkPlan(WorkUnit.DIFFUSION_STEP, (call,), "denoise"),
        branch="main",
        params=PARAMS,
        inputs={"latents": torch.zeros(2)},
        step=0,
    )


def test_a_sync_of_the_transformer_leaves_the_text_encoders_entries(instance: ModelInstance) -> None:
    manager = CacheManager(CAPACITY)
    text = feature_key(instance, ("text_encoder", "encode", "prompt"))
    pixels = feature_key(instance, ("transformer", "embed", "prompt"))
    manager.features.put(text, torch.ones(1))
    manager.features.put(pixels, torch.ones(1))
    manager.allocate("a").keep_residual("main", "residual", torch.ones(1), tag=denoise_key(instance))
    pool = manager.paged_pool("lm", PAGED)
    prompt = [1, 2, 3]
    for component in ("transformer", "text_encoder"):
        root = manager.prefix_root(instance, component)
        entry = pool.open(component, "main", prompt, root=root)
        for layer in range(PAGED.layers):
            pool.append(entry, layer, *content(None, prompt, layer))
        pool.close(component)
    assert pool.blocks.cached == 2

    instance.bump("transformer")
    manager.invalidate(instance, "transformer")

    assert manager.features.get(text) is not None
    assert manager.features.get(pixels) is None
    assert (manager.residual.bytes, len(manager.residual)) == (0, 0)
    assert pool.blocks.cached == 1
    text_root = manager.prefix_root(instance, "text_encoder")
    assert pool.open("t", "main", prompt, root=text_root).cached == 2
    assert pool.open("d", "main", prompt, root=manager.prefix_root(instance, "transformer")).cached == 0


def test_a_bump_alone_is_a_miss_before_anything_is_dropped(instance: ModelInstance) -> None:
    manager = CacheManager(CAPACITY)
    caches = manager.allocate("a")
    caches.keep_residual("main", "residual", torch.ones(1), tag=denoise_key(instance))
    assert caches.residual("main", "residual", tag=denoise_key(instance)) is not None
    before = manager.prefix_root(instance, "transformer")
    instance.bump("transformer")
    assert caches.residual("main", "residual", tag=denoise_key(instance)) is None
    assert manager.prefix_root(instance, "transformer") != before


def test_statistics_count_hits_and_misses_of_every_cache(manager: CacheManager) -> None:
    pool = manager.paged_pool("lm", PAGED)
    caches = manager.allocate("a")
    caches.keep_residual("main", "residual", torch.ones(1), tag=0)
    caches.residual("main", "residual", tag=0)
    caches.residual("main", "residual", tag=1)
    manager.features.get("absent")
    for label in ("first", "second"):
        entry = caches.paged(pool, label, [1, 2, 3], root="r")
        for layer in range(PAGED.layers):
            k, v = content(None, [1, 2, 3], layer)
            pool.append(entry, layer, k[entry.cached :], v[entry.cached :])
    stats = manager.stats()
    assert (stats.residual_hits, stats.residual_misses) == (1, 1)
    assert (stats.feature_hits, stats.feature_misses) == (0, 1)
    assert (stats.prefix_hit_tokens, stats.prefix_missed_tokens) == (2, 4)
    assert (stats.paged_blocks, stats.paged_blocks_in_use, stats.paged_blocks_cached) == (9, 3, 0)
