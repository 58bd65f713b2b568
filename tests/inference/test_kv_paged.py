"""Paged KV: the pool against plain lists, and a Qwen3 that decodes through it against transformers' DynamicCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from cards.errors import UserError
from inference.cache.blocks import PoolExhausted
from inference.cache.paged import PagedEntry, PagedPool, PagedSpec
from inference.cache.paged_transformers import PagedCache, paged_spec

LAYERS, SIZE, HEADS, WIDTH = 2, 4, 2, 3


def pool_of(blocks: int = 8) -> PagedPool:
    return PagedPool(PagedSpec(layers=LAYERS, blocks=blocks, block_tokens=SIZE, kv_heads=HEADS, head_dim=WIDTH))


def kv(tokens: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values that tell their token, layer, head and column."""
    base_T = torch.tensor(list(tokens), dtype=torch.float32) * 10 + layer
    k_TKD = base_T[:, None, None] + torch.arange(HEADS * WIDTH).reshape(HEADS, WIDTH) / 100
    return k_TKD, -k_TKD


def append(pool: PagedPool, entry: PagedEntry, tokens: Sequence[int]) -> None:
    """A forward's worth: all layers."""
    for layer in range(LAYERS):
        pool.append(entry, layer, *kv(tokens, layer))


def holds(pool: PagedPool, entry: PagedEntry, tokens: Sequence[int]) -> bool:
    if entry.length != len(tokens):
        return False
    return all(
        torch.equal(got, expected)
        for layer in range(LAYERS)
        for got, expected in zip(pool.gather(entry, layer), kv(tokens, layer), strict=True)
    )


def prefilled(pool: PagedPool, name: str, tokens: Sequence[int], root: str | None = "root") -> PagedEntry:
    entry = pool.open(name, "main", tokens, root=root)
    append(pool, entry, tokens[entry.cached :])
    return entry


# -- the pool by itself


def test_what_was_appended_is_gathered_across_block_borders() -> None:
    pool = pool_of()
    entry = pool.open("a", "main", [], root=None)
    for tokens in ([1], [2, 3, 4], [5, 6, 7, 8, 9], [10]):
        append(pool, entry, tokens)
    assert holds(pool, entry, range(1, 11))
    assert len(entry.table) == 3
    assert all(tensor.is_contiguous() for tensor in pool.gather(entry, 1))
    assert pool.bytes == 3 * 2 * LAYERS * SIZE * HEADS * WIDTH * 4


def test_branches_and_namespaces_are_apart() -> None:
    pool = pool_of()
    conditional = pool.open("a", "conditional", [1, 2], root="r")
    unconditional = pool.open("a", "unconditional", [3], root="r")
    other = pool.open("b", "conditional", [4], root="r")
    for entry in (conditional, unconditional, other):
        append(pool, entry, entry.tokens)
    assert holds(pool, conditional, [1, 2])
    assert holds(pool, unconditional, [3])
    assert pool.entry("b", "conditional") is other
    with pytest.raises(UserError, match="is open already"):
        pool.open("a", "conditional", [1], root="r")
    assert pool.close("a") == 2
    assert pool.close("a") == 0
    assert holds(pool, other, [4])
    with pytest.raises(UserError, match="'a' has no entry 'conditional'; it has: none"):
        pool.entry("a", "conditional")
    with pytest.raises(UserError, match="was freed"):
        pool.gather(conditional, 0)


def test_a_prefix_is_shared_by_full_blocks_while_in_use_and_after() -> None:
    pool = pool_of()
    prompt = list(range(1, 11))
    first = prefilled(pool, "a", prompt)
    second = pool.open("b", "main", [*prompt[:8], 99, 98], root="root")
    assert (first.cached, second.cached, second.length) == (0, 8, 8)
    assert second.table == first.table[:2]
    append(pool, second, [99, 98])
    assert holds(pool, second, [*prompt[:8], 99, 98])
    assert holds(pool, first, prompt)
    assert pool.blocks.in_use == 4
    pool.close("a")
    pool.close("b")
    assert (pool.blocks.in_use, pool.blocks.cached, pool.bytes) == (0, 2, 0)
    third = pool.open("c", "main", prompt, root="root")
    assert third.cached == 8
    assert (pool.hit_tokens, pool.missed_tokens) == (16, 10 + 2 + 2)


