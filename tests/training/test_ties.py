"""Groups whose advantages are all of one size, or all zero, through the code that the trainer runs on them."""

import numpy as np
import pytest
import torch
from training.fake_queue import algorithm, read
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_dppo.pruning import threshold_inclusion
from verl_dppo.training.refusals import EXACT_ESTIMATORS

SIZES = range(2, 65)
PAIRS = [(0, 1), (-1, 1), (0.1, 1), (0, 0.9)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
RATE = 0.9

each_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_estimator = pytest.mark.parametrize("estimator", EXACT_ESTIMATORS)
with_and_without_std = pytest.mark.parametrize("norm_by_std", [True, False])


def half_right(pair):
    """Return a group of each even size, half of it right; the order inside a group must not matter."""
    rng = np.random.default_rng(0)
    return [rng.permutation(np.repeat(pair, size // 2)).tolist() for size in SIZES if size % 2 == 0]


def flagged(full, **how):
    return int((threshold_inclusion(np.abs(full.advantage), full.group, RATE, **how) < 1).sum())


@with_and_without_std
@each_dtype
@each_pair
def test_the_threshold_flags_no_row_of_a_half_right_group(monkeypatch, pair, dtype, norm_by_std):
    full = read(monkeypatch, half_right(pair), algorithm("grpo", norm_by_std), dtype=dtype)
    assert full.has_advantage.all()
    assert flagged(full) == 0


@each_estimator
@each_pair
def test_nor_under_any_other_estimator(monkeypatch, pair, estimator):
    assert flagged(read(monkeypatch, half_right(pair), algorithm(estimator))) == 0


@each_dtype
@each_pair
def test_groups_of_equal_rewards_have_no_advantage(monkeypatch, pair, dtype):
    full = read(monkeypatch, [[value] * size for size in SIZES for value in pair], dtype=dtype)
    assert not full.has_advantage.any()


@each_estimator
@each_pair
def test_nor_have_they_under_any_other_estimator(monkeypatch, pair, estimator):
    full = read(monkeypatch, [[value] * size for size in (2, 6, 13) for value in pair], algorithm(estimator))
    assert not full.has_advantage.any()


@each_dtype
@each_pair
def test_one_different_reward_flags_the_others_and_not_itself(monkeypatch, pair, dtype):
    """What the tolerance must not hide, at the largest size too."""
    low, high = pair
    full = read(monkeypatch, [[high] + [low] * (size - 1) for size in SIZES if size > 2], dtype=dtype)
    alone = np.isin(np.arange(full.group.size), np.unique(full.group, return_index=True)[1])
    pi = threshold_inclusion(np.abs(full.advantage), full.group, RATE)
    assert (pi[alone] == 1).all()
    assert pi[~alone] == pytest.approx(1 - RATE)


class TestTheSameWithoutTheProvisions:
    def test_without_a_tolerance_rows_are_flagged_in_float32(self, monkeypatch):
        assert sum(flagged(read(monkeypatch, half_right(pair)), rtol=0) for pair in PAIRS) > 0

    def test_verls_own_advantage_of_equal_rewards_is_not_zero_in_float32(self, monkeypatch):
        full = read(monkeypatch, [[0.1] * size for size in SIZES])
        assert np.abs(full.advantage).max() > 1e-3

    def test_verls_own_advantage_in_bfloat16_is_of_two_sizes(self):
        rewards = torch.tensor([[0.1], [1.0], [0.1], [1.0]], dtype=torch.bfloat16)
        advantage, _ = compute_grpo_outcome_advantage(rewards, torch.ones(4, 1), ["u"] * 4)
        sizes = advantage[:, 0].abs().double().numpy()
        assert (threshold_inclusion(sizes, np.zeros(4), RATE) < 1).any()
