"""The figures of the balancing benchmark on a step whose answers are known."""

import balance as benchmark
import numpy as np
import pytest


def test_the_bound_of_three_terms_by_hand():
    assert benchmark.three_terms(np.array([1.0, 2, 3, 50]), 2, equal_count=True) == 51
    assert benchmark.three_terms(np.array([1.0, 2, 3, 50]), 2, equal_count=False) == 50
    assert benchmark.three_terms(np.array([5.0, 7, 8, 9]), 3, equal_count=True) == 12
    assert benchmark.three_terms(np.array([3.0, 3, 3, 3]), 2, equal_count=True) == 6


def test_every_balancer_is_measured_or_says_why_not():
    found = benchmark.measure([np.arange(1, 33), np.full(32, 9)], parts=4, repeats=2)
    assert {"ours, equal", "verl, equal", "ours, free", "verl, free", "round robin"} <= set(found)
    for name, figures in found.items():
        assert figures.failure.startswith("ModuleNotFoundError") or len(figures.seconds) == 4, name
        assert all(gap > -1e-12 for gap in figures.gap)
    assert found["ours, equal"].gap[1] == pytest.approx(0, abs=1e-12)
    uneven = benchmark.measure([np.arange(1, 32)], parts=4, repeats=1)["verl, equal"]
    assert uneven.failure == "AssertionError: 31 % 4 != 0"


def test_a_deal_that_loses_a_row_is_refused():
    with pytest.raises(AssertionError, match="not a partition"):
        benchmark.Figures().add(np.ones(3), [[0], [1]], equal_count=True)
