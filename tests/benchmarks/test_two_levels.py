"""The arithmetic of the benchmark of both levels: what is left out, what a pass costs, what Amdahl's law says of it."""

from statistics import fmean, median

import numpy as np
import pytest
import two_levels
from two_levels import Cost, Run


def step(gen=3.0, update=4.0, rest=1.0, sequence_tokens=1000.0, response_tokens=700.0, drawn=None, trained=None):
    """Return what verl logs of one step; with `drawn` it is one of a run that skips prompts."""
    metrics = {
        "timing_s/gen": gen,
        "timing_s/old_log_prob": update / 4,
        "timing_s/update_actor": update * 3 / 4,
        "timing_s/step": gen + update + rest,
        "timing_per_token_ms/gen": 1000 * gen / response_tokens,
        "perf/total_num_tokens": sequence_tokens,
    }
    if drawn is not None:
        metrics["dppo/prompts/drawn"] = float(drawn)
        metrics["dppo/trained_sequence_token_fraction"] = trained
    return metrics


FULL = Cost(steps=6.0, rollout=6.0, update=3.0, rest=1.0, generated=1000.0, trained=1500.0)
PRUNED = Cost(steps=4.2, rollout=4.0, update=1.0, rest=0.6, generated=650.0, trained=450.0)


def test_the_steps_that_are_timed_belong_to_later_passes_than_the_first():
    grpo = [step() for _ in range(8)]
    assert two_levels.timed_steps(grpo, rows=96) == grpo[6:]
    dppo = [step(drawn=16, trained=1.0) for _ in range(6)] + [step(drawn=23, trained=0.3) for _ in range(4)]
    assert two_levels.timed_steps(dppo, rows=96) == dppo[6:]
    # 90 prompts are not a whole number of steps: the one that ends the first pass is part of it.
    assert two_levels.timed_steps(grpo, rows=90) == grpo[6:]


def test_a_pass_has_as_many_steps_as_draw_its_rows():
    steps = [step(drawn=24, trained=0.25, gen=2.0, update=1.0, rest=0.5) for _ in range(3)]
    found = two_levels.cost(steps, rows=96)
    assert found.steps == 4
    assert (found.rollout, found.update, found.rest) == pytest.approx((8.0, 4.0, 2.0))
    assert found.generated == pytest.approx(4 * 700)
    assert found.trained == pytest.approx(4 * 250)
    assert found.shares == pytest.approx((8 / 14, 4 / 14, 2 / 14))


def test_a_median_over_steps_forgives_one_that_was_disturbed():
    steps = [step(), step(), step(gen=30.0)]
    assert two_levels.cost(steps, 96, median).rollout == pytest.approx(6 * 3.0)
    assert two_levels.cost(steps, 96, fmean).rollout == pytest.approx(6 * 12.0)


def test_each_phase_shrinks_with_its_own_count():
    assert two_levels.prediction(FULL, PRUNED) == pytest.approx(0.6 * 0.65 + 0.3 * 0.3 + 0.1 * 0.7)
    assert two_levels.prediction(FULL, FULL) == pytest.approx(1.0)


def test_another_rollout_share_is_at_the_expense_of_the_update():
    expected = 0.65 * 0.65 + 0.25 * 0.3 + 0.1 * 0.7
    assert two_levels.prediction(FULL, PRUNED, rollout_share=0.65) == pytest.approx(expected)
    assert two_levels.prediction(FULL, PRUNED, 0.6) == pytest.approx(two_levels.prediction(FULL, PRUNED))


def test_noise_is_paid_for_in_rollout_and_update_alone():
    assert two_levels.noise_equivalent(FULL, PRUNED, 0.0) == pytest.approx(PRUNED.seconds / FULL.seconds)
    assert two_levels.noise_equivalent(FULL, PRUNED, 0.2) == pytest.approx((5.0 * 1.2 + 0.6) / 10)


def test_runs_of_all_arms_draw_every_prompt_equally_often():
    # One pass of 16 a step, then 384 prompts at 23 a step.
    assert two_levels.ARMS["GRPO"].steps(96, 5, 0.7) == 30
    assert two_levels.ARMS["refill"].steps(96, 5, 0.7) == 6 + 17
    assert two_levels.ARMS["shrink"].steps(96, 5, 0.7) == 30


def test_the_scaled_rate_grows_with_the_root_of_the_prompts_of_a_step():
    plain = two_levels.ARMS["refill"].overrides(0.7, 0.5, 2e-4)
    scaled = two_levels.ARMS["refill-scaled-rate"].overrides(0.7, 0.5, 2e-4)
    assert scaled[:-1] == plain
    name, _, rate = scaled[-1].partition("=")
    assert name == "actor_rollout_ref.actor.optim.lr"
    assert float(rate) == pytest.approx(2e-4 * (23 / 16) ** 0.5, rel=1e-2)


def test_students_interval_of_five_seeds():
    low, high = two_levels.t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * np.sqrt(2.5 / 5)
    assert (low, high) == pytest.approx((3 - half, 3 + half))


def test_the_interval_over_problems_is_that_of_their_mean():
    values = list(np.random.default_rng(1).normal(0.1, 0.5, 400))
    low, high = two_levels.bootstrap_interval(values)
    error = np.std(values) / np.sqrt(400)
    assert (low, high) == pytest.approx(
        (np.mean(values) - 1.96 * error, np.mean(values) + 1.96 * error), abs=0.1 * error
    )


def test_differences_are_taken_by_problem_and_seed_before_they_are_averaged():
    def run(a, b):
        return Run((), {}, {"a": a, "b": b}, 0.0)

    dppo, grpo = [run([1.0, 1.0], [0.0, 1.0]), run([1.0, 0.0], [0.0, 0.0])], [run([0.0, 0.0], [1.0, 1.0])] * 2
    assert two_levels.differences_by_problem(dppo, grpo) == pytest.approx([0.75, -0.75])


def test_scores_are_gathered_by_problem(tmp_path):
    file = tmp_path / "3.jsonl"
    file.write_text(
        '{"input": "1 + 1", "score": 1.0}\n{"input": "2 + 2", "score": 0.0}\n{"input": "1 + 1", "score": 0.0}\n'
    )
    scores = two_levels.read_scores(file)
    assert scores == {"1 + 1": [1.0, 0.0], "2 + 2": [0.0]}
    assert two_levels.pass_rate(scores) == pytest.approx(0.25)
    assert two_levels.read_scores(tmp_path / "missing.jsonl") == {}
