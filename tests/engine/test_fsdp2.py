"""The expected gradient of pruned training through verl's FSDP2 worker, over every draw, on one rank and on two."""

import pytest
from engine.cases import (
    ALGORITHMS,
    EVERY_AGGREGATION,
    EVERY_ALGORITHM,
    EVERY_LAYOUT,
    EVERY_SUBSET,
    FAULTS,
    HALF,
    MINI_BATCHES,
    SINGLE,
    TWO_LEVELS,
    Case,
    unique,
)
from engine.claims import assert_exact, assert_to_float32, assert_to_the_noise_of_bfloat16, on_ranks

CASES = {
    "1 rank": unique(
        EVERY_AGGREGATION, EVERY_ALGORITHM, EVERY_LAYOUT, EVERY_SUBSET, MINI_BATCHES, TWO_LEVELS, SINGLE, HALF, FAULTS
    ),
    "2 ranks": unique(EVERY_LAYOUT, EVERY_SUBSET, MINI_BATCHES, TWO_LEVELS, SINGLE, HALF),
}


@pytest.fixture(scope="module")
def measured(enumerate_through):
    return {ranks: enumerate_through("fsdp2", int(ranks[0]), cases) for ranks, cases in CASES.items()}


@on_ranks(CASES, "float64")
def test_the_expected_gradient_is_that_of_stock_verl_on_all_rows(measured, ranks, case):
    assert_exact(measured[ranks][case.name])


@on_ranks(CASES, "float32")
def test_it_is_to_the_rounding_of_float32(measured, ranks, case):
    assert_to_float32(measured[ranks][case.name])


@on_ranks(CASES, "bfloat16")
def test_it_is_to_twice_the_noise_of_a_bfloat16_engine(measured, ranks, case):
    assert_to_the_noise_of_bfloat16(measured[ranks][case.name])


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_the_enumeration_sees_what_is_biased(measured, case):
    assert measured["1 rank"][case.name]["error"] > 1e-3


@pytest.mark.parametrize("case", MINI_BATCHES, ids=lambda case: case.algorithm)
def test_one_rank_and_two_have_the_same_full_gradient(measured, case):
    one, two = (measured[ranks][case.name]["norm"] for ranks in CASES)
    assert one == pytest.approx(two, rel=1e-12)


def test_every_algorithm_and_every_term_changes_the_gradient(measured):
    """Otherwise a case above would be another one under a second name."""
    cases = unique(EVERY_ALGORITHM, [case for case in EVERY_AGGREGATION if case.agg_mode == "token-mean"])
    norms = {round(measured["1 rank"][case.name]["norm"], 6) for case in cases}
    # With no term or both each algorithm, with one of them the first; its other two are there under both names.
    assert len(norms) == 2 * len(ALGORITHMS) + 2


def test_draws_of_every_subset_are_all_the_subsets(measured):
    assert measured["1 rank"][EVERY_SUBSET[0].name]["draws"] == 2**6
    assert measured["1 rank"][Case().name]["draws"] == 12, "those of three that the pivotal method can keep"


def test_draws_of_two_levels_are_all_there_are(measured):
    """Of one prompt or the other every subset; of each by itself that, or none of it."""
    assert [measured["1 rank"][case.name]["draws"] for case in TWO_LEVELS[:2]] == [2 * 2**3, (1 + 2**3) ** 2]
