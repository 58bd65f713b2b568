"""The feature cache: least recently used out first, bounded in bytes."""

from __future__ import annotations

import pytest
import torch

from inference.cache.feature import FeatureCache


def tensor(bytes_: int) -> torch.Tensor:
    return torch.zeros(bytes_, dtype=torch.uint8)


def test_the_least_recently_used_entry_leaves_first() -> None:
    cache = FeatureCache(30)
    for key in "abc":
        cache.put(key, tensor(10))
    assert cache.get("a") is not None
    cache.put("d", tensor(10))
    assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]
    assert cache.bytes == 30


def test_a_large_entry_pushes_out_as_many_as_it_needs() -> None:
    cache = FeatureCache(30)
    for key in "abc":
        cache.put(key, tensor(10))
    cache.put("d", tensor(15))
    assert [key for key in "abcd" if cache.get(key) is not None] == ["c", "d"]
    assert cache.bytes == 25


def test_sizes_are_bytes_not_elements() -> None:
    cache = FeatureCache(100)
    cache.put("a", torch.zeros(20, dtype=torch.float32))
    cache.put("b", torch.zeros(20, dtype=torch.float16))
    assert cache.bytes == 40
    assert cache.get("a") is None


def test_what_never_fits_pushes_nothing_out() -> None:
    cache = FeatureCache(30)
    cache.put("a", tensor(30))
    cache.put("b", tensor(31))
    assert len(cache) == 1
    assert cache.get("a") is not None


def test_a_capacity_of_zero_keeps_nothing() -> None:
    cache = FeatureCache(0)
    cache.put("a", tensor(1))
    assert (len(cache), cache.bytes, cache.get("a")) == (0, 0, None)


def test_putting_a_key_again_counts_it_once() -> None:
    cache = FeatureCache(30)
    cache.put("a", tensor(10))
    cache.put("a", tensor(10))
    assert (len(cache), cache.bytes) == (1, 10)


def test_hits_and_misses_are_counted_and_a_clear_empties() -> None:
    cache = FeatureCache(30)
    cache.put("a", tensor(10))
    cache.get("a")
    cache.get("b")
    assert (cache.hits, cache.misses) == (1, 1)
    cache.clear()
    assert (len(cache), cache.bytes, cache.get("a")) == (0, 0, None)


@pytest.mark.parametrize("count", [1, 7, 50])
def test_the_bound_holds_whatever_comes(count: int) -> None:
    cache = FeatureCache(64)
    generator = torch.Generator().manual_seed(count)
    for index in range(count):
        cache.put(index, tensor(int(torch.randint(1, 40, (), generator=generator))))
        assert cache.bytes <= 64
    assert len(cache) > 0
