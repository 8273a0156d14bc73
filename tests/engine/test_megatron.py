"""The same through verl's Megatron worker: data-, tensor- and pipeline-parallel, with the distributed optimizer."""

import pytest
from engine.cases import (
    ALGORITHMS,
    EVERY_ALGORITHM,
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

from verl_dppo.training.loss import EXACT_AGG_MODES

EVERY_AGGREGATION = [Case(agg_mode=mode) for mode in EXACT_AGG_MODES]
MODEL_PARALLEL = [*MINI_BATCHES, *HALF[:1]]
CASES = {
    "1 rank": unique(
        EVERY_AGGREGATION, EVERY_ALGORITHM, EVERY_SUBSET[:1], MINI_BATCHES, TWO_LEVELS, SINGLE, HALF, FAULTS
    ),
    "2 data-parallel": unique(EVERY_SUBSET[1:], MINI_BATCHES, SINGLE, HALF),
    "2 tensor-parallel": MODEL_PARALLEL,
    "2 pipeline-parallel": MODEL_PARALLEL,
}
ENVIRONMENT = {
    "2 tensor-parallel": {"TENSOR_PARALLEL": "2"},
    "2 pipeline-parallel": {"PIPELINE_PARALLEL": "2"},
}


@pytest.fixture(scope="module")
def measured(enumerate_through):
    return {
        ranks: enumerate_through("megatron", int(ranks[0]), cases, **ENVIRONMENT.get(ranks, {}))
        for ranks, cases in CASES.items()
    }


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
    one, two = (measured[ranks][case.name]["norm"] for ranks in ("1 rank", "2 data-parallel"))
    assert one == pytest.approx(two, rel=1e-12)


def test_megatron_and_fsdp2_have_the_same_full_gradient(measured, enumerate_through):
    """The patched megatron-core computes the model that transformers does, up to its float32 rotary angles."""
    cases = [Case(name) for name in ALGORITHMS]
    other = enumerate_through("fsdp2", 1, cases)
    for case in cases:
        assert measured["1 rank"][case.name]["norm"] == pytest.approx(other[case.name]["norm"], rel=1e-5)
