from itertools import product

import lengths as made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.packing.bins import bins_lower_bound, check_lengths, pack
from verl_dppo.packing.filling import largest_first

CASES = 100_000


def first_fit_decreasing(length, capacity):
    """From its definition: largest first, each into the first bin with room."""
    loads = []
    for size in sorted(length, reverse=True):
        k = next((k for k, load in enumerate(loads) if load + size <= capacity), len(loads))
        loads[k:] = loads[k:] or [0]
        loads[k] += size
    return len(loads)


def fewest_bins(length, capacity):
    """The optimum, by trying for each row every bin that is open and one more."""
    best = len(length)

    def place(row, loads):
        nonlocal best
        if len(loads) >= best:
            return
        if row == len(length):
            best = len(loads)
            return
        for k in range(len(loads)):
            if loads[k] + length[row] <= capacity:
                place(row + 1, (*loads[:k], loads[k] + length[row], *loads[k + 1 :]))
        place(row + 1, (*loads, length[row]))

    place(0, ())
    return best


def assert_packed(bins, length, capacity):
    """Every row in one bin, none empty, none above the cap, rows in arrival order, bins by their oldest row."""
    assert sorted(row for rows in bins for row in rows.tolist()) == list(range(len(length)))
    assert all(rows.size and rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in bins)
    assert all(int(np.asarray(length)[rows].sum()) <= capacity for rows in bins)
    first = [int(rows[0]) for rows in bins]
    assert first == sorted(first)


cases = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), min_size=1, max_size=40),
        st.just(capacity),
        st.one_of(st.none(), st.integers(1, 45)),
    )
)

# ---- what holds for any lengths --------------------------------------------------------------------------------------


@given(cases)
@settings(max_examples=150, deadline=None)
def test_bins_part_the_rows_keep_the_cap_and_come_in_order(case):
    length, capacity, window = case
    assert_packed(pack(length, capacity, window), length, capacity)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_lower_bound_first_fit_decreasing_and_the_number_of_rows_enclose_the_number_of_bins(case):
    length, capacity, _ = case
    assert bins_lower_bound(length, capacity) <= len(pack(length, capacity)) <= first_fit_decreasing(length, capacity)


def test_no_bin_of_many_random_steps_is_above_the_cap_or_empty():
    rng = np.random.default_rng(0)
    above = empty = astray = 0
    size = rng.integers(1, 13, CASES)
    cap = rng.integers(1, 40, CASES)
    windows = rng.integers(0, 13, CASES).tolist()
    drawn = rng.integers(0, 1 << 30, int(size.sum())) % np.repeat(cap, size) + 1
    end = np.cumsum(size).tolist()
    for n, capacity, window, stop in zip(size.tolist(), cap.tolist(), windows, end, strict=True):
        length = drawn[stop - n : stop]
        bins = pack(length, capacity, window or None)
        tokens = length.tolist()
        loads = [sum([tokens[row] for row in rows.tolist()]) for rows in bins]
        above += max(loads) > capacity
        empty += min(loads) == 0
        astray += sum(loads) != sum(tokens) or sum(map(len, bins)) != n
    assert (above, empty, astray) == (0, 0, 0)


@given(cases, st.randoms())
@settings(max_examples=100, deadline=None)
def test_a_step_of_equal_rows_takes_the_oldest_first(case, random):
    _, capacity, window = case
    tokens, n = random.randint(1, capacity), random.randint(1, 30)
    bins = pack([tokens] * n, capacity, window)
    per_bin = capacity // tokens
    assert [rows.tolist() for rows in bins] == [list(range(n))[k : k + per_bin] for k in range(0, n, per_bin)]


# ---- windows ---------------------------------------------------------------------------------------------------------


@given(cases)
@settings(max_examples=150, deadline=None)
def test_the_oldest_that_waits_is_in_the_next_bin(case):
    length, capacity, window = case
    waiting = set(range(len(length)))
    for rows in pack(length, capacity, window):
        assert min(waiting) == rows[0]
        waiting -= set(rows.tolist())


@given(cases)
@settings(max_examples=150, deadline=None)
def test_no_row_is_taken_before_it_came_into_the_window(case):
    length, capacity, window = case
    if window is None or window >= len(length):
        return
    gone = 0
    for rows in pack(length, capacity, window):
        # The k-th latest of a bin can have come only after all but k of what was taken with it.
        assert (rows < window + gone + np.arange(rows.size)).all()
        gone += rows.size


