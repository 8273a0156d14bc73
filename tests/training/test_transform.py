import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from training.fake_queue import read
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_dppo.pruning import CompletionPlan, variance_inflation
from verl_dppo.training.full_batch import has_advantage, row_sums, usual_where_not_finite
from verl_dppo.training.metrics import over_drawn_prompts, plan_metrics, saved_time
from verl_dppo.training.prompt_level import PromptsOfRows
from verl_dppo.training.transform import _tiny_padding, in_submission_order, rank_order


def test_rows_come_in_the_order_of_submission_session_and_output():
    keys = ["b_1_0", "a_10_0", "a_2_1", "a_2_0", "b_0_0"]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{"key": key} for key in keys])
    ordered = in_submission_order(batch, {"b": 0, "a": 1})
    assert ordered.keys == ["b_0_0", "b_1_0", "a_2_0", "a_2_1", "a_10_0"]
    assert [tag["key"] for tag in ordered.tags] == ordered.keys


def test_equal_rewards_leave_no_advantage_where_float32_makes_one_of_them():
    seen = 0.0
    for reward, size in [(0.1, 6), (0.1, 12), (0.7, 6), (0.7, 12), (0.9, 12), (0.9, 24)]:
        token_rewards = torch.full((size, 1), reward)
        advantage, _ = compute_grpo_outcome_advantage(token_rewards, torch.ones(size, 1), ["u"] * size)
        seen = max(seen, float(advantage.abs().max()))
        rewards = row_sums(torch.nested.as_nested_tensor(list(token_rewards), layout=torch.jagged))
        assert not has_advantage(rewards, rewards, np.zeros(size, int), [f"u_{i}" for i in range(size)]).any()
    assert seen > 1e-3, "verl's own advantage is zero in all of these: the test is empty"


def test_a_single_different_reward_makes_the_whole_group_informative():
    group = np.repeat([0, 1], 3)
    found = has_advantage(np.array([0.0, 0, 1, 1, 1, 1]), np.ones(6), group, [f"{g}_{i}" for i, g in enumerate(group)])
    assert found.tolist() == [True] * 3 + [False] * 3


def test_a_group_that_lost_all_sessions_but_one_keeps_the_advantage_that_verl_gives_it():
    """Two rows of one session are one completion: verl's GRPO takes its reward for its advantage."""
    reward, advantage = np.array([0.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0])
    found = has_advantage(reward, advantage, np.array([0, 0, 1]), ["a_0", "a_0", "b_0"])
    assert found.tolist() == [True, True, False]


