"""The probe measures through verl's real engine the norm of each completion's own gradient, and moves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine.cases import ROWS

TESTS = Path(__file__).parent.parent
MEASURED = 5


@pytest.fixture(scope="module")
def probed(model, tmp_path_factory):
    """Six completions on one rank, and spread over two."""

    def run(ranks):
        result = tmp_path_factory.mktemp("probe") / "norms.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
            *("-m", "engine.measure_norms", str(model), str(result)),
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

    return {ranks: run(ranks) for ranks in (1, 2)}


def test_each_norm_is_that_of_the_completions_own_gradient(probed):
    for ranks, result in probed.items():
        for name, case in result["cases"].items():
            own = [case["turns"][turn] for turn in range(0, MEASURED, ranks)]
            assert own == pytest.approx(case["of_rank_0"][: len(own)], rel=1e-10), (name, ranks)
            assert max(own) > 1.5 * min(own), "all norms are alike: the test is empty"


def test_two_ranks_measure_what_one_does(probed):
    for name, case in probed[1]["cases"].items():
        assert probed[2]["cases"][name]["turns"][:MEASURED] == pytest.approx(case["turns"][:MEASURED], rel=1e-9)


def test_it_measures_as_many_as_it_was_asked_for(probed):
    for result in probed.values():
        for case in result["cases"].values():
            assert [turn == turn for turn in case["turns"]] == [True] * MEASURED + [False] * (ROWS - MEASURED)


def test_nothing_moves_and_no_gradient_is_left(probed):
    for result in probed.values():
        assert result["moved"] == 0
        assert not result["gradient_left"]
        assert result["optimizer_state"] == 0
        assert result["same"]
