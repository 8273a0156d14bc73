"""The automatic budget, the live check of magnitudes, the full batches at the end, and how they resume."""

import json

import numpy as np
import pytest
from end_to_end.conftest import DPPO, PROMPTS

pytestmark = pytest.mark.end_to_end

# Budgets move after three steps: before that, runs with keep=auto repeat to the bit although their times differ.
ADAPTIVE = (*DPPO, "algorithm.dppo.completion.probe_every=1", "algorithm.dppo.anneal_fraction=0.25")


@pytest.fixture(scope="module")
def adaptive(verl_run):
    """Three pruned steps with a probe in each, then a full batch; a checkpoint after every second."""
    return verl_run(*ADAPTIVE, "trainer.save_freq=2", steps=4)


def state_of(run, step):
    return json.loads((run.folder / "checkpoints" / f"global_step_{step}" / "dppo.json").read_text())


def test_probes_compare_magnitudes_with_true_norms(adaptive):
    for metrics in adaptive.metrics[:3]:
        assert metrics["dppo/keep"] == 0.6
        assert metrics["dppo/probe/correlation"] > 0.6
        assert metrics["dppo/probe/second_moment_ratio"] >= 1
        assert metrics["timing_s/dppo_probe"] > 0
    norms = state_of(adaptive, 2)["norms"]
    assert norms["step"] == [1.0] * 8 + [2.0] * 8
    assert len(set(norms["norm"])) > 10, "the norms do not differ, though completions may be equal"


def test_the_last_steps_are_verls_own_on_full_batches(adaptive):
    last = adaptive.metrics[3]
    of_full_batches = ("dppo/prompts/", "dppo/balance/", "dppo/packing/")
    assert {name for name in last if name.startswith("dppo/") and not name.startswith(of_full_batches)} == set()
    assert last["dppo/prompts/total_drawn"] == last["dppo/prompts/total_kept"] == 4 * PROMPTS
    assert "actor/entropy" in last
    assert last["global_seqlen/mean"] > adaptive.metrics[2]["global_seqlen/mean"]


def test_the_budget_is_learnt_from_measured_times_and_saved(adaptive):
    budget = state_of(adaptive, 4)["budget"]
    assert budget["steps"] == 2, "the first of three pruned steps warms up"
    assert budget["keep"] == 0.6
    assert budget["rollout_seconds"] > 0
    assert budget["inflation"][0] > budget["inflation"][9] > budget["inflation"][-1]


def test_the_prompt_history_lies_beside_it_and_numpy_reads_it(adaptive):
    prompts = state_of(adaptive, 4)["prompts"]
    assert prompts["kept"] == prompts["stream"]["position"] == 4 * PROMPTS
    file = np.load(adaptive.folder / "checkpoints" / "global_step_4" / prompts["history"]["file"])
    assert prompts["history"]["file"] == "dppo_prompts.npz"
    assert len(file["id"]) == prompts["history"]["prompts"] == 4 * PROMPTS
    assert sorted(file["step"]) == [step for step in (1, 2, 3, 4) for _ in range(PROMPTS)]
    assert set(file["visits"]) == {1}


def test_norms_the_switch_and_the_updates_resume_to_the_bit(adaptive, verl_run, tmp_path):
    run = verl_run(
        *ADAPTIVE,
        "trainer.save_freq=4",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={adaptive.folder / 'checkpoints' / 'global_step_2'}",
        steps=4,
        folder=tmp_path,
    )
    assert [m["training/global_step"] for m in run.metrics] == [3, 4]
    # The hook that writes them sees the engine take the norm of each of the eight probes, too.
    assert run.updates == adaptive.updates[-10:]
    assert len({update["hash"] for update in run.updates}) == 3, "parameters before and after two updates"
    assert state_of(run, 4)["norms"] == state_of(adaptive, 4)["norms"]
    assert state_of(run, 4)["budget"]["steps"] == 1, "the second step is remembered, the third is the first of this run"