def test_the_last_prompt_token_is_always_left_to_compute() -> None:
    pool = pool_of()
    prompt = list(range(8))
    prefilled(pool, "a", prompt)
    assert pool.open("b", "main", prompt, root="root").cached == 4
    assert pool.open("c", "main", [*prompt, 8], root="root").cached == 8


def test_another_root_or_none_or_another_history_shares_nothing() -> None:
    pool = pool_of(16)
    prompt = list(range(1, 10))
    prefilled(pool, "a", prompt, root="version 1")
    assert pool.open("b", "main", prompt, root="version 2").cached == 0
    assert pool.open("c", "main", prompt, root=None).cached == 0
    assert pool.open("d", "main", [0, *prompt[1:]], root="version 1").cached == 0
    assert pool.open("e", "main", [*prompt[:4], 0, *prompt[5:]], root="version 1").cached == 4
    prefilled(pool, "f", prompt, root=None)
    assert pool.open("g", "main", prompt, root="version 2").cached == 0


def test_token_ids_do_not_run_together_in_the_hash() -> None:
    pool = pool_of()
    prefilled(pool, "a", [1, 11, 1, 1, 5])
    assert pool.open("b", "main", [11, 1, 1, 1, 5], root="root").cached == 0


def test_recorded_answers_are_a_prefix_of_the_next_turn() -> None:
    pool = pool_of()
    entry = prefilled(pool, "a", [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        append(pool, entry, [token])
    assert pool.open("b", "main", [1, 2, 3, 4, 5], root="root").cached == 0
    pool.record(entry, [4, 5, 6, 7, 8])
    assert pool.open("c", "main", [*range(1, 9), 9], root="root").cached == 8


def test_blocks_are_found_only_once_all_layers_hold_them() -> None:
    pool = pool_of()
    prompt = [1, 2, 3, 4, 5]
    entry = pool.open("a", "main", prompt, root="root")
    pool.append(entry, 0, *kv(prompt, 0))
    assert entry.length == 0
    assert pool.open("b", "main", prompt, root="root").cached == 0
    pool.append(entry, 1, *kv(prompt, 1))
    assert pool.open("c", "main", prompt, root="root").cached == 4


def test_a_fork_costs_no_block_until_it_is_written() -> None:
    pool = pool_of()
    prompt = list(range(1, 7))
    first = prefilled(pool, "a", prompt)
    twin = pool.fork(first, "twin")
    assert pool.blocks.in_use == 2
    append(pool, twin, [50])
    assert (pool.blocks.in_use, twin.table[0] == first.table[0], twin.table[1] == first.table[1]) == (3, True, False)
    append(pool, first, [60])
    assert pool.blocks.in_use == 3  # the twin left: the last block is the first's alone and is written in place
    assert holds(pool, first, [*prompt, 60])
    assert holds(pool, twin, [*prompt, 50])
    session = pool.fork(twin, "main", namespace="session")
    pool.close("a")
    assert holds(pool, session, [*prompt, 50])


def test_a_fork_within_a_forward_is_refused() -> None:
    pool = pool_of()
    entry = pool.open("a", "main", [1], root=None)
    pool.append(entry, 0, *kv([1], 0))
    with pytest.raises(UserError, match="within a forward"):
        pool.fork(entry, "twin")


def test_truncated_blocks_are_not_found_under_their_old_content() -> None:
    pool = pool_of()
    prompt = list(range(1, 10))
    entry = prefilled(pool, "a", prompt)
    pool.truncate(entry, 6)
    append(pool, entry, [70, 71, 72])
    assert holds(pool, entry, [*prompt[:6], 70, 71, 72])
    assert pool.open("b", "main", prompt, root="root").cached == 4
    pool.record(entry, [70, 71, 72])
    assert pool.open("c", "main", [*prompt[:6], 70, 71, 72], root="root").cached == 8


def test_truncating_a_shared_block_leaves_the_others_content() -> None:
    pool = pool_of()
    prompt = list(range(1, 10))
    first = prefilled(pool, "a", prompt)
    second = prefilled(pool, "b", prompt)
    pool.truncate(second, 5)
    append(pool, second, [80])
    assert holds(pool, first, prompt)
    assert holds(pool, second, [*prompt[:5], 80])


def test_what_follows_a_truncation_is_found_under_its_own_history() -> None:
    pool = pool_of(12)
    prompt, new = list(range(1, 10)), list(range(30, 43))
    prefilled(pool, "a", prompt)
    entry = prefilled(pool, "b", prompt)
    pool.truncate(entry, 0)
    append(pool, entry, new)
    pool.record(entry, new)
    assert pool.open("c", "main", [*prompt[:8], *new[8:12], 0], root="root").cached == 8
    found = pool.open("d", "main", [*new[:12], 0], root="root")
    assert holds(pool, found, new[:12])


def test_a_forward_that_failed_midway_is_undone() -> None:
    pool = pool_of()
    entry = prefilled(pool, "a", [1, 2, 3])
    pool.append(entry, 0, *kv([4, 5, 6], 0))
    pool.rollback(entry)
    assert holds(pool, entry, [1, 2, 3])
    assert pool.blocks.in_use == 1
    append(pool, entry, [7])
    assert holds(pool, entry, [1, 2, 3, 7])


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    pool = pool_of(6)
    prompts = {name: [start + i for i in range(9)] for name, start in (("a", 100), ("b", 200))}
    for name, prompt in prompts.items():
        prefilled(pool, name, prompt)
    pool.close("a")
    pool.close("b")
    assert pool.blocks.cached == 4
    assert pool.open("touch", "main", prompts["a"], root="root").cached == 8
    pool.close("touch")
    entry = pool.open("c", "main", [], root=None)
    append(pool, entry, range(12))  # two free blocks and one cached one
    assert pool.open("d", "main", prompts["b"], root="root").cached == 4
    assert pool.open("e", "main", prompts["a"], root="root").cached == 8


def test_exhaustion_is_typed_has_figures_and_changes_nothing() -> None:
    pool = pool_of(3)
    first = prefilled(pool, "a", [1, 2, 3, 4, 5])
    second = pool.open("b", "main", [], root=None)
    with pytest.raises(PoolExhausted, match=r"need of 2 blocks, expected at most 1 \(2 of 3 are in use\)"):
        pool.append(second, 0, *kv(range(5), 0))
    assert (second.length, pool.blocks.in_use) == (0, 2)
    append(pool, second, range(4))
    twin = pool.fork(first, "twin")
    with pytest.raises(PoolExhausted):
        append(pool, twin, [6])  # its last block is shared and there is none to copy to
    assert holds(pool, twin, [1, 2, 3, 4, 5])
    pool.close("b")
    append(pool, twin, [6])
    assert holds(pool, twin, [1, 2, 3, 4, 5, 6])


def test_a_sync_forgets_a_root_and_leaves_open_entries_whole() -> None:
    pool = pool_of()
    old, other = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]
    entry = prefilled(pool, "a", old, root="old")
    prefilled(pool, "b", other, root="other")
    pool.close("b")
    assert pool.forget_root("old") == 1
    assert holds(pool, entry, old)
    assert pool.open("c", "main", old, root="old").cached == 0
    assert pool.open("d", "main", other, root="other").cached == 4
    pool.close("a")
    assert pool.blocks.cached == 0


def test_wrong_tensors_are_named() -> None:
    pool = pool_of()
    entry = pool.open("a", "main", [], root=None)
    k, v = kv([1], 0)
    with pytest.raises(UserError, match=r"expected \(T, K, D\) = \[T, 2, 3\]"):
        pool.append(entry, 0, k[:, :1], v[:, :1])
    with pytest.raises(UserError, match=r"torch\.float16"):
        pool.append(entry, 0, k.half(), v.half())
    with pytest.raises(UserError, match="gradient"):
        pool.append(entry, 0, k.requires_grad_(), v)
    with pytest.raises(UserError, match=r"expected 0 \.\. 0"):
        pool.truncate(entry, 1)
    with pytest.raises(UserError, match="another pool"):
        pool_of().append(entry, 0, k, v)


# -- a real model through the pool


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return Qwen3ForCausalLM(config).eval()


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_pool(model: Qwen3ForCausalLM, blocks: int = 24) -> PagedPool:
    return PagedPool(paged_spec(model.config, blocks=blocks, block_tokens=SIZE))


@torch.no_grad()
def oracle(model: Qwen3ForCausalLM, pieces: Sequence[Sequence[int]], steps: int) -> tuple[list[int], list[Tensor]]:
    """Greedy decode with transformers' own cache, the prompt fed in ``pieces``: tokens, and the logits of each step."""
    cache = DynamicCache(config=model.config)
    for piece in pieces:
        logits = model(torch.tensor([list(piece)]), cache=cache, use_cache=True).logits[0, -1]
    tokens, seen = [], []
    for _ in range(steps):
        seen.append(logits)
        tokens.append(int(logits.argmax()))
        logits = model(torch.tensor([tokens[-1:]]), cache=cache, use_cache=True).logits[0, -1]
    return tokens, seen


@torch.no_grad()
def paged(
    model: Qwen3ForCausalLM, pool: PagedPool, entry: PagedEntry, pieces: Sequence[Sequence[int]], steps: int
) -> tuple[list[int], list[Tensor]]:
    """The same through the pool."""
    cache = PagedCache(pool, [entry])
    for piece in pieces:
        logits = model(**cache.inputs([piece])).logits[0, -1]
    tokens, seen = [], []
    for _ in range(steps):
        seen.append(logits)
        tokens.append(int(logits.argmax()))
        logits = model(**cache.inputs([tokens[-1:]])).logits[0, -1]
    return tokens, seen


def same(got: tuple[list[int], list[Tensor]], expected: tuple[list[int], list[Tensor]]) -> bool:
    return got[0] == expected[0] and all(torch.equal(a, b) for a, b in zip(got[1], expected[1], strict=True))


@pytest.mark.parametrize("length", [1, 4, 7, 13])
def test_decode_through_the_pool_is_dynamic_cache_bit_for_bit(model: Qwen3ForCausalLM, length: int) -> None:
    pool = model_pool(model)
    prompt = prompt_of(length, length)
    entry = pool.open("a", "main", prompt, root="r")
    assert same(paged(model, pool, entry, [prompt], 9), oracle(model, [prompt], 9))
    assert entry.length == length + 9


def test_decode_is_the_same_after_others_were_freed_and_blocks_reused(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model, blocks=8)
    for seed in range(4):
        prompt = prompt_of(seed, 9)
        stays = pool.open(("stays", seed), "main", prompt, root=None)
        paged(model, pool, stays, [prompt], 2)
        if seed:
            pool.close(("stays", seed - 1))
    prompt = prompt_of(11, 10)
    entry = pool.open("a", "main", prompt, root="r")
    assert same(paged(model, pool, entry, [prompt], 6), oracle(model, [prompt], 6))
    assert entry.table != list(range(entry.table[0], entry.table[0] + len(entry.table)))  # scattered over the pool


def test_decode_on_a_shared_prefix_is_dynamic_cache_with_the_prompt_cut_there(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model)
    system, question = prompt_of(1, 8), prompt_of(2, 5)
    first = [*system, *prompt_of(3, 4)]
    paged(model, pool, pool.open("a", "main", first, root="r"), [first[:8], first[8:]], 5)
    pool.close("a")
    entry = pool.open("b", "main", [*system, *question], root="r")
    assert entry.cached == 8
    assert same(paged(model, pool, entry, [question], 6), oracle(model, [system, question], 6))


def test_prompts_computed_a_block_at_a_time_do_not_depend_on_what_is_cached(model: Qwen3ForCausalLM) -> None:
    def run(pool: PagedPool, name: str, prompt: list[int], root: str | None) -> tuple[list[int], list[Tensor]]:
        entry = pool.open(name, "main", prompt, root=root)
        pieces = [prompt[start : start + SIZE] for start in range(entry.cached, len(prompt), SIZE)]
        return paged(model, pool, entry, pieces, 4)

    pool = model_pool(model, blocks=32)
    system = prompt_of(1, 8)
    prompts = [[*system, *prompt_of(seed, 2 + seed)] for seed in range(4)]
    for index, prompt in enumerate(prompts):
        assert same(run(pool, f"shared {index}", prompt, "r"), run(model_pool(model), "alone", prompt, None))
    assert pool.hit_tokens == 3 * 8


def test_forks_go_their_own_ways(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model)
    prompt = prompt_of(5, 6)
    entry = pool.open("a", "main", prompt, root="r")
    with torch.no_grad():
        model(**PagedCache(pool, [entry]).inputs([prompt]))
    twin = pool.fork(entry, "twin")
    for own, token in ((entry, 7), (twin, 9)):
        got = paged(model, pool, own, [[token]], 5)
        assert same(got, oracle(model, [prompt, [token]], 5))


def test_rejected_drafts_are_cropped(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model)
    prompt, drafts = prompt_of(6, 6), [3, 4, 5]
    entry = pool.open("a", "main", prompt, root="r")
    cache = PagedCache(pool, [entry])
    with torch.no_grad():
        model(**cache.inputs([prompt]))
        model(**cache.inputs([drafts]))
    cache.crop(-3)
    assert entry.length == 6
    assert same(paged(model, pool, entry, [[8]], 4), oracle(model, [prompt, [8]], 4))


def test_a_batch_of_different_lengths_equals_each_alone(model: Qwen3ForCausalLM) -> None:
    """Left-padded prefill and decode, one row on a shared prefix. Rounding alone differs: other shapes of the same
    sums, so the tokens are equal and the logits within float32's last digits."""
    pool = model_pool(model)
    prompts = [prompt_of(1, 3), prompt_of(2, 9), prompt_of(3, 6)]
    before = pool.open("before", "main", prompts[1], root="r")
    paged(model, pool, before, [prompts[1]], 0)
    entries = [pool.open(name, "main", prompt, root="r") for name, prompt in zip("abc", prompts, strict=True)]
    assert [entry.cached for entry in entries] == [0, 8, 0]
    cache = PagedCache(pool, entries)
    rows = [prompt[entry.cached :] for prompt, entry in zip(prompts, entries, strict=True)]
    outputs: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in prompts]
    with torch.no_grad():
        for _ in range(6):
            logits = model(**cache.inputs(rows)).logits[:, -1]
            rows = [[int(row.argmax())] for row in logits]
            for (tokens, seen), row, new in zip(outputs, logits, rows, strict=True):
                tokens += new
                seen.append(row)
    largest = 0.0
    for prompt, (tokens, seen) in zip(prompts, outputs, strict=True):
        expected = oracle(model, [prompt], 6)
        assert tokens == expected[0]
        largest = max(largest, *(float((a - b).abs().max()) for a, b in zip(seen, expected[1], strict=True)))
    print(f"largest difference of batched logits: {largest:.1e}")
    assert largest < 1e-5
    assert [entry.length for entry in entries] == [3 + 5, 9 + 5, 6 + 5]


