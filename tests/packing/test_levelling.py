"""Micro-batches of alike cost: what they promise for any ranks, and how near they are to the best possible cut."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.packing import SequenceCost, pack
from verl_dppo.packing.levelling import common_micro_batches, micro_batches_needed, packed_micro_batches

COST = SequenceCost(per_token=10.0, attention=((1.0, None),))


@st.composite
def ranks(draw):
    """Rows of several ranks, each with enough of them for the micro-batches that are needed."""
    capacity, multiple = draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 2, 3]))
    window = draw(st.sampled_from([None, 1, 3]))
    row = st.integers(1, capacity)
    length = [
        np.array(draw(st.lists(row, min_size=1, max_size=15)), dtype=np.int64) for _ in range(draw(st.integers(1, 4)))
    ]
    needed = micro_batches_needed(length, capacity, multiple, window)
    length = [np.append(rows, np.ones(max(0, needed - rows.size), dtype=np.int64)) for rows in length]
    return length, capacity, multiple, window


@settings(max_examples=200, deadline=None)
@given(ranks())
def test_every_rank_gets_the_number_needed_and_no_row_is_lost_no_cap_broken_no_bin_empty(step):
    length, capacity, multiple, window = step
    needed = micro_batches_needed(length, capacity, multiple, window)
    assert needed % multiple == 0
    assert needed >= max(len(pack(rows, capacity, window)) for rows in length)
    for cut in (
        common_micro_batches(length, [COST(rows) for rows in length], capacity, multiple, window),
        packed_micro_batches(length, capacity, multiple, window),
    ):
        assert [len(bins) for bins in cut] == [needed] * len(length)
        for rows, bins in zip(length, cut, strict=True):
            assert sorted(np.concatenate(bins)) == list(range(rows.size))
            assert all(members.size and rows[members].sum() <= capacity for members in bins)


def test_levelled_micro_batches_wait_less_than_packed_ones():
    ratios = []
    for seed in range(4):
        length = list(np.minimum(np.random.default_rng(seed).lognormal(5, 0.8, (8, 40)), 1000).astype(np.int64))
        cost = [COST(rows) for rows in length]
        levelled, packed = common_micro_batches(length, cost, 2000), packed_micro_batches(length, 2000)
        ratios.append(waited_for(levelled, cost) / waited_for(packed, cost))
    assert max(ratios) < 1
    assert np.mean(ratios) < 0.97


def waited_for(cut, cost):
    """Return the sum over micro-steps of the costliest micro-batch, costliest ones of all ranks side by side."""
    loads = [np.sort([c[rows].sum() for rows in bins]) for bins, c in zip(cut, cost, strict=True)]
    return float(np.max(loads, axis=0).sum())


def least(length, cost, capacity, count):
    """Return the least that any cut of all ranks into so many micro-batches waits for, by trying them all."""
    cuts = []
    for rows, c in zip(length, cost, strict=True):
        profiles = set()
        for deal in product(range(count), repeat=rows.size):
            tokens = np.bincount(deal, rows, count)
            if tokens.max() <= capacity and tokens.min() > 0:
                profiles.add(tuple(np.sort(np.bincount(deal, c, count))))
        cuts.append(np.array(sorted(profiles)))
    together = cuts[0]
    for profiles in cuts[1:]:
        pairs = np.maximum(together[:, None], profiles[None]).reshape(-1, count)
        together = np.unique(pairs, axis=0)
    return float(together.sum(axis=1).min())


def test_tiny_steps_are_near_the_best_cut():
    ratios = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        length = [np.minimum(np.ceil(rng.lognormal(2, 1, 6)), 30).astype(np.int64) for _ in range(3)]
        cost = [COST(rows) for rows in length]
        cut = common_micro_batches(length, cost, 40)
        ratios.append(waited_for(cut, cost) / least(length, cost, 40, len(cut[0])))
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) < 1.03
    assert np.mean(ratios) < 1.005


def test_a_row_that_no_other_rank_can_match_runs_beside_the_costliest_of_the_others():
    length = [np.array([20, 1, 1]), np.array([10, 10, 1, 1])]
    cut = common_micro_batches(length, [COST(rows) for rows in length], 20)
    assert [len(bins) for bins in cut] == [2, 2]
    step = next(k for k, rows in enumerate(cut[0]) if 0 in rows)
    assert {0, 1} & set(cut[1][step].tolist())
    loads = [[COST(rows)[members].sum() for members in bins] for rows, bins in zip(length, cut, strict=True)]
    assert np.argmax(loads[0]) == np.argmax(loads[1])


def test_the_same_rows_give_the_same_micro_batches():
    length = [np.random.default_rng(k).integers(1, 50, 20) for k in range(3)]
    cost = [COST(rows) for rows in length]
    first, second = (common_micro_batches(length, cost, 60) for _ in range(2))
    for mine, yours in zip(first, second, strict=True):
        assert [rows.tolist() for rows in mine] == [rows.tolist() for rows in yours]


def test_without_a_cap_all_rows_of_a_rank_are_one_micro_batch():
    length = [np.array([5, 6]), np.array([7, 8])]
    for cut in (
        common_micro_batches(length, [COST(rows) for rows in length], None),
        packed_micro_batches(length, None),
    ):
        assert [[rows.tolist() for rows in bins] for bins in cut] == [[[0, 1]], [[0, 1]]]
    assert micro_batches_needed(length, None, multiple=3) == 1


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_rank_with_fewer_rows_than_micro_batches_is_refused(multiple):
    length = [np.array([9, 9, 9]), np.array([1])]
    message = r"rows cannot fill \d micro-batches"
    with pytest.raises(ValueError, match=message):
        common_micro_batches(length, [COST(rows) for rows in length], 10, multiple)
    with pytest.raises(ValueError, match=message):
        packed_micro_batches(length, 10, multiple)
