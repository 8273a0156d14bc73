from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from verl_dppo.pruning import NormModel, fixed_size_inclusion, neyman_inclusion, score_magnitude, threshold_inclusion

magnitudes = arrays(np.float64, st.integers(1, 60), elements=st.one_of(st.just(0.0), st.floats(1e-12, 1e12)))


@settings(max_examples=300, deadline=None)
@given(magnitudes, st.floats(0.01, 1.0), st.data())
def test_neyman_spends_exactly_the_budget_within_floor_and_one(magnitude, keep, data):
    cost = data.draw(arrays(np.float64, magnitude.size, elements=st.floats(1, 1e5)))
    pi = neyman_inclusion(magnitude, cost, keep)
    live = magnitude > 0
    assert (pi[~live] == 0).all()
    assert ((pi[live] >= keep / 4 - 1e-15) & (pi[live] <= 1)).all()
    assert (pi * cost).sum() == pytest.approx(keep * cost[live].sum(), rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(arrays(np.float64, st.integers(1, 60), elements=st.floats(1e-9, 1e9)), st.floats(0.001, 1.0), st.data())
def test_fixed_size_sums_to_the_size(magnitude, floor, data):
    size = data.draw(st.integers(1, magnitude.size))
    pi = fixed_size_inclusion(magnitude, size, floor)
    assert pi.sum() == pytest.approx(size, abs=1e-9)
    feasible = floor if floor * magnitude.size <= size else size / (2 * magnitude.size)
    assert (pi >= feasible - 1e-12).all()
    assert (pi <= 1).all()


def test_neyman_follows_magnitude_over_root_cost_between_the_bounds():
    magnitude, cost = np.array([1.0, 2.0, 4.0, 4.0]), np.array([1.0, 1.0, 1.0, 4.0])
    pi = neyman_inclusion(magnitude, cost, 0.4, floor=1e-6)
    assert pi / pi[0] == pytest.approx([1, 2, 4, 2])


def test_neyman_has_less_variance_than_any_nearby_allocation_of_the_same_budget():
    rng = np.random.default_rng(0)
    magnitude, cost = rng.lognormal(size=30), rng.lognormal(size=30)
    pi = neyman_inclusion(magnitude, cost, 0.5, floor=1e-3)

    def variance(p):
        return ((1 / p - 1) * magnitude**2).sum()

    free = np.flatnonzero((pi > 1e-3) & (pi < 1))
    for a, b in pairwise(free):
        moved = pi.copy()
        moved[a] += 1e-4 / cost[a]
        moved[b] -= 1e-4 / cost[b]
        assert variance(moved) > variance(pi)


def test_nothing_to_keep_is_not_an_error():
    assert neyman_inclusion([], [], 0.5).size == 0
    assert (neyman_inclusion([0.0, 0.0], [3.0, 4.0], 0.5) == 0).all()


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(keep):
    with pytest.raises(ValueError, match="must be in"):
        neyman_inclusion([1.0], [1.0], keep)


def test_an_infeasible_floor_is_refused_with_the_feasible_keep():
    with pytest.raises(ValueError, match=r"smallest feasible keep"):
        neyman_inclusion([1.0, 2.0], [1.0, 1.0], 0.3, floor=0.5)


def test_non_finite_values_are_refused():
    with pytest.raises(ValueError, match="finite"):
        neyman_inclusion([1.0, float("nan")], [1.0, 1.0], 0.5)
    with pytest.raises(ValueError, match="finite"):
        score_magnitude([1.0, float("inf")], [1.0, 1.0])


@pytest.mark.parametrize("size", [4, 6, 8, 12, 16, 18, 20, 22])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_half_right_is_not_below_its_own_mean(size, dtype):
    """Every |A| equals the mean there; without a tolerance, rounding drops all of them for some group sizes."""
    reward = np.repeat([0, 1], size // 2).astype(dtype)
    advantage = (reward - reward.mean()) / (reward.std(ddof=1) + dtype(1e-6))
    assert (threshold_inclusion(np.abs(advantage), np.zeros(size), 0.9) == 1).all()


def test_threshold_drops_the_majority_class_of_each_group():
    score, group = np.array([0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 0.5, 0.5]), np.repeat([7, 3], 4)
    assert threshold_inclusion(score, group, 0.75) == pytest.approx([0.25, 0.25, 0.25, 1, 1, 0.25, 0.25, 0.25])


def test_a_rate_of_one_is_refused():
    with pytest.raises(ValueError, match="no weight repairs"):
        threshold_inclusion([1.0], [0], 1.0)


def test_magnitude_of_each_aggregation_mode():
    advantage, length, surprise = [-2.0, 1.0], [4, 2], [16.0, 1.0]
    by_token = [2 * 16**0.625, 1.0]
    assert score_magnitude(advantage, length, surprise) == pytest.approx(by_token)
    assert score_magnitude(advantage, length, surprise, "seq-mean-token-mean") == pytest.approx(
        [by_token[0] / 4, by_token[1] / 2]
    )
    assert score_magnitude(advantage, length) == pytest.approx([2.0, 1.0])
    with pytest.raises(ValueError, match="median"):
        score_magnitude(advantage, length, surprise, "median")


def test_a_response_without_surprise_keeps_a_probability_and_an_empty_one_has_none():
    magnitude = score_magnitude([1.0, 1.0, 1.0], [5, 5, 0], [0.0, 2.0, 0.0])
    assert magnitude[0] > 0
    assert magnitude[2] == 0


def test_a_magnitude_that_underflows_is_not_taken_for_no_gradient():
    magnitude = score_magnitude([1.0, 1.0, 1e-300], [9, 9, 9], [1e-300, 1.0, 1.0], norm_model=NormModel(2.5))
    assert (magnitude > 0).all()
    assert (neyman_inclusion(magnitude, [9, 9, 9], 0.5) >= 0.125).all()


def test_a_magnitude_that_overflows_is_refused():
    with pytest.raises(ValueError, match="magnitude must be finite"):
        score_magnitude([1e300, 1.0], [9, 9], [1e300, 1.0])


def test_a_size_that_is_no_number_of_rows_is_refused():
    for size in (1.5, 0, 3):
        with pytest.raises(ValueError, match="integer in"):
            fixed_size_inclusion([1.0, 2.0], size, 0.1)
