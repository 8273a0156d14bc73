"""Base algorithms other than GRPO through verl's real entry point, checked against the dump of all rollouts."""

import json

import numpy as np
import pytest
from end_to_end.conftest import COMPLETIONS, ONE_ROW_MICRO_BATCHES, PROMPTS, VERLS_ORDER
from transformers import AutoTokenizer

from verl_dppo.cpu.demo import MODEL_FOLDER

pytestmark = pytest.mark.end_to_end
LONGEST = 192


def loo(score):
    return (score - score.mean(1, keepdims=True)) * COMPLETIONS / (COMPLETIONS - 1)


def centred(score):
    return score - score.mean(1, keepdims=True)


def normalised(score):
    return centred(score) / (score.std(1, ddof=1, keepdims=True) + 1e-6)


def run_with_dump(verl_run, folder, name, *overrides, steps):
    """Run a shipped configuration at keep=.5; the command line of these runs names an estimator, so it is repeated."""
    return verl_run(
        f"algorithm={name}",
        "algorithm.dppo.completion.keep=0.5",
        f"trainer.rollout_data_dir={folder / 'dump'}",
        *overrides,
        steps=steps,
        folder=folder,
    )


def groups_of_step(run, step):
    """Return the responses and (prompts, completions) scores of the whole batch of a step."""
    lines = (run.folder / "dump" / f"{step}.jsonl").read_text().splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["uid"].rsplit("_", 2))
    assert len(rows) == PROMPTS * COMPLETIONS
    uids = [row["uid"].rsplit("_", 2)[0] for row in rows]
    assert len(set(uids)) == PROMPTS
    assert uids == sorted(uids)
    return [row["output"] for row in rows], np.array([row["score"] for row in rows]).reshape(PROMPTS, COMPLETIONS)


def check_what_the_loss_received(run, advantage_of):
    """Advantages and the token count are those of the full batch, in one mini-batch; weights differ from 1."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    received = iter(run.rows)
    for step, metrics in enumerate(run.metrics, start=1):
        text, score = groups_of_step(run, step)
        advantage = advantage_of(score).ravel()
        informative = np.repeat(np.ptp(score, axis=1) > 0, COMPLETIONS)
        assert metrics["dppo/informative_fraction"] == pytest.approx(informative.mean())
        # One byte is one token, and every response but a cut one ends in a token that the text does not show.
        tokens = sum(min(len(t.encode()) + 1, LONGEST) for t in text)
        mine = [next(received) for _ in range(round(metrics["dppo/rows_per_mini_batch"]))]
        for row in mine:
            assert row["tokens"] == tokens
            if row["weight"]:
                shown = tokenizer.decode(row["response"], skip_special_tokens=True)
                assert min(abs(a - row["advantage"]) for t, a in zip(text, advantage, strict=True) if t == shown) < 1e-4
        weights = [row["weight"] for row in mine if row["weight"]]
        assert len(weights) < informative.sum()
        assert max(weights) > 1.2
        assert sum(weights) == pytest.approx(metrics["dppo/weight_sum_ratio"] * informative.sum())
    assert next(received, None) is None


@pytest.mark.long
def test_rloo_trains_on_the_advantages_of_full_groups(verl_run, tmp_path):
    run = run_with_dump(verl_run, tmp_path, "dppo_rloo", "algorithm.adv_estimator=rloo", steps=1)
    assert len(run.updates) == 1
    check_what_the_loss_received(run, loo)


def test_dapo_prunes_the_full_batch_that_dynamic_sampling_has_filled(verl_run, tmp_path):
    """Constant groups were replaced before the draw, so that every group has an advantage; with the length penalty."""
    run = run_with_dump(
        verl_run,
        tmp_path,
        "dppo_dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        "reward.reward_kwargs.overlong_buffer_cfg.len=128",
        steps=2,
    )
    assert len(run.updates) == 2
    evicted = [m.get("training/filter_groups/evicted_samples", 0) for m in run.metrics]
    assert sum(evicted) > 0, "no group was constant: the test is empty"
    for step, metrics in enumerate(run.metrics, start=1):
        _, score = groups_of_step(run, step)
        assert metrics["dppo/informative_fraction"] == 1
        assert len(np.unique(score)) > 2, "no response was long enough for the penalty: the test is empty"
        assert metrics["critic/score/mean"] == pytest.approx(score.mean(), rel=1e-5)
    check_what_the_loss_received(run, normalised)


@pytest.mark.long
def test_gspo_trains(verl_run, tmp_path):
    run = run_with_dump(verl_run, tmp_path, "dppo_gspo", steps=2)
    check_what_the_loss_received(run, normalised)


@pytest.mark.long
def test_dr_grpo_trains(verl_run, tmp_path):
    run = run_with_dump(verl_run, tmp_path, "dppo_dr_grpo", steps=2)
    check_what_the_loss_received(run, centred)


@pytest.mark.long
def test_dropping_rows_without_a_gradient_leaves_rloo_as_it_is_to_the_bit(verl_run):
    stock = verl_run("algorithm.adv_estimator=rloo", *ONE_ROW_MICRO_BATCHES, steps=2)
    everything = ("algorithm=dppo_rloo", "algorithm.adv_estimator=rloo", "algorithm.dppo.completion.keep=1")
    run = verl_run(*everything, *VERLS_ORDER, *ONE_ROW_MICRO_BATCHES, steps=2)
    assert min(m["dppo/kept_fraction"] for m in run.metrics) < 1, "nothing was dropped: the test is empty"
    assert run.updates == stock.updates
