"""The probe measures through verl's real engines the norm of each completion's own gradient, and moves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine.cases import ROWS

TESTS = Path(__file__).parent.parent
MEASURED = 5


PRECISION = {"fsdp2": ("float64", 1e-10), "megatron": ("float32", 1e-5)}


@pytest.fixture(scope="module", params=PRECISION)
def probed(request, model, tmp_path_factory):
    """Six completions on one rank, and spread over two; and how close norms of this precision are."""
    engine = request.param
    dtype, tolerance = PRECISION[engine]

    def run(ranks):
        result = tmp_path_factory.mktemp("probe") / "norms.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("-m", "engine.measure_norms", engine, dtype, str(model), str(result)),
        ]
        env = {
            **os.environ,
            "VERL_PLATFORM": "cpu",
            "RAY_LOCAL_WORLD_SIZE": str(os.cpu_count()),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(TESTS),
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
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
