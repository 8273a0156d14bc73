"""Pruned runs through verl's real entry point: they repeat, resume, run on two ranks, and report what they did."""

import json

import numpy as np
import pytest
from end_to_end.conftest import COMPLETIONS, DPPO, PROMPTS, PRUNED
from transformers import AutoTokenizer

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.pruning import deal_mini_batches

pytestmark = pytest.mark.end_to_end


def test_half_of_the_informative_tokens_are_trained_on_in_the_same_number_of_steps(pruned):
    assert len(pruned.updates) == 8, "two optimiser steps for each of four batches"
    for metrics in pruned.metrics:
        assert metrics["dppo/kept_informative_token_fraction"] == pytest.approx(0.5, abs=0.15)
        assert metrics["dppo/kept_completions"] < PROMPTS * COMPLETIONS * 0.8
        assert metrics["dppo/weight_max"] <= 4 / 0.5 + 1e-9
        assert metrics["dppo/weight_sum_ratio"] == pytest.approx(1, abs=0.4)
        assert metrics["dppo/variance_inflation"] > 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_the_loss_is_handed_the_weights_advantages_and_denominators_of_the_full_batch(pruned):
    """Everything is computed again from the dump of all rollouts, and compared with what arrives in the worker."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    rows = iter(pruned.rows)
    for step, metrics in enumerate(pruned.metrics, start=1):
        dump = [json.loads(line) for line in (pruned.folder / "dump" / f"{step}.jsonl").read_text().splitlines()]
        keys = [line["uid"].rsplit("_", 2) for line in dump]
        order = sorted(range(len(dump)), key=lambda i: (keys[i][0], int(keys[i][1])))
        score = np.array([dump[i]["score"] for i in order]).reshape(PROMPTS, COMPLETIONS)
        std = score.std(1, ddof=1, keepdims=True)
        advantage = ((score - score.mean(1, keepdims=True)) / (std + 1e-6)).ravel()
        informative = np.repeat(std[:, 0] > 0, COMPLETIONS)
        group = np.repeat(np.arange(PROMPTS), COMPLETIONS)
        text = [dump[i]["output"] for i in order]
        # One byte is one token, and every response but a cut one ends in a token that the text does not show.
        length = np.array([min(len(t.encode()) + 1, 192) for t in text])
        dealt = deal_mini_batches(informative, group, 2, np.random.default_rng([0, step, 0, 0]))
        tokens = np.bincount(dealt, length)
        mine = [next(rows) for _ in range(round(metrics["dppo/rows_per_mini_batch"]) * 2)]
        expected = {(t, k): a for t, k, a in zip(text, tokens[dealt], advantage, strict=True)}
        assert {row["size"] for row in mine} == {PROMPTS * COMPLETIONS / 2}
        for row in mine:
            shown = tokenizer.decode(row["response"], skip_special_tokens=True)
            same = [a for (t, k), a in expected.items() if t == shown and k == row["tokens"]]
            assert same, "a row in a mini-batch that it was not dealt to, or with another token count"
            if row["weight"]:
                assert min(abs(a - row["advantage"]) for a in same) < 1e-4
        weights = [row["weight"] for row in mine if row["weight"]]
        assert max(weights) == pytest.approx(metrics["dppo/weight_max"])
        assert np.mean(weights) == pytest.approx(metrics["dppo/weight_mean"])
        assert max(weights) > 1.2, "no weight differs from 1: the test is empty"
        assert sum(weights) == pytest.approx(metrics["dppo/weight_sum_ratio"] * informative.sum())
    assert next(rows, None) is None


def test_every_step_reports_what_it_saved_and_what_it_cost(pruned):
    expected = {
        "prompts_drawn",
        "kept_fraction",
        "kept_token_fraction",
        "weight_max",
        "weight_mean",
        "variance_inflation",
        "tokens_saved",
        "seconds_saved",
        "time_ratio",
        "noise_equivalent_speedup",
        "filler_rows",
        "padding_rows",
        "kept/actor/entropy",
        "full/mean_negative_log_prob",
    }
    for metrics in pruned.metrics:
        assert expected <= {name.removeprefix("dppo/") for name in metrics if name.startswith("dppo/")}
        assert "actor/entropy" not in metrics
        # Not above 1 for sure: on a busy machine the time of a token may not be told from noise, and is taken for 0.
        assert metrics["dppo/time_ratio"] >= 1
        assert metrics["dppo/noise_equivalent_speedup"] < metrics["dppo/time_ratio"]


def test_a_resumed_run_continues_to_the_bit(pruned, verl_run, tmp_path):
    """Draws and rollouts are functions of the step: steps 3 and 4 after the checkpoint are those of the whole run."""
    run = verl_run(
        *PRUNED,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={pruned.folder / 'checkpoints' / 'global_step_2'}",
        steps=4,
        folder=tmp_path,
    )
    assert [m["training/global_step"] for m in run.metrics] == [3, 4]
    assert run.updates == pruned.updates[4:]


def test_two_ranks_agree_with_one_on_the_same_rollouts(verl_run, tmp_path_factory):
    """Two rows for each micro-batch on one rank and one on each of two make the same plan; sums differ by rounding."""
    folder = tmp_path_factory.mktemp("one-rank")
    fixed = (
        *PRUNED,
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    )

    def rows(size):
        return (
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={size}",
            f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={size}",
        )

    one = verl_run(*fixed, *rows(2), steps=2, folder=folder, record=folder / "rollouts.jsonl")
    two = verl_run(*fixed, *rows(1), "trainer.n_gpus_per_node=2", steps=2, replay=folder / "rollouts.jsonl")
    assert len(one.updates) == len(two.updates) == 4
    for ours, theirs in zip(two.updates, one.updates, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-6)
    for ours, theirs in zip(two.metrics, one.metrics, strict=True):
        for name in ("actor/pg_loss", "actor/entropy_loss", "dppo/kept_completions", "dppo/weight_max"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_kl_entropy_padding_and_the_dump_of_rollouts(verl_run, tmp_path):
    """With KL on no row is free of a gradient, so that independent draws must be padded; the dump holds every row."""
    run = verl_run(
        *PRUNED,
        "algorithm.dppo.completion.design=poisson",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.n_gpus_per_node=2",
        f"trainer.rollout_data_dir={tmp_path / 'dump'}",
        steps=2,
        folder=tmp_path,
    )
    assert sum(m["dppo/padding_rows"] for m in run.metrics) > 0, "no row was padded: the test is empty"
    for metrics in run.metrics:
        assert metrics["dppo/informative_fraction"] == 1
        assert metrics["dppo/filler_rows"] == 0
        assert metrics["response_length/min"] > 1
    for step in (1, 2):
        lines = [json.loads(line) for line in (tmp_path / "dump" / f"{step}.jsonl").read_text().splitlines()]
        assert len(lines) == PROMPTS * COMPLETIONS
        mean = sum(line["score"] for line in lines) / len(lines)
        assert mean == pytest.approx(run.metrics[step - 1]["critic/score/mean"], rel=1e-5)


@pytest.mark.long
def test_the_threshold_rule_trains_too(verl_run):
    run = verl_run(*DPPO, "algorithm.dppo.completion.rule=threshold", "algorithm.dppo.completion.rate=0.7", steps=1)
    assert run.metrics[0]["dppo/kept_fraction"] < run.metrics[0]["dppo/informative_fraction"]
    assert run.metrics[0]["dppo/weight_max"] > 2
