"""Residual cache and the byte budget that it shares."""

from __future__ import annotations

import pytest
import torch

from inference.cache.budget import ByteBudget, CacheExhausted
from inference.cache.feature import FeatureCache
from inference.cache.residual import ResidualCache


def test_requests_and_branches_never_see_each_others() -> None:
    cache = ResidualCache(ByteBudget(1000))
    owners = [(request, branch) for request in ("a", "b") for branch in ("conditional", "unconditional")]
    for value, (request, branch) in enumerate(owners):
        for other in owners[value:]:
            assert cache.get(*other, "residual", tag=0) is None
        cache.put(request, branch, "residual", torch.full((3,), float(value)), tag=0)
    for value, (request, branch) in enumerate(owners):
        got = cache.get(request, branch, "residual", tag=0)
        assert got is not None
        assert got.tolist() == [value] * 3
        assert cache.get(request, branch, "input", tag=0) is None
    assert (cache.hits, cache.misses) == (4, 4 + 3 + 2 + 1 + 4)


def test_another_tag_is_a_miss() -> None:
    cache = ResidualCache(ByteBudget(1000))
    cache.put("a", "main", "residual", torch.ones(1), tag=("transformer", 1))
    assert cache.get("a", "main", "residual", tag=("transformer", 2)) is None
    assert cache.get("a", "main", "residual", tag=("transformer", 1)) is not None
    assert cache.drop(lambda tag: tag == ("transformer", 1)) == 4
    assert (cache.bytes, len(cache)) == (0, 0)


def test_what_is_kept_is_a_copy_without_graph_of_its_own_rows() -> None:
    merged = torch.zeros(8, 4, requires_grad=True) + 1
    budget = ByteBudget(1000)
    cache = ResidualCache(budget)
    cache.put("a", "main", "residual", merged[2:3], tag=0)
    with torch.no_grad():
        merged.zero_()
    got = cache.get("a", "main", "residual", tag=0)
    assert got is not None
    assert got.tolist() == [[1.0] * 4]
    assert not got.requires_grad
    assert got.untyped_storage().nbytes() == cache.bytes == budget.used_bytes == 16


def test_a_request_frees_its_own_bytes() -> None:
    budget = ByteBudget(1000)
    cache = ResidualCache(budget)
    cache.put("a", "conditional", "residual", torch.zeros(10), tag=0)
    cache.put("a", "unconditional", "residual", torch.zeros(20), tag=0)
    cache.put("b", "conditional", "residual", torch.zeros(5), tag=0)
    cache.put("a", "conditional", "residual", torch.zeros(7), tag=0)
    assert cache.bytes == budget.used_bytes == 4 * (7 + 20 + 5)
    assert cache.close("a") == 4 * 27
    assert cache.close("a") == 0
    assert cache.bytes == budget.used_bytes == 20
    assert cache.get("b", "conditional", "residual", tag=0) is not None


def test_a_full_budget_says_so_and_keeps_nothing_of_the_new() -> None:
    budget = ByteBudget(100)
    cache = ResidualCache(budget)
    cache.put("a", "main", "residual", torch.zeros(20), tag=0)
    with pytest.raises(CacheExhausted, match=r"got 24 bytes to keep, expected at most 20 \(80 of 100 are in use\)"):
        cache.put("b", "main", "residual", torch.zeros(6), tag=0)
    assert (cache.bytes, budget.used_bytes, len(cache)) == (80, 80, 1)


def test_features_make_way_for_a_request_oldest_first() -> None:
    budget = ByteBudget(100)
    features = FeatureCache(100, budget)
    cache = ResidualCache(budget)
    for name in "abc":
        features.put(name, torch.zeros(8))
    assert features.get("a") is not None
    cache.put("request", "main", "residual", torch.zeros(10), tag=0)
    assert budget.used_bytes == 40 + features.bytes <= 100
    assert [name for name in "abc" if features.get(name) is not None] == ["a"]
    features.put("large", torch.zeros(16))
    assert features.get("large") is None
    assert features.get("a") is not None
    features.put("fits by pushing out", torch.zeros(15))
    assert [name for name in ("a", "fits by pushing out") if features.get(name) is not None] == ["fits by pushing out"]
    features.clear()
    assert budget.used_bytes == cache.bytes == 40
