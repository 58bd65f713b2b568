"""Advantages against closed forms: hand-computed tables, identities that hold for every input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cards.errors import UserError
from methods.advantages import drop_zero_groups, group_advantages, optimality_probability

NAN = float("nan")
TABLES = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.floats(-100, 100) | st.just(NAN)
)


def test_group_std_closed_form():
    advantages_GK, valid_GK = group_advantages([[1.0, 3.0], [0.0, 10.0]], std="group", eps=1e-4)
    np.testing.assert_allclose(advantages_GK, [[-1 / 1.0001, 1 / 1.0001], [-5 / 5.0001, 5 / 5.0001]], rtol=1e-14)
    assert valid_GK.all()


def test_batch_std_is_of_the_raw_rewards():
    # Group-centred rewards are +-1 throughout (std 1); raw ones are 1, 3, 11, 13 with variance 1 + 5^2.
    advantages_GK, _ = group_advantages([[1.0, 3.0], [11.0, 13.0]], std="batch", eps=1e-4)
    expected = 1 / (np.sqrt(26) + 1e-4)
    np.testing.assert_allclose(advantages_GK, [[-expected, expected]] * 2, rtol=1e-14)


def test_default_is_batch_and_takes_torch():
    rewards_GK = torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_array_equal(group_advantages(rewards_GK)[0], group_advantages(rewards_GK.numpy(), std="batch")[0])


@pytest.mark.parametrize("std", ["batch", "group"])
def test_failed_sample_enters_neither_mean_nor_std(std):
    with_hole, valid_GK = group_advantages([[1.0, NAN, 4.0], [2.0, 2.5, np.inf]], std=std)
    without, _ = group_advantages([[1.0, 4.0], [2.0, 2.5]], std=std)
    np.testing.assert_array_equal(with_hole[valid_GK].reshape(2, 2), without)
    np.testing.assert_array_equal(valid_GK, [[True, False, True], [True, True, False]])
    assert (with_hole[~valid_GK] == 0.0).all()


@pytest.mark.parametrize("std", ["batch", "group"])
def test_equal_rewards_give_exactly_zero(std):
    # 0.1 three times: the float mean is not 0.1, so a plain R - mean is not zero.
    assert np.mean([0.1] * 3) != 0.1
    advantages_GK, _ = group_advantages([[0.1] * 3, [1.0, 2.0, 7.0]], std=std)
    assert (advantages_GK[0] == 0.0).all()
    assert (advantages_GK[1] != 0.0).all()
    alone, _ = group_advantages([[0.1] * 3], std=std)
    assert (alone == 0.0).all()


def test_small_groups_give_zero():
    advantages_GK, valid_GK = group_advantages([[7.0, NAN], [NAN, NAN], [0.0, 1.0]], std="batch")
    assert (advantages_GK[:2] == 0.0).all()
    assert (advantages_GK[2] != 0.0).all()
    np.testing.assert_array_equal(valid_GK.sum(axis=1), [1, 0, 2])


@given(rewards_GK=TABLES, std=st.sampled_from(["batch", "group"]))
def test_every_group_sums_to_zero(rewards_GK, std):
    advantages_GK, valid_GK = group_advantages(rewards_GK, std=std)
    assert np.isfinite(advantages_GK).all()
    np.testing.assert_allclose(
        advantages_GK.sum(axis=1), 0.0, atol=1e-12 * max(1.0, float(np.abs(advantages_GK).sum())), rtol=0
    )
    r_GK = optimality_probability(advantages_GK)
    assert ((r_GK >= 0) & (r_GK <= 1)).all()
    assert (r_GK[~valid_GK] == 0.5).all()


@pytest.mark.parametrize("factor", [2.0, 1000.0])
def test_shift_and_scale_of_rewards_cancel(factor):
    rewards_GK = np.random.default_rng(0).normal(size=(4, 6))
    expected, _ = group_advantages(rewards_GK, eps=1e-12)
    got, _ = group_advantages(rewards_GK * factor + 3.0, eps=1e-12)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_optimality_probability_closed_form():
    got = optimality_probability([0.0, 5.0, -5.0, 2.5, -1.0, 99.0, -np.inf], a_max=5.0)
    np.testing.assert_array_equal(got, [0.5, 1.0, 0.0, 0.75, 0.4, 1.0, 0.0])
    assert optimality_probability(1.0, a_max=1.0) == 1.0


def test_drop_zero_groups():
    advantages_GK, _ = group_advantages([[0.1, 0.1, 0.1], [0.0, 1.0, 0.0], [NAN, NAN, 3.0]])
    np.testing.assert_array_equal(drop_zero_groups(advantages_GK), [False, True, False])


def test_bad_settings_are_user_errors():
    with pytest.raises(UserError, match=r"unknown advantage std 'global'.*batch, group"):
        group_advantages([[0.0, 1.0]], std="global")
    with pytest.raises(UserError, match=r"eps: got 0"):
        group_advantages([[0.0, 1.0]], eps=0)
    with pytest.raises(UserError, match=r"a_max: got 0"):
        optimality_probability([0.0], a_max=0)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        group_advantages([0.0, 1.0])
