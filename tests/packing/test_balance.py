"""Balanced parts: near the bound on lengths of many shapes, near the optimum on small cases, always partitions."""

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_dppo.packing.balance import balance, makespan_lower_bound
from verl_dppo.packing.exchange import MOST_SUBSETS, subset_columns

LONGEST = 32768


def log_normal(rng, n):
    return np.repeat(rng.lognormal(6.5, 0.8, -(-n // 8)), 8)[:n] * rng.lognormal(0, 0.4, n)


def pareto(alpha):
    return lambda rng, n: 200 * (1 + rng.pareto(alpha, n))


SHAPES = {
    "log-normal": log_normal,
    "exponential": lambda rng, n: 1 + rng.exponential(1000, n),
    "uniform": lambda rng, n: rng.uniform(1, LONGEST, n),
    "constant": lambda rng, n: np.full(n, 700.0),
    "few giants": lambda rng, n: np.where(np.arange(n) < 3, LONGEST, 300.0),
    "many ties": lambda rng, n: 256 * np.ceil(rng.lognormal(6.5, 0.8, n) / 256),
    "two modes": lambda rng, n: np.where(rng.random(n) < 0.2, rng.normal(16000, 2000, n), rng.normal(500, 100, n)),
    "padding": lambda rng, n: np.where(rng.random(n) < 0.3, 0, log_normal(rng, n)),
    **{f"Pareto {alpha}": pareto(alpha) for alpha in (1.1, 1.5, 2.5)},
}
WORKLOADS = {
    "dense 7B": lambda length: 24576 * length + length**2,
    "small, causal": lambda length: 1.2e9 * length + 5.7e4 * length * (length + 1) / 2,
}


def costs(shape, n, seed, longest=LONGEST, workload="dense 7B"):
    length = np.round(np.minimum(SHAPES[shape](np.random.default_rng(seed), n), longest))
    return WORKLOADS[workload](length)


def makespan(cost, parts):
    return max(cost[rows].sum() for rows in parts)


def three_terms(cost, parts):
    """The mean, the largest with the m - 1 smallest, and the parts-th with the next: the bound without refinements."""
    ascending, least = np.sort(cost), cost.size // parts
    return max(
        cost.sum() / parts,
        ascending[-1] + ascending[: max(least - 1, 0)].sum(),
        ascending[-parts - 1 :][:2].sum() if cost.size > parts else 0,
    )


# ---- close to the bound ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("n", "parts"), [(1024, 16), (4096, 64), (8192, 128), (1000, 16), (4099, 64)])
def test_log_normal_lengths_come_within_a_hundredth_of_a_percent_of_the_bound(n, parts, workload):
    cost = costs("log-normal", n, seed=n, workload=workload)
    dealt = balance(cost, parts)
    assert makespan(cost, dealt) <= three_terms(cost, parts) * (1 + 1e-4)
    assert {rows.size for rows in dealt} <= {n // parts, -(-n // parts)}


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.5])
@pytest.mark.parametrize("n", [128, 256])
@pytest.mark.parametrize("longest", [LONGEST, np.inf])
def test_heavy_tails_come_within_a_twentieth_of_a_percent_of_the_bound(alpha, n, longest):
    for seed in range(5):
        cost = costs(f"Pareto {alpha}", n, seed, longest)
        assert makespan(cost, balance(cost, 16)) <= makespan_lower_bound(cost, 16) * (1 + 5e-4)


@pytest.mark.parametrize("equal_count", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_lengths_come_close_to_the_bound_too(shape, equal_count):
    for seed in range(2):
        cost = costs(shape, 1024, seed)
        assert makespan(cost, balance(cost, 16, equal_count)) <= makespan_lower_bound(cost, 16, equal_count) * (
            1 + 1e-4
        )


def test_mini_batches_of_a_step_add_up_to_little_over_the_mean():
    cost = costs("log-normal", 1024, seed=5)
    mini_batches = cost.reshape(4, 256)
    total = sum(makespan(rows, balance(rows, 16)) for rows in mini_batches)
    assert total <= cost.sum() / 16 * 1.001


def test_a_row_that_dwarfs_the_others_gets_the_cheapest_for_company():
    cost = np.append(np.arange(1.0, 32.0), 1000.0)
    giant = next(rows for rows in balance(cost, 4) if 31 in rows)
    assert giant.tolist() == [0, 1, 2, 3, 4, 5, 6, 31]
    assert [31] in [rows.tolist() for rows in balance(cost, 4, equal_count=False)]


def test_where_company_for_a_giant_is_too_costly_or_far_too_cheap_the_others_share_what_it_gives():
    sizes = [97, 196, 297, 400, 505, 612, 721, 832, 945, 1060, 1177, 1296, 1417, 1921, 2457, 3937]
    cost = np.repeat(np.array(sizes, dtype=float), [33, 64, 48, 31, 23, 17, 8, 12, 4, 5, 4, 2, 2, 1, 1, 1])
    dealt = balance(cost, 16)
    assert makespan(cost, dealt) <= makespan_lower_bound(cost, 16) * 1.002
    assert cost[next(rows for rows in dealt if 255 in rows)].sum() < cost.sum() / 16


# ---- close to the optimum -------------------------------------------------------------------------------------------


def optimum(cost, parts, equal_count):
    """By trying every deal, but for those that only rename parts."""
    most = -(-cost.size // parts) if equal_count else cost.size
    longer = cost.size % parts if equal_count else 0

    @cache
    def best(row, loads):
        if row == cost.size:
            counts = [count for _, count in loads]
            fair = not equal_count or max(counts) - min(counts) <= 1
            return max(load for load, _ in loads) if fair else np.inf
        options = {
            tuple(sorted((*loads[:k], (load + cost[row], count + 1), *loads[k + 1 :])))
            for k, (load, count) in enumerate(loads)
            if count < most - (longer > 0 and count == most - 1 and sum(c == most for _, c in loads) >= longer)
        }
        return min((best(row + 1, option) for option in options), default=np.inf)

    return best(0, tuple((0.0, 0) for _ in range(parts)))


@pytest.mark.parametrize("equal_count", [True, False])
def test_on_small_cases_it_is_nearly_always_optimal_and_never_far_from_it(equal_count):
    rng, over = np.random.default_rng(0), []
    for _ in range(120):
        n, parts = rng.integers(4, 10), rng.integers(2, 4)
        cost = rng.choice([rng.integers(1, 9, n), np.ceil(rng.lognormal(3, 1, n))]).astype(float)
        best = optimum(cost, int(parts), equal_count)
        assert makespan_lower_bound(cost, parts, equal_count) <= best * (1 + 1e-12)
        over.append(makespan(cost, balance(cost, parts, equal_count)) / best - 1)
    assert min(over) > -1e-12
    assert np.mean(np.array(over) < 1e-4) >= 0.97
    assert max(over) < 0.05


# ---- the bound ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "parts", "equal_count", "bound"),
    [
        ([1, 2, 3, 4], 2, True, 5),  # the mean
        ([1, 2, 3, 5], 2, True, 6),  # the mean, 5.5, of integers
        ([1, 2, 3.5, 4.5], 2, True, 5.5),
        ([2, 4, 6, 10], 2, True, 12),  # 11, of even numbers
        ([1, 2, 3, 50], 2, True, 51),  # the largest with the cheapest
        ([1, 2, 3, 50], 2, False, 50),
        ([5, 7, 8, 9], 3, True, 12),  # two of four rows share a part
        ([0, 0, 0, 0, 0, 9, 9, 9, 9], 3, True, 18),
        ([1, 1, 1, 1, 1, 9, 9, 9, 9], 3, True, 19),  # and so does another row
        ([1, 1, 1, 1, 1, 9, 9, 9, 9], 3, False, 18),
        ([4] * 7, 3, True, 12),  # three of seven rows share a part
        ([1, 2, 3, 3, 3, 3, 50, 50], 4, True, 52),  # the mean of the two parts with the largest rows is 51.5
        ([5, 3], 4, True, 5),
        ([0, 0], 4, True, 0),
    ],
)
def test_the_bound_by_hand(cost, parts, equal_count, bound):
    assert makespan_lower_bound(cost, parts, equal_count) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize("equal_count", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("n", "parts"), [(100, 16), (16, 16), (15, 16), (256, 1)])
def test_the_bound_holds_and_is_at_least_that_of_the_three_terms(shape, n, parts, equal_count):
    cost = costs(shape, n, seed=1)
    bound = makespan_lower_bound(cost, parts, equal_count)
    assert bound <= makespan(cost, balance(cost, parts, equal_count)) * (1 + 1e-12)
    if equal_count:
        assert bound >= three_terms(cost, parts) * (1 - 1e-12)


# ---- a partition ----------------------------------------------------------------------------------------------------

finite = st.floats(0, 1e300, allow_subnormal=True)
few = st.lists(finite, min_size=1, max_size=40)
tied = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(few | tied, st.integers(1, 9), st.booleans())
@example([0.0] * 5, 3, True)
@example([5e-324] * 5, 3, False)
@example([1e300, 1e-300, 0.0], 2, True)
def test_every_row_is_in_one_part_and_counts_are_equal_within_one_where_asked(cost, parts, equal_count):
    dealt = balance(cost, parts, equal_count)
    assert len(dealt) == parts
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in dealt)
    assert np.sort(np.concatenate(dealt)).tolist() == list(range(len(cost)))
    counts = [rows.size for rows in dealt]
    assert not equal_count or max(counts) - min(counts) <= 1


@pytest.mark.parametrize("shape", ["two modes", "many ties", "Pareto 1.5"])
def test_counts_stay_equal_where_rows_are_exchanged_by_twos_and_more(shape):
    for seed in range(6):
        cost = costs(shape, 83, seed)
        assert {rows.size for rows in balance(cost, 11)} == {7, 8}


@pytest.mark.parametrize(("n", "parts"), [(3, 8), (8, 8), (50, 1)])
def test_few_rows_or_one_part_leave_no_choice(n, parts):
    cost = costs("log-normal", n, seed=2)
    for equal_count in (True, False):
        counts = sorted(rows.size for rows in balance(cost, parts, equal_count))
        assert counts == [0] * (parts - min(n, parts)) + [max(1, n // parts)] * min(n, parts)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_costs_give_the_same_parts_and_in_another_order_the_same_makespan(shape):
    cost, rng = costs(shape, 203, seed=3), np.random.default_rng(0)
    first = [rows.tolist() for rows in balance(cost, 16)]
    assert [rows.tolist() for rows in balance(cost.copy(), 16)] == first
    shuffled = rng.permutation(cost)
    assert makespan(shuffled, balance(shuffled, 16)) == pytest.approx(makespan(cost, balance(cost, 16)), rel=1e-12)


@pytest.mark.parametrize("unit", [2.0**-40, 1e-9, 3.7, 1e20])
@pytest.mark.parametrize("shape", ["log-normal", "uniform", "Pareto 1.5"])
def test_the_unit_does_not_matter(shape, unit):
    cost = costs(shape, 512, seed=4)
    plain, scaled = (makespan(c, balance(c, 16)) for c in (cost, cost * unit))
    assert scaled == pytest.approx(plain * unit, rel=2e-5)
    assert makespan_lower_bound(cost * unit, 16) == pytest.approx(makespan_lower_bound(cost, 16) * unit, rel=1e-8)


def test_the_costs_are_left_as_they_are():
    cost = costs("log-normal", 64, seed=0)
    before = cost.copy()
    cost.flags.writeable = False
    balance(cost, 4)
    assert (cost == before).all()


def test_subsets_of_wide_parts_are_of_evenly_spaced_columns():
    assert sorted(map(sorted, subset_columns(4, 2).tolist())) == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    for size in (2, 3, 4):
        wide = subset_columns(500, size)
        assert MOST_SUBSETS / 2 < len(wide) <= MOST_SUBSETS
        assert {0, 499} <= set(wide.ravel().tolist())
    assert len(subset_columns(5000, 1)) == 5000


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [balance, makespan_lower_bound])
@pytest.mark.parametrize(
    ("cost", "parts", "message"),
    [
        ([], 2, r"cost must have the shape \(n,\) with n >= 1, got \(0,\)"),
        ([[1.0, 2.0]], 2, r"cost must have the shape.*\(1, 2\)"),
        (3.0, 2, r"cost must have the shape.*\(\)"),
        ([1.0, np.nan], 2, "cost must be finite and >= 0, got .*nan"),
        ([1.0, np.inf], 2, "cost must be finite and >= 0, got .*inf"),
        ([1.0, -2.0], 2, "cost must be finite and >= 0, got .*-2"),
        ([1.0, 2.0], 0, "parts must be an integer >= 1, got 0"),
        ([1.0, 2.0], -1, "parts must be an integer >= 1, got -1"),
        ([1.0, 2.0], 2.0, "parts must be an integer >= 1, got 2.0"),
        ([1.0, 2.0], True, "parts must be an integer >= 1, got True"),
    ],
)
def test_what_cannot_be_balanced_is_refused_with_its_value(function, cost, parts, message):
    with pytest.raises(ValueError, match=message):
        function(cost, parts)
