"""Addressed randomness: a pure function of the address, normal, and independent between addresses."""

from __future__ import annotations

import hashlib

import torch
from scipy import stats

from inference.request_checks import MAX_SEED
from methods.random import address_seed, generator_at, noise_like


def test_a_seed_is_a_hash_of_its_address_alone() -> None:
    digest = hashlib.sha256(b"7/noise/3/1").digest()
    assert address_seed(7, "noise", 3, 1) == int.from_bytes(digest[:8], "big") // 2
    torch.manual_seed(123)  # the global generator has no say
    assert address_seed(7, "noise", 3, 1) == int.from_bytes(digest[:8], "big") // 2


def test_seeds_are_legal_and_differ_between_addresses() -> None:
    seeds = [address_seed(a, what, b) for a in range(12) for what in ("noise", "rollout") for b in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert address_seed(1, 23) != address_seed(12, 3)


def test_drawing_moves_no_other_generator() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    noise_like(torch.zeros(3), 0, "noise")
    generator_at(0, "sigma").seed()
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_repeats_at_its_address_and_nowhere_else() -> None:
    like = torch.zeros(4, 3, 8, 8, dtype=torch.float64)
    noise = noise_like(like, 0, "nft", 5, 2)
    assert noise.shape == like.shape and noise.dtype == torch.float32
    assert torch.equal(noise, noise_like(like, 0, "nft", 5, 2))
    for other in ((1, "nft", 5, 2), (0, "train", 5, 2), (0, "nft", 6, 2), (0, "nft", 5, 3)):
        assert not torch.equal(noise, noise_like(like, *other))


def test_noise_over_addresses_is_standard_normal_and_uncorrelated() -> None:
    rows = torch.stack([noise_like(torch.zeros(400), 0, "noise", step) for step in range(100)])
    assert stats.kstest(rows.flatten().double().numpy(), "norm").pvalue > 1e-3
    correlation = torch.corrcoef(rows) - torch.eye(100)
    assert correlation.abs().max() < 5.5 / 400**0.5  # 4950 pairs of standard deviation 1 / sqrt(400)
