from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pruning.pivotal_tree import every_path

from verl_dppo.pruning import deal_mini_batches, neyman_inclusion, plan_completions


def make_plan(
    seed, n=64, mini_batches=2, multiple=4, keep=0.5, informative_share=0.7, design="pivotal", own_rows=False
):
    rng = np.random.default_rng(seed)
    magnitude = rng.lognormal(size=n) * (rng.random(n) < informative_share)
    length = rng.integers(1, 200, n).astype(float)
    group = np.arange(n) // 8
    mini_batch = deal_mini_batches(magnitude > 0, group, mini_batches, rng)
    target = np.zeros(n)
    for k in range(mini_batches):
        target[mini_batch == k] = neyman_inclusion(magnitude[mini_batch == k], length[mini_batch == k], keep)
    order = np.lexsort((length, group))
    slope = magnitude / np.sqrt(length)
    plan = plan_completions(
        slope,
        target,
        mini_batch,
        order,
        length,
        magnitude,
        mini_batches,
        multiple,
        keep / 4,
        design,
        np.random.default_rng(seed),
        own_rows,
    )
    return plan, magnitude, length


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 90),
    st.integers(1, 4),
    st.integers(1, 6),
    st.floats(0.05, 1.0),
    st.floats(0, 1),
    st.sampled_from(["pivotal", "cube", "poisson"]),
)
def test_a_plan_keeps_its_promises(seed, n, mini_batches, multiple, keep, share, design):
    plan, magnitude, _ = make_plan(seed, n, mini_batches, multiple, keep, share, design)
    rows = plan.rows_per_mini_batch
    assert rows > 0
    assert rows % multiple == 0
    assert len(set(plan.kept)) == plan.kept.size
    for k, (mine, lacking) in enumerate(zip(plan.rows, plan.padding, strict=True)):
        assert mine.size + lacking == rows
        assert (plan.mini_batch[mine] == k).all()
        idle_left = set(np.flatnonzero((plan.mini_batch == k) & (magnitude == 0))) - set(mine)
        assert lacking == 0 or not idle_left, "padding while a filler was left"
    drawn = plan.weight > 0
    assert (plan.weight[drawn] == 1 / plan.pi[drawn]).all()
    assert (plan.pi[magnitude > 0] > 0).all(), "a completion with a gradient could never be kept"
    assert (magnitude[drawn] > 0).all()
    assert drawn[plan.kept].sum() == drawn.sum(), "a drawn completion is not trained on"
    if design != "poisson":
        assert sum(plan.padding) <= mini_batches * multiple - 1 or n < mini_batches * multiple


def test_fillers_are_the_shortest_rows_without_a_gradient():
    plan, magnitude, length = make_plan(5, n=64, informative_share=0.1, multiple=8)
    for k, mine in enumerate(plan.rows):
        fillers = mine[magnitude[mine] == 0]
        assert fillers.size > 0
        idle = np.flatnonzero((plan.mini_batch == k) & (magnitude == 0))
        assert sorted(length[fillers]) == sorted(length[idle])[: fillers.size]
        assert (plan.weight[fillers] == 0).all()


def test_the_row_count_is_the_multiple_nearest_to_the_budget():
    plan, magnitude, length = make_plan(2, n=512, mini_batches=4, multiple=4, keep=0.5, informative_share=1.0)
    budget = np.mean(
        [neyman_inclusion(magnitude[plan.mini_batch == k], length[plan.mini_batch == k], 0.5).sum() for k in range(4)]
    )
    assert abs(plan.rows_per_mini_batch - budget) <= 2


def test_keep_one_keeps_every_informative_row_with_weight_one():
    plan, magnitude, _ = make_plan(3, n=70, mini_batches=3, multiple=4, keep=1.0)
    assert (plan.weight == (magnitude > 0)).all()


def test_a_batch_without_any_gradient_still_fills_its_mini_batches():
    plan, _, _ = make_plan(1, n=32, mini_batches=2, multiple=2, informative_share=0.0)
    assert plan.rows_per_mini_batch == 2
    assert (plan.weight == 0).all()
    assert plan.padding == (0, 0)


