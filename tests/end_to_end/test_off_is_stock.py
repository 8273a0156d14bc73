"""Switched off, and with nothing but rows without a gradient dropped, DPPO is stock verl to the last bit."""

import pytest
from end_to_end.conftest import COMPLETIONS, DPPO, ONE_ROW_MICRO_BATCHES, PROMPTS, VERLS_ORDER

pytestmark = pytest.mark.end_to_end
OF_THE_FULL_BATCH = (
    "critic/score/mean",
    "critic/rewards/max",
    "critic/advantages/max",
    "critic/advantages/mean",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "prompt_length/mean",
    "perf/total_num_tokens",
)


def test_the_stock_run_trains(stock):
    assert len(stock.updates) == 3
    assert len({update["hash"] for update in stock.updates}) == 3
    assert all(update["grad_norm"] > 0 for update in stock.updates)
    assert max(m["training/rollout_probs_diff_max"] for m in stock.metrics) < 1e-5, "weights were not synchronised"


@pytest.mark.parametrize(
    "off",
    [
        ("algorithm.dppo.enable=false",),
        pytest.param(
            ("algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false", *VERLS_ORDER),
            marks=pytest.mark.long,
        ),
    ],
)
def test_off_gives_the_same_gradient_norms_and_parameters_to_the_bit(verl_run, stock, off):
    run = verl_run(*DPPO, *off, *ONE_ROW_MICRO_BATCHES)
    assert run.updates == stock.updates
    assert not [name for metrics in run.metrics for name in metrics if name.startswith("dppo/")]


def test_annealed_steps_give_the_same_while_prompts_are_remembered(verl_run, stock):
    """The prompt level draws the prompts that verl's loader would, and watches."""
    run = verl_run(*DPPO, *VERLS_ORDER, "algorithm.dppo.anneal_fraction=1", *ONE_ROW_MICRO_BATCHES)
    assert run.updates == stock.updates
    for step, metrics in enumerate(run.metrics, start=1):
        assert all(name.startswith("dppo/prompts/") for name in metrics if name.startswith("dppo/"))
        assert metrics["dppo/prompts/remembered"] == step * PROMPTS
        assert metrics["dppo/prompts/skipped"] == 0


@pytest.fixture(scope="module")
def all_informative(verl_run):
    """keep=1: every row with a gradient has weight 1, the others are dropped."""
    return verl_run(*DPPO, *VERLS_ORDER, "algorithm.dppo.completion.keep=1", *ONE_ROW_MICRO_BATCHES)


def test_dropping_rows_without_a_gradient_changes_nothing_to_the_bit(all_informative, stock):
    assert min(m["dppo/kept_fraction"] for m in all_informative.metrics) < 1, "nothing was dropped: the test is empty"
    assert {m["dppo/weight_max"] for m in all_informative.metrics} == {1.0}
    assert all_informative.updates == stock.updates


def test_verls_own_metrics_are_those_of_the_full_batch(all_informative, stock):
    for ours, theirs in zip(all_informative.metrics, stock.metrics, strict=True):
        for name in OF_THE_FULL_BATCH:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6), name
    assert {m["dppo/completions"] for m in all_informative.metrics} == {PROMPTS * COMPLETIONS}


@pytest.mark.long
def test_dynamic_micro_batches_change_the_gradient_norm_by_rounding_only(verl_run, stock):
    run = verl_run(*DPPO, "algorithm.dppo.completion.keep=1", steps=1)
    assert run.metrics[0]["dppo/kept_fraction"] < 1
    assert run.updates[0]["grad_norm"] == pytest.approx(stock.updates[0]["grad_norm"], rel=1e-6)