@given(cases)
@settings(max_examples=100, deadline=None)
def test_rows_behind_the_window_change_no_bin_that_closed_before_they_came(case):
    length, capacity, window = case
    window = window or 5
    gone, bins = 0, pack(length, capacity, window)
    longer = [rows.tolist() for rows in pack([*length, 1, capacity], capacity, window)]
    for rows in bins:
        gone += rows.size
        if window + gone > len(length):
            break
        assert longer.pop(0) == rows.tolist()


def test_a_window_of_one_packs_in_arrival_order():
    assert [rows.tolist() for rows in pack([5, 4, 2, 9, 1, 1], 10, 1)] == [[0, 1], [2], [3, 4], [5]]


def test_a_window_takes_the_largest_that_fits():
    assert [rows.tolist() for rows in pack([6, 1, 3, 4, 2, 5, 9], 10, 2)] == [[0, 1, 2], [3, 5], [4], [6]]
    assert [rows.tolist() for rows in pack([6, 1, 3, 4, 2, 5, 9], 10)] == [[0, 3], [1, 6], [2, 4, 5]]


def test_a_tighter_pair_takes_the_place_of_the_largest_that_fits():
    # After the 40 the 45 fits and leaves 15 that nothing can use; 30 and 30 leave nothing.
    assert pack([40, 45, 30, 30, 55, 35], 100, 5)[0].tolist() == [0, 2, 3]


def test_a_window_of_the_whole_step_is_the_whole_step():
    length = made.lognormal_groups(200, 1000, 0)
    whole = [rows.tolist() for rows in pack(length, 1000)]
    assert whole == [rows.tolist() for rows in pack(length, 1000, 200)]
    assert whole == [rows.tolist() for rows in pack(length, 1000, 10**6)]


# ---- how many bins ---------------------------------------------------------------------------------------------------


def test_small_steps_need_no_more_than_one_bin_over_the_fewest_and_the_bound_is_never_above_it():
    rng = np.random.default_rng(1)
    excess = []
    for _ in range(300):
        capacity = int(rng.integers(5, 60))
        length = rng.integers(1, capacity + 1, rng.integers(1, 10)).tolist()
        fewest = fewest_bins(length, capacity)
        assert bins_lower_bound(length, capacity) <= fewest
        excess.append(len(pack(length, capacity)) - fewest)
    assert max(excess) <= 1
    assert np.mean(excess) < 0.02