def test_a_log_prob_that_is_not_finite_spoils_its_own_row_only():
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([float("nan")]), torch.tensor([4.0])]
    sums = row_sums(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert usual_where_not_finite(sums).tolist() == [3.0, 3.5, 4.0]
    assert usual_where_not_finite(np.array([np.nan])).tolist() == [1.0]


@pytest.mark.parametrize(("ranks", "mini_batches"), [(1, 1), (1, 3), (2, 2), (4, 3)])
def test_verls_contiguous_split_gives_each_rank_its_part_of_every_mini_batch(ranks, mini_batches):
    rng = np.random.default_rng(ranks * 10 + mini_batches)
    per_mini_batch = 4 * ranks
    mini_batch = rng.permutation(np.repeat(np.arange(mini_batches), per_mini_batch))
    length = rng.integers(10, 500, mini_batch.size)
    order, of_rank = rank_order(length.tolist(), mini_batch, ranks)
    assert sorted(order) == list(range(mini_batch.size))
    chunks = np.array(order).reshape(ranks, mini_batches, 4)
    for rank in range(ranks):
        assert chunks[rank].ravel().tolist() == of_rank[rank]
        for k in range(mini_batches):
            assert (mini_batch[chunks[rank, k]] == k).all()


def test_one_rank_keeps_the_order_of_the_batch():
    order, _ = rank_order([5, 1, 9, 2], np.zeros(4, int), 1)
    assert order == [0, 1, 2, 3]


def test_verls_padding_is_tiny_inside_the_call_and_verls_own_outside():
    """Fails when verl renames the constant, or bakes it into the function that reads it."""
    assert padding_utils.SYNTHETIC_PADDING_SEQ_LEN == 128
    row = {"prompts": torch.ones(7, dtype=torch.long), "position_ids": torch.arange(9)}
    with _tiny_padding():
        sample, tag = padding_utils.construct_minimal_padding_template(row, {"seq_len": 9}, eos_token_id=3)
    assert sample["input_ids"].tolist() == [3, 3]
    assert tag["seq_len"] == 2
    assert padding_utils.SYNTHETIC_PADDING_SEQ_LEN == 128


def test_row_sums_of_a_jagged_tensor():
    nested = torch.nested.as_nested_tensor([torch.tensor([1.0, 2.0]), torch.tensor([4.0])], layout=torch.jagged)
    assert row_sums(nested).tolist() == [3.0, 4.0]


def test_variance_inflation_by_hand():
    assert variance_inflation(np.array([0.5, 1.0, 0.0]), np.array([2.0, 1.0, 9.0])) == pytest.approx(4 / 5)
    assert variance_inflation(np.zeros(3), np.ones(3)) == 0


def test_saved_time_by_hand():
    """A step of 10 s, 4 of rollout and 3 of update and another of a probe, on half of the tokens, 10 % noisier."""
    timing = {"step": 10.0, "gen": 4.0, "old_log_prob": 1.0, "update_actor": 3.0, "dppo_probe": 1.0}
    assert saved_time(timing, 1.0, 100, 100, per_token=0.02, rho=0.1)["dppo/seconds_saved"] == pytest.approx(2)
    assert saved_time(timing, 1.0, 100, 100, per_token=None, rho=0.1)["dppo/seconds_saved"] == pytest.approx(3)
    assert saved_time(timing, 1.0, 100, 100, per_token=0.0, rho=0.1)["dppo/seconds_saved"] == 0
    assert saved_time(timing, 1.0, 0, 0, per_token=0.02, rho=0.1)["dppo/seconds_saved"] == 0
    saved = saved_time(timing, 1.0, 100, 100, per_token=0.5, rho=0.1)
    assert saved["dppo/seconds_saved"] == pytest.approx(3), "a token costs the mean at most"
    assert saved["dppo/time_ratio"] == pytest.approx(1.3)
    assert saved["dppo/noise_equivalent_speedup"] == pytest.approx(13 / (7 * 1.1 + 3))


def test_saved_time_of_skipped_prompts_by_hand():
    """The rollout of all drawn prompts would have had half as many tokens again: 2 s more than its 4."""
    timing = {"step": 10.0, "gen": 4.0, "update_actor": 3.0}
    saved = saved_time(timing, 1.5, 100, 100, per_token=0.02, rho=0.1)
    assert saved["dppo/seconds_saved"] == pytest.approx(2 + 2)
    assert saved["dppo/time_ratio"] == pytest.approx(1.4)
    assert saved["dppo/noise_equivalent_speedup"] == pytest.approx(14 / (7 * 1.1 + 3))


def two_prompts(monkeypatch):
    """A prompt of two completions that stands for itself, and one that stands for four."""
    full = read(monkeypatch, [[0.0, 1.0], [0.0, 2.0]], lengths=[2, 3, 4, 1])
    return dataclasses.replace(full, prompt_length=np.array([5, 5, 7, 7]), sequence_length=np.array([7, 8, 11, 8]))


def test_means_over_drawn_prompts_by_hand(monkeypatch):
    full, weight = two_prompts(monkeypatch), np.array([1.0, 1.0, 4.0, 4.0])
    found = over_drawn_prompts(full, weight)
    assert found["critic/score/mean"] == found["critic/rewards/mean"] == pytest.approx((0 + 1 + 0 + 4 * 2) / 10)
    assert found["response_length/mean"] == pytest.approx((2 + 3 + 4 * 4 + 4 * 1) / 10)
    assert found["prompt_length/mean"] == pytest.approx((5 + 5 + 4 * 7 + 4 * 7) / 10)
    # verl's mean is over tokens: each of the two advantages of a group is +-sqrt(1/2).
    tokens = np.array([2, 3, 4 * 4, 4 * 1])
    of_tokens = tokens @ np.array([-1, 1, -1, 1]) * np.sqrt(0.5) / tokens.sum()
    assert found["critic/advantages/mean"] == found["critic/returns/mean"] == pytest.approx(of_tokens, rel=1e-5)


def test_with_equal_weights_they_are_verls_own(monkeypatch):
    full = two_prompts(monkeypatch)
    found = over_drawn_prompts(full, np.full(4, 3.0))
    for name in ("critic/score/mean", "critic/rewards/mean", "critic/advantages/mean"):
        assert found[name] == pytest.approx(full.verl_metrics[name], rel=1e-6), name


def test_figures_of_a_draw_of_both_levels_by_hand(monkeypatch):
    """Of five candidates two were sampled, with weights 1 and 4; of their completions three are drawn."""
    full, of_prompt = two_prompts(monkeypatch), np.array([1.0, 1.0, 4.0, 4.0])
    pi, drawn = np.array([0.5, 1.0, 0.5, 1.0]), np.array([True, True, False, True])
    weight = np.where(drawn, of_prompt / pi, 0.0)
    plan = CompletionPlan(weight=weight, pi=pi, mini_batch=np.zeros(4, int), rows=[np.array([0, 1, 3])], padding=[0])
    prompts = PromptsOfRows(of_prompt, np.zeros(4, int), np.array([5]), 5.0, 8.0, inflation=0.5)
    found = plan_metrics(full, plan, np.array([1.0, 2.0, 3.0, 1.0]), prompts)
    assert found["dppo/prompts_drawn"] == 5
    assert found["dppo/completions"] == 4
    assert found["dppo/weight_max"] == 4
    assert found["dppo/weight_sum_ratio"] == pytest.approx((2 + 1 + 4) / (1 + 1 + 4 + 4))
    # (1/pi - 1) e^2 of the first and the third, e being magnitude times prompt weight.
    of_completions = (1 * 1 + 12**2) / (1 + 4 + 12**2 + 4**2)
    assert found["dppo/variance_inflation"] == pytest.approx(1.5 * (1 + of_completions) - 1)
    assert found["dppo/kept_token_fraction"] == pytest.approx((2 + 3 + 1) / 10)


@pytest.mark.parametrize("first", ["", "import verl; "])
@pytest.mark.parametrize(
    "module",
    [
        "transform",
        "full_batch",
        "completion_level",
        "hooks",
        "metrics",
        "loss",
        "advantage",
        "probe",
        "prompt_level",
        "state",
        "refusals",
        "trainer",
    ],
)
def test_any_module_may_be_what_imports_verls_trainers(module, first):
    end = "from verl.trainer.ppo.v1 import get_trainer_cls; get_trainer_cls('dppo'); print(plugin.failures)"
    code = f"{first}import verl_dppo.training.{module}; from verl_dppo import plugin; {end}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "{}", result.stderr