@pytest.mark.parametrize("n", [1, 7, 48, 100])
def test_dealing_is_even_in_total_in_informative_rows_and_within_groups(n):
    rng = np.random.default_rng(n)
    informative, group = rng.random(n) < 0.5, np.arange(n) // 6
    dealt = deal_mini_batches(informative, group, 4, rng)
    for rows in (np.ones(n, bool), informative):
        counts = np.bincount(dealt[rows], minlength=4)
        assert counts.max() - counts.min() <= 1
    for g in range(group.max() + 1):
        counts = np.bincount(dealt[informative & (group == g)], minlength=4)
        assert counts.max() - counts.min() <= 1


def test_every_row_is_as_likely_in_every_mini_batch():
    """4,000 deals of 24 rows to 3 mini-batches: no |z| above 4.5."""
    rng = np.random.default_rng(0)
    informative, group = np.arange(24) % 3 > 0, np.arange(24) // 8
    counts = np.zeros((24, 3))
    for _ in range(4000):
        counts[np.arange(24), deal_mini_batches(informative, group, 3, rng)] += 1
    assert np.abs((counts - 4000 / 3) / np.sqrt(4000 * 2 / 9)).max() < 4.5


def test_the_weighted_sum_of_a_mini_batch_has_the_full_sum_as_expectation():
    """3,000 draws with everything before the draw fixed: |z| of the mean below 4.5, for each mini-batch."""
    rng = np.random.default_rng(11)
    n, mini_batches = 48, 2
    magnitude, length = rng.lognormal(size=n) * (rng.random(n) < 0.8), rng.integers(5, 100, n).astype(float)
    value, group = rng.normal(size=n) * magnitude, np.arange(n) // 8
    mini_batch = deal_mini_batches(magnitude > 0, group, mini_batches, rng)
    target = np.zeros(n)
    for k in range(mini_batches):
        target[mini_batch == k] = neyman_inclusion(magnitude[mini_batch == k], length[mini_batch == k], 0.5)
    order = np.lexsort((length, group))
    sums = np.array(
        [
            np.bincount(mini_batch, plan.weight * value)
            for plan in (
                plan_completions(
                    magnitude / np.sqrt(length),
                    target,
                    mini_batch,
                    order,
                    length,
                    value,
                    2,
                    3,
                    0.125,
                    "pivotal",
                    np.random.default_rng(s),
                )
                for s in range(3000)
            )
        ]
    )
    z = (sums.mean(0) - np.bincount(mini_batch, value)) / (sums.std(0) / np.sqrt(len(sums)))
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("design", ["pivotal", "cube"])
def test_the_expected_weight_of_every_completion_is_one_in_every_mini_batch_exactly(design):
    """All paths of the draws of two mini-batches, through the plan itself: E[weight] = 1 where there is a gradient."""
    rng = np.random.default_rng(4)
    magnitude, length = rng.lognormal(size=14) * (np.arange(14) % 7 > 0), rng.integers(5, 90, 14).astype(float)
    mini_batch = deal_mini_batches(magnitude > 0, np.arange(14) // 7, 2, rng)
    order, slope = rng.permutation(14), magnitude / np.sqrt(length)
    target = np.zeros(14)
    for k in range(2):
        target[mini_batch == k] = neyman_inclusion(magnitude[mini_batch == k], length[mini_batch == k], 0.5)

    def plan(generator):
        return plan_completions(slope, target, mini_batch, order, length, magnitude, 2, 1, 0.125, design, generator)

    expected, total, mini_batches_drawn = np.zeros(14), 0.0, {0: set(), 1: set()}
    for probability, outcome in every_path(plan):
        expected += probability * outcome.weight
        total += probability
        for k, drawn in mini_batches_drawn.items():
            drawn.add(tuple(np.flatnonzero((outcome.weight > 0) & (mini_batch == k))))
    assert all(len(drawn) > 5 for drawn in mini_batches_drawn.values()), "hardly anything was left to chance"
    assert total == pytest.approx(1, abs=1e-12)
    assert expected[magnitude > 0] == pytest.approx(1, abs=1e-10)
    assert (expected[magnitude == 0] == 0).all()


def test_independent_draws_that_keep_nothing_leave_one_inert_row():
    """Padding copies a row, so that there must be one; it weighs nothing."""
    n = 4
    plan = plan_completions(
        slope=np.ones(n),
        target_pi=np.full(n, 1e-9),
        mini_batch=np.zeros(n, int),
        order=np.arange(n),
        length=np.array([9.0, 3.0, 7.0, 5.0]),
        advantage=np.ones(n),
        mini_batches=1,
        multiple=2,
        floor=1e-9,
        design="poisson",
        rng=np.random.default_rng(0),
    )
    assert 1 in plan.kept.tolist()
    assert plan.rows_per_mini_batch == 2
    assert (plan.weight == 0).all()


def plan_of_kept_prompts(kept, rng, own_rows):
    """Plan the completions of those of six prompts that were kept, three in each of two mini-batches.

    Returns the (18,) weights, and the magnitudes of all.
    """
    made = np.random.default_rng(2)
    group_of, mini_batch_of = np.repeat(np.arange(6), 3), np.repeat([0, 1], 9)
    magnitude = made.lognormal(size=18) * (made.random(18) < np.repeat(made.random(6), 3))
    length = made.integers(5, 60, 18).astype(float)
    rows = np.flatnonzero(np.isin(group_of, kept))
    target = np.zeros(rows.size)
    for k in (0, 1):
        mine = mini_batch_of[rows] == k
        target[mine] = neyman_inclusion(magnitude[rows][mine], length[rows][mine], 0.5)
    plan = plan_completions(
        magnitude[rows] / np.sqrt(length[rows]),
        target,
        mini_batch_of[rows],
        np.arange(rows.size),
        length[rows],
        magnitude[rows],
        mini_batches=2,
        multiple=1,
        floor=0.125,
        design="pivotal",
        rng=rng,
        own_rows=own_rows,
    )
    weight = np.zeros(18)
    weight[rows] = plan.weight
    return weight, magnitude


def error_of_the_second_mini_batch(own_rows):
    """Return the largest |E[weight | weights of the first mini-batch] - 1|; two of three prompts are kept in each."""
    chance, expected = defaultdict(float), defaultdict(float)
    pairs = [(0, 1), (0, 2), (1, 2)]
    for kept in [(*first, *(3 + q for q in second)) for first in pairs for second in pairs]:
        paths = every_path(lambda rng, kept=kept: plan_of_kept_prompts(kept, rng, own_rows))
        for probability, (weight, magnitude) in paths:
            seen = weight[:9].tobytes()
            chance[seen] += probability / 9
            expected[seen] = expected[seen] + probability / 9 * weight[9:] * 1.5
            live = magnitude[9:] > 0
    assert live.sum() > 3
    return max(np.abs(expected[seen][live] / chance[seen] - 1).max() for seen in chance)


def test_with_rows_of_its_own_a_mini_batch_is_exact_whatever_the_one_before_drew():
    assert error_of_the_second_mini_batch(own_rows=True) < 1e-12
    assert error_of_the_second_mini_batch(own_rows=False) > 0.05, "the error that rows of its own mend"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 6), st.floats(0.05, 1.0), st.floats(0, 1))
def test_rows_of_its_own_are_filled_up_to_a_common_number(seed, mini_batches, multiple, keep, share):
    plan, magnitude, _ = make_plan(seed, 64, mini_batches, multiple, keep, share, own_rows=True)
    assert plan.rows_per_mini_batch % multiple == 0
    drawn = plan.weight > 0
    for k, (mine, lacking) in enumerate(zip(plan.rows, plan.padding, strict=True)):
        assert mine.size + lacking == plan.rows_per_mini_batch
        of_mine = plan.mini_batch == k
        live = of_mine & (magnitude > 0)
        assert drawn[of_mine].sum() == pytest.approx(plan.pi[of_mine].sum())
        assert drawn[of_mine].sum() >= min(1, live.sum())
        assert drawn[mine].sum() == drawn[of_mine].sum()
    assert (plan.weight[drawn] == 1 / plan.pi[drawn]).all()