def martello_toth(length, capacity):
    """L2 from its definition, for every a up to half the cap."""
    bounds = []
    for a in range(capacity // 2 + 1):
        full = [size for size in length if size > capacity - a]
        large = [size for size in length if capacity // 2 < size <= capacity - a]
        small = [size for size in length if a <= size <= capacity // 2]
        overflow = sum(small) - (len(large) * capacity - sum(large))
        bounds.append(len(full) + len(large) + max(0, -(-overflow // capacity)))
    return max(bounds)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_lower_bound_is_that_of_martello_and_toth(case):
    length, capacity, _ = case
    assert bins_lower_bound(length, capacity) == martello_toth(length, capacity)


def test_lower_bound_by_hand():
    assert bins_lower_bound([6, 6, 6], 10) == 3  # each above half the cap
    assert bins_lower_bound([7, 7, 4, 4, 4], 10) == 4  # no 4 goes beside a 7, two go together
    assert bins_lower_bound([5, 5, 5, 5, 1], 10) == 3
    assert bins_lower_bound([1], 2**40) == 1


SIZES = [(1024, 8192), (4096, 16384), (8192, 32768)]


@pytest.mark.parametrize(("n", "capacity"), SIZES)
@pytest.mark.parametrize("share", [5, 8, 11])
def test_log_normal_lengths_take_as_many_bins_as_the_bound_but_one_in_a_thousand(n, capacity, share):
    for seed in range(2):
        length = made.lognormal_groups(n, capacity, seed, median=capacity / share)
        bound = bins_lower_bound(length, capacity)
        assert len(pack(length, capacity)) <= bound + max(1, bound // 1000)
        assert len(pack(length, capacity, 512)) <= 1.02 * bound


def shapes(n, capacity, rng):
    yield "uniform", rng.integers(1, capacity + 1, n)
    yield "without small ones", rng.integers(capacity // 5, 4 * capacity // 5, n)
    yield "bimodal", np.where(rng.random(n) < 0.5, rng.integers(99, 800, n), rng.integers(capacity // 2, capacity, n))
    yield "pareto", made.pareto(n, 1.2, capacity, int(rng.integers(99)))
    yield "constant", np.full(n, capacity // 3 + 1)
    yield "exponential", np.clip(rng.exponential(capacity / 6, n), 1, capacity).astype(int)
    yield "above a half", capacity // 2 + rng.integers(1, capacity // 50, n)
    yield "above a third", capacity // 3 + rng.integers(1, capacity // 50, n)
    yield "about a third", capacity // 3 + rng.integers(-capacity // 50, capacity // 50, n)
    yield "a half, a third, a seventh", capacity // rng.choice([2, 3, 7], n) + rng.integers(1, capacity // 99, n)
    yield "rollouts", np.resize(made.demo_rollouts() * 64, n)


@pytest.mark.parametrize(("n", "capacity"), [(30, 8192), (1024, 8192), (4096, 16384)])
def test_other_shapes_take_no_more_bins_than_first_fit_decreasing_or_two_percent_with_a_window(n, capacity):
    for name, length in shapes(n, capacity, np.random.default_rng(n)):
        reference = max(largest_first(length, capacity)) + 1
        assert len(pack(length, capacity)) <= reference, name
        assert len(pack(length, capacity, 512)) <= np.ceil(1.02 * reference), name


@given(cases)
@settings(max_examples=150, deadline=None)
def test_filling_bin_after_bin_from_the_largest_is_first_fit_decreasing(case):
    length, capacity, _ = case
    assert max(largest_first(np.array(length), capacity)) + 1 == first_fit_decreasing(length, capacity)


def test_bins_that_start_from_the_oldest_win_where_the_largest_first_waste_room():
    # In rows of about a third of the cap, the largest two of each bin leave no room for a third.
    length = 1000 + np.random.default_rng(0).integers(-60, 60, 300)
    assert len(pack(length, 3000)) < 0.95 * first_fit_decreasing(length.tolist(), 3000)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_a_row_above_the_cap_is_named_with_its_length_and_the_cap():
    for call in (pack, bins_lower_bound, check_lengths):
        with pytest.raises(ValueError, match=r"row 2 has 9001 tokens.*cap of 8192"):
            call([5, 8192, 9001, 3], 8192)
    with pytest.raises(ValueError, match=r"row 1, id 'question-7', has 9 tokens.*cap of 8"):
        pack([3, 9], 8, ids=["question-3", "question-7"])


@pytest.mark.parametrize(
    ("length", "capacity", "window", "message"),
    [
        ([], 8, None, r"n >= 1, got shape \(0,\)"),
        ([[1, 2]], 8, None, r"shape \(1, 2\)"),
        (3, 8, None, r"shape \(\)"),
        (["3"], 8, None, "of <U1"),
        ([True, False], 8, None, "of bool"),
        ([2, 0], 8, None, "whole numbers >= 1, got 0 for row 1"),
        ([2, -3], 8, None, "got -3 for row 1"),
        ([2.0, 1.5], 8, None, "got 1.5 for row 1"),
        ([2.0, np.nan], 8, None, "got nan for row 1"),
        ([np.inf], 8, None, "got inf for row 0"),
        ([2], 0, None, "capacity must be an integer from 1 to .*, got 0"),
        ([2], 8.0, None, "got 8.0"),
        ([2], True, None, "got True"),
        ([2], 2**41, None, "capacity"),
        ([2], 8, 0, "window must be an integer from 1 to .*, got 0"),
        ([2], 8, 1.5, "window"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(length, capacity, window, message):
    with pytest.raises(ValueError, match=message):
        pack(length, capacity, window)


def test_names_must_be_as_many_as_rows():
    with pytest.raises(ValueError, match="each of the 2 rows, got 1"):
        pack([1, 2], 8, ids=["a"])


@pytest.mark.parametrize(("kind", "integer"), product([np.int32, np.uint8, np.float64, np.int64], [int, np.uint8]))
def test_any_kind_of_number_gives_the_same_bins(kind, integer):
    length = np.random.default_rng(3).integers(1, 100, 300)
    expected = [rows.tolist() for rows in pack(length, 200, 7)]
    assert [rows.tolist() for rows in pack(length.astype(kind), integer(200), integer(7))] == expected


def test_lengths_stay_as_they_were_given():
    length = np.array([3, 9, 4, 1])
    pack(length, 10)
    pack(length, 10, 2)
    assert length.tolist() == [3, 9, 4, 1]
