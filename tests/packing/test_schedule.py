"""The order of a step: what it promises for any rows, and how even it makes them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.packing import PADDING, SequenceCost, imbalance, pack, plan_in_order, schedule

COST = SequenceCost(per_token=24576.0, attention=((1.0, None),))


def lengths(n, cap, seed):
    """Log-normal lengths of groups of eight alike completions."""
    rng = np.random.default_rng(seed)
    of_group = rng.lognormal(6.5, 0.8, -(-n // 8))
    return np.clip(np.repeat(of_group, 8)[:n] * rng.lognormal(0, 0.4, n), 20, cap).astype(np.int64)


@st.composite
def steps(draw):
    rows = draw(st.integers(1, 60))
    capacity = draw(st.integers(2, 40))
    length = draw(st.lists(st.integers(1, capacity), min_size=rows, max_size=rows))
    mini_batches = draw(st.integers(1, min(4, rows)))
    mini_batch = [*range(mini_batches), *draw(st.lists(st.integers(0, mini_batches - 1), min_size=60, max_size=60))]
    return {
        "length": np.array(length),
        "mini_batch": np.array(mini_batch[:rows]),
        "ranks": draw(st.integers(1, 6)),
        "micro_batch_tokens": draw(st.sampled_from([capacity, None])),
        "multiple": draw(st.sampled_from([1, 1, 2, 3])),
        "window": draw(st.sampled_from([None, 1, 4])),
        "cost": draw(st.sampled_from([None, COST])),
    }


@settings(max_examples=300, deadline=None)
@given(steps())
def test_every_promise_holds_for_any_step(step):
    plan = schedule(**step)
    real = plan.row != PADDING
    assert sorted(plan.row[real]) == list(range(step["length"].size))
    assert (plan.mini_batch[real] == step["mini_batch"][plan.row[real]]).all()
    assert (plan.length[real] == step["length"][plan.row[real]]).all()
    assert (plan.length[~real] == 2).all()

    ranks, mini_batches = step["ranks"], int(step["mini_batch"].max()) + 1
    places = plan.row.size // (ranks * mini_batches)
    assert (plan.rank == np.repeat(np.arange(ranks), places * mini_batches)).all()
    assert (plan.mini_batch == np.tile(np.repeat(np.arange(mini_batches), places), ranks)).all()

    multiple = step["multiple"] if step["micro_batch_tokens"] else 1
    of_rank = plan.micro_batch.reshape(ranks, mini_batches, places)
    for k in range(mini_batches):
        count = plan.micro_batches[k]
        assert count % multiple == 0
        assert all(set(of_rank[r, k]) == set(range(count)) for r in range(ranks)), "an empty micro-batch"
        assert (np.diff(of_rank[:, k]) >= 0).all(), "places are in the order in which they run"
    if step["micro_batch_tokens"]:
        tokens = np.zeros((ranks, mini_batches, plan.micro_batches.max()), dtype=int)
        np.add.at(tokens, (plan.rank, plan.mini_batch, plan.micro_batch), plan.length)
        assert tokens.max() <= step["micro_batch_tokens"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_padding_rows_of_alike_mini_batches_stay_below_ranks_times_mini_batches(rows, ranks, mini_batches, seed):
    mini_batch = np.random.default_rng(seed).permutation(np.arange(rows * mini_batches) % mini_batches)
    plan = schedule(lengths(mini_batch.size, 4096, seed), ranks, mini_batch, 8192)
    assert plan.padding_rows <= ranks * mini_batches - 1
    assert plan.padding_rows == mini_batches * (-rows % ranks)


def test_a_small_mini_batch_is_filled_up_to_the_largest():
    plan = schedule([10] * 9, 2, [0] * 6 + [1] * 3, 100)
    assert plan.padding_rows == 3
    assert (plan.row[plan.mini_batch == 1] == PADDING).sum() == 3


def test_a_rank_with_fewer_rows_than_a_pipeline_needs_micro_batches_gets_padding():
    plan = schedule([10, 10], 1, [0, 0], 100, multiple=4)
    assert plan.micro_batches.tolist() == [4]
    assert plan.padding_rows == 2


@pytest.mark.parametrize("seed", range(3))
def test_four_mini_batches_over_sixteen_ranks_are_within_a_thousandth_of_ideal(seed):
    length = lengths(1024, 8192, seed)
    mini_batch = np.random.default_rng(seed).permutation(np.arange(1024) % 4)
    plan = schedule(length, 16, mini_batch, 16384, COST)
    assert imbalance(plan, plan.cost, of_micro_steps=False) < 1.001
    assert imbalance(plan, plan.cost, of_micro_steps=True) < 1.05
    verl_like = plan_in_order(length[np.argsort(mini_batch, kind="stable")], 16, 4, 16384, COST, level=False)
    assert imbalance(verl_like, verl_like.cost, of_micro_steps=False) > 1.1


def test_what_is_left_of_the_imbalance_does_not_add_up_on_one_rank():
    """A pass over all mini-batches at once would wait for that rank."""
    excess = []
    for seed in range(6):
        length = np.clip(np.random.default_rng(seed).lognormal(4.5, 1.5, 96), 20, 1400).astype(int)
        plan = schedule(length, 2, np.arange(96) % 8, 1472, COST)
        whole = np.bincount(plan.rank, plan.cost)
        mini = np.zeros((2, 8))
        np.add.at(mini, (plan.rank, plan.mini_batch), plan.cost)
        excess.append((whole.max() - whole.mean(), (mini.max(0) - mini.mean(0)).sum()))
    ours, added_up = np.sum(excess, axis=0)
    assert ours < 0.6 * added_up


def test_levelled_micro_batches_wait_less_than_packed_ones():
    length = lengths(512, 4096, seed=5)
    waited = [
        imbalance(plan, plan.cost, of_micro_steps=True)
        for plan in (plan_in_order(length, 8, 2, 8192, COST, level=level) for level in (True, False))
    ]
    assert waited[0] < waited[1] - 0.02


def test_rows_in_order_stay_where_they_are():
    length = lengths(96, 2048, seed=1)
    plan = plan_in_order(length, 4, 3, 4096, COST)
    assert (plan.row == np.arange(96)).all()
    assert (plan.length == length).all()
    assert plan.rank.tolist() == np.repeat(np.arange(4), 24).tolist()
    assert plan.mini_batch.tolist() == np.tile(np.repeat(np.arange(3), 8), 4).tolist()
    assert len(set(plan.micro_batches.tolist())) >= 1
    for rank in range(4):
        for k in range(3):
            mine = (plan.rank == rank) & (plan.mini_batch == k)
            tokens = np.bincount(plan.micro_batch[mine], length[mine])
            assert tokens.size == plan.micro_batches[k]
            assert tokens.min() > 0
            assert tokens.max() <= 4096


def test_packed_rows_in_order_are_the_bins_of_the_window():
    length = np.array([5, 9, 4, 1, 6, 3, 2, 8])
    plan = plan_in_order(length, 1, 1, 10, window=2, level=False)
    bins = [np.flatnonzero(plan.micro_batch == k).tolist() for k in range(plan.micro_batches[0])]
    assert bins == [rows.tolist() for rows in pack(length, 10, window=2)]


def test_the_window_decides_how_many_micro_batches_there_are():
    length = np.tile([60, 41, 40, 59], 8)
    whole, narrow = (schedule(length, 1, np.zeros(32, int), 100, window=window) for window in (None, 1))
    assert whole.micro_batches[0] == len(pack(length, 100))
    assert narrow.micro_batches[0] == len(pack(length, 100, window=1)) > whole.micro_batches[0]


def test_density_and_imbalance_are_what_they_say():
    plan = plan_in_order([4, 2, 3, 1], ranks=2, mini_batches=1, micro_batch_tokens=4)
    assert plan.micro_batches.tolist() == [2]
    assert plan.density(10) == 10 / 16
    assert imbalance(plan, plan.length, of_micro_steps=False) == 6 / 5
    assert imbalance(plan, plan.length, of_micro_steps=True) == pytest.approx((4 + 2) / 5)
    assert imbalance(plan, np.zeros(4), of_micro_steps=True) == 1.0
    with pytest.raises(ValueError, match="have no density"):
        plan_in_order([4, 2], 1, 1, None).density(6)


def test_small_micro_batches_stand_at_both_ends():
    plan = plan_in_order([10, 9, 8, 7, 6], ranks=1, mini_batches=1, micro_batch_tokens=10)
    assert [int(plan.length[plan.micro_batch == k].sum()) for k in range(5)] == [6, 8, 10, 9, 7]


class TestRefusals:
    def test_a_row_above_the_cap_is_named(self):
        with pytest.raises(ValueError, match=r"'?b'?\D.*101 tokens.*100"):
            schedule([5, 101], 1, [0, 0], 100, ids=["a", "b"])
        with pytest.raises(ValueError, match=r"101 tokens.*100"):
            plan_in_order([5, 101], 1, 1, 100)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"ranks": 0}, "ranks must be an integer from 1 .*got 0"),
            ({"ranks": 1.5}, r"ranks must be an integer from 1 .*got 1\.5"),
            ({"multiple": 0}, "multiple must be an integer from 1 .*got 0"),
            ({"padding_length": 0}, "padding_length must be an integer from 1 .*got 0"),
            ({"padding_length": 1.5}, r"padding_length must be an integer from 1 .*got 1\.5"),
            ({"padding_length": 101}, "padding_length must not exceed micro_batch_tokens=100, got 101"),
            ({"mini_batch": [0.2, 0.9]}, r"mini_batch must be \(2,\) integers"),
            ({"cost": lambda length: length[:1]}, r"cost must return \(2,\) costs.*got \(1,\)"),
            ({"mini_batch": [0, 2]}, r"without a gap, got \[0, 2\]"),
            ({"mini_batch": [0]}, r"mini_batch must be \(2,\) integers, got \(1,\)"),
            ({"length": [], "mini_batch": []}, "n >= 1"),
        ],
    )
    def test_arguments_that_do_not_fit(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            schedule(**{"length": [5, 6], "ranks": 1, "mini_batch": [0, 0], "micro_batch_tokens": 100} | wrong)

    def test_rows_that_do_not_divide(self):
        with pytest.raises(ValueError, match="5 rows do not divide over 2 ranks and 1 mini-batches"):
            plan_in_order([1] * 5, 2, 1, 10)

    def test_too_few_rows_for_a_pipeline(self):
        with pytest.raises(ValueError, match="2 rows cannot fill 4 micro-batches"):
            plan_in_order([1, 1], 1, 1, 10, multiple=4)
