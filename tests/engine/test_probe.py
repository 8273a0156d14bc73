"""The probe measures through verl's real engines the norm of each completion's own gradient, and moves nothing."""

import json

import pytest
from engine.cases import ROWS
from engine.launch import run_on_ranks

MEASURED = 5


PRECISION = {"fsdp2": ("float64", 1e-10), "megatron": ("float32", 1e-5)}


@pytest.fixture(scope="module", params=PRECISION)
def probed(request, model, tmp_path_factory):
    """Six completions on one rank, and spread over two; and how close norms of this precision are."""
    engine = request.param
    dtype, tolerance = PRECISION[engine]

    def run(ranks):
        result = tmp_path_factory.mktemp("probe") / "norms.json"
        run_on_ranks("engine.measure_norms", ranks, engine, dtype, model, result)
        return json.loads(result.read_text())

    return {ranks: run(ranks) for ranks in (1, 2)}, tolerance


def test_each_norm_is_that_of_the_completions_own_gradient(probed):
    of_ranks, tolerance = probed
    for ranks, result in of_ranks.items():
        for name, case in result["cases"].items():
            own = [case["turns"][turn] for turn in range(0, MEASURED, ranks)]
            assert own == pytest.approx(case["of_rank_0"][: len(own)], rel=tolerance), (name, ranks)
            assert max(own) > 1.5 * min(own), "all norms are alike: the test is empty"


def test_two_ranks_measure_what_one_does(probed):
    of_ranks, tolerance = probed
    for name, case in of_ranks[1]["cases"].items():
        two = of_ranks[2]["cases"][name]["turns"][:MEASURED]
        assert two == pytest.approx(case["turns"][:MEASURED], rel=10 * tolerance)


def test_it_measures_as_many_as_it_was_asked_for(probed):
    for result in probed[0].values():
        for case in result["cases"].values():
            assert [turn == turn for turn in case["turns"]] == [True] * MEASURED + [False] * (ROWS - MEASURED)


def test_no_parameter_moves(probed):
    for result in probed[0].values():
        assert result["moved"] == 0
        assert result["same"]