def test_equal_lengths_need_no_mask_and_equal_a_batched_dynamic_cache(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model)
    prompts = [prompt_of(1, 5), prompt_of(2, 5)]
    entries = [pool.open(name, "main", prompt, root=None) for name, prompt in zip("ab", prompts, strict=True)]
    cache, reference = PagedCache(pool, entries), DynamicCache(config=model.config)
    rows = prompts
    with torch.no_grad():
        for _ in range(5):
            arguments = cache.inputs(rows)
            assert "attention_mask" not in arguments
            got = model(**arguments).logits
            expected = model(torch.tensor(rows), cache=reference, use_cache=True).logits
            assert torch.equal(got, expected)
            rows = [[int(row.argmax())] for row in got[:, -1]]


def test_generate_takes_the_cache(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model)
    prompt = prompt_of(9, 7)
    entry = pool.open("a", "main", prompt, root="r")
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor([prompt])
    expected = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, cache=PagedCache(pool, [entry]), **settings), expected)
    assert entry.length == 7 + 8 - 1


def test_a_batch_that_runs_out_midway_is_rolled_back(model: Qwen3ForCausalLM) -> None:
    pool = model_pool(model, blocks=4)
    prompts = [prompt_of(1, 8), prompt_of(2, 7)]
    entries = [pool.open(name, "main", prompt, root="r") for name, prompt in zip("ab", prompts, strict=True)]
    cache = PagedCache(pool, entries)
    with torch.no_grad():
        model(**cache.inputs(prompts))
        kept = [pool.gather(entry, 1)[0] for entry in entries]
        with pytest.raises(PoolExhausted):
            model(**cache.inputs([[1, 2], [3, 4]]))
    cache.rollback()
    assert [entry.length for entry in entries] == [8, 7]
    assert all(torch.equal(pool.gather(entry, 1)[0], k) for entry, k in zip(entries, kept, strict=True))
    pool.close("a")
    assert paged(model, pool, entries[1], [[3]], 2)[0] == oracle(model, [prompts[1], [3]], 2)[0]


def test_attention_that_is_not_full_is_refused(model: Qwen3ForCausalLM) -> None:
    config = Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(UserError, match="got layers of full_attention, sliding_attention"):
        paged_spec(config, blocks=1)
    with pytest.raises(UserError, match="one token or more for each of 1"):
        pool = model_pool(model)
        PagedCache(pool, [pool.open("a", "main", [1], root=None)]).inputs([[]])
