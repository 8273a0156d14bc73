"""The simulated cluster on steps whose answers are known."""

from itertools import product

import numpy as np
import pytest
import simulated_cluster as simulated

from verl_dppo.packing import SequenceCost, imbalance, schedule

TOKENS = SequenceCost.tokens()
QUADRATIC = SequenceCost(per_token=1.0, attention=((1.0, None),))


@pytest.mark.parametrize("name", list(simulated.MODELS))
def test_costs_are_those_of_models_of_that_size(name):
    active = {"Qwen3-4B": 4.0e9, "Qwen3-32B": 32e9, "Qwen3-235B-A22B": 22e9}[name]
    cost = SequenceCost.from_config(simulated.COMMON | simulated.MODELS[name])
    assert cost.per_token == pytest.approx(2 * active, rel=0.06)


def test_verls_micro_batches_are_raised_on_all_ranks_until_the_cap_holds():
    cut = simulated.verl_micro_batches([np.array([20000, 20000, 20000]), np.array([1, 1, 1])])
    assert [sorted(of_rank) for of_rank in cut] == [[0, 1, 2], [0, 1, 2]]
    (ends_small,) = simulated.verl_micro_batches([np.array([32, 31, 30, 29, 28]) * 1000])
    assert ends_small.tolist() == [2, 3, 1, 4, 0]


def test_verls_order_deals_equal_counts_and_holds_the_cap():
    length = simulated.LENGTHS["log-normal"](96, 0)
    plan, mini_batch = simulated.verl_schedule(length, 4, 3, QUADRATIC)
    assert sorted(plan.row) == list(range(96))
    assert (plan.length == length[plan.row]).all()
    assert (plan.mini_batch == mini_batch[plan.row]).all()
    assert (np.unique(4 * plan.mini_batch + plan.rank, return_counts=True)[1] == 8).all()
    tokens = np.zeros((4, 3, plan.micro_batches.max()))
    np.add.at(tokens, (plan.rank, plan.mini_batch, plan.micro_batch), plan.length)
    assert tokens.max() <= simulated.CAPACITY


def test_a_row_that_no_other_rank_can_match_is_in_the_bound_of_micro_steps():
    length = np.array([10] + [1] * 30)
    # While the long row runs, the other rank holds ten short ones; of the other twenty each rank runs half.
    assert simulated.micro_step_bound(length, QUADRATIC(length), 2, 10) == (10 + 55) + 20 * 2 / 2
    assert simulated.micro_step_bound(length, TOKENS(length), 2, 10) == 40 / 2


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_beats_the_bound_of_micro_steps(seed):
    length = np.random.default_rng(seed).integers(1, 11, 6)
    cost, ranks, bins, best = QUADRATIC(length), 2, 6, np.inf
    for deal in product(range(bins), repeat=5):
        of_row = [0, *deal]
        if np.bincount(of_row, length, bins).max() <= 10:
            falling = -np.sort(-np.bincount(of_row, cost, bins))
            best = min(best, falling[::ranks].sum())
    assert best / 1.5 < simulated.micro_step_bound(length, cost, ranks, 10) <= best + 1e-9


@pytest.mark.parametrize("shape", list(simulated.LENGTHS))
def test_every_order_is_at_its_bound_or_above(shape):
    length = simulated.LENGTHS[shape](128, 1)
    theirs, mini_batch = simulated.verl_schedule(length, 4, 4, QUADRATIC)
    ours = schedule(length, 4, mini_batch, simulated.CAPACITY, QUADRATIC)
    at_end, at_steps = simulated.bounds(length, mini_batch, 4, QUADRATIC)
    end, steps = ([imbalance(plan, plan.cost, s) for plan in (ours, theirs)] for s in (False, True))
    assert 1 <= at_end + 1e-9 <= end[0] + 2e-9 <= end[1]
    assert at_end <= at_steps <= steps[0] + 1e-9 <= steps[1]
