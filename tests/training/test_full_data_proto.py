"""The same rollouts in verl's transfer queue and as a padded DataProto: what is known of a step is the same."""

import dataclasses

import numpy as np
import pytest
import torch
from omegaconf import open_dict
from tensordict import TensorDict
from training.fake_queue import algorithm, jagged
from training.two_levels_queue import Queue
from verl.protocol import DataProto

from verl_dppo.training.full_data_proto import read_full_data_proto
from verl_dppo.training.transform import in_submission_order, read_full_batch

PROMPT, RESPONSE = 4, 7


def config_of(estimator="grpo", log_probs=True):
    config = algorithm(estimator)
    with open_dict(config):
        config.actor_rollout_ref.rollout.calculate_log_probs = log_probs
    return config


def rollouts(seed: int, dtype=torch.float32) -> list[dict]:
    """Return completions of groups of 1 to 4, some of them empty, with tokens of tools and log-probs of NaN inside."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(int(rng.integers(2, 6))):
        for _ in range(int(rng.integers(1, 5))):
            prompt, response = int(rng.integers(1, PROMPT + 1)), int(rng.integers(0, RESPONSE + 1))
            log_prob = -torch.from_numpy(rng.exponential(size=response)).float()
            if response > 3 and rng.random() < 0.2:
                log_prob[1] = torch.nan
            mask = torch.from_numpy(rng.random(response) < 0.8).long()
            if response:
                mask[0] = 1
            rows.append(
                {
                    "uid": f"prompt-{group}",
                    "prompt": prompt,
                    "responses": torch.from_numpy(rng.integers(0, 50, response)),
                    "response_mask": mask,
                    "rollout_log_probs": log_prob,
                    "reward": torch.tensor(rng.choice([0.0, 1.0, rng.random()])).to(dtype),
                }
            )
    return rows


def through_the_queue(rows: list[dict], config, monkeypatch):
    """Describe them as verl's v1 trainer holds them, whose empty response has one masked token of padding."""
    queue, seen = Queue(), {}
    queue.install(monkeypatch)
    for row in rows:
        session = seen[row["uid"]] = seen.get(row["uid"], -1) + 1
        length = row["responses"].numel()
        blank = 0 if length else 1
        scores = torch.zeros(length + blank, dtype=row["reward"].dtype)
        scores[-1] = row["reward"]
        columns = {
            name: torch.cat([row[name], row[name].new_zeros(blank)])
            for name in ("responses", "response_mask", "rollout_log_probs")
        }
        tag = {"prompt_len": row["prompt"], "response_len": length, "seq_len": row["prompt"] + length}
        queue.put(f"{row['uid']}_{session}_0", tag, uid=row["uid"], rm_scores=scores, **columns)
    batch = queue.batch(sorted(queue.fields, key=lambda key: key[::-1]))
    return read_full_batch(in_submission_order(batch, {row["uid"]: k for k, row in enumerate(rows)}), config)


def padded(rows: list[dict], reward_at=None) -> DataProto:
    """Return them as verl's agent loop hands them over; by default a reward stands at the last token of a response.

    Args:
        rows: from `rollouts`.
        reward_at: puts a row's reward into its (RESPONSE,) zeros.
    """
    attended = torch.zeros(len(rows), PROMPT + RESPONSE, dtype=torch.long)
    columns = {name: [] for name in ("responses", "response_mask", "rollout_log_probs", "rm_scores")}
    for i, row in enumerate(rows):
        length = row["responses"].numel()
        attended[i, PROMPT - row["prompt"] : PROMPT + length] = 1
        for name in ("responses", "response_mask", "rollout_log_probs"):
            columns[name].append(torch.cat([row[name], row[name].new_zeros(RESPONSE - length)]))
        scores = torch.zeros(RESPONSE, dtype=row["reward"].dtype)
        if reward_at is None:
            scores[length - 1] = row["reward"]
        else:
            reward_at(scores, row)
        columns["rm_scores"].append(scores)
    tensors = {name: torch.stack(values) for name, values in columns.items()}
    tensors |= {"prompts": torch.zeros(len(rows), PROMPT, dtype=torch.long), "attention_mask": attended}
    uid = np.array([row["uid"] for row in rows], dtype=object)
    return DataProto(TensorDict(tensors, batch_size=len(rows)), {"uid": uid})


def assert_same(one, other):
    for field in dataclasses.fields(one):
        of_one, of_other = getattr(one, field.name), getattr(other, field.name)
        if isinstance(of_one, np.ndarray):
            assert of_one.dtype == of_other.dtype, field.name
            assert of_one.tobytes() == of_other.tobytes(), field.name
        elif field.name == "verl_metrics":
            assert of_one == of_other
        else:
            assert np.array_equal(of_one, of_other, equal_nan=isinstance(of_one, float)), field.name


@pytest.mark.parametrize("seed", range(30))
def test_the_same_rollouts_are_described_alike_to_the_last_bit(seed, monkeypatch):
    rows, config = rollouts(seed), config_of(["grpo", "rloo", "opo"][seed % 3])
    of_v1 = through_the_queue(rows, config, monkeypatch)
    assert_same(of_v1, read_full_data_proto(padded(rows), config))
    assert of_v1.sum_sq_one_minus_p is not None
    assert of_v1.signature is not None


def test_the_rollouts_of_these_tests_have_what_they_claim():
    rows = [row for seed in range(30) for row in rollouts(seed)]
    assert any(row["responses"].numel() == 0 and row["reward"] > 0 for row in rows)
    assert any(row["rollout_log_probs"].isnan().any() for row in rows)
    assert any((row["response_mask"] == 0).any() for row in rows)


@pytest.mark.parametrize("seed", range(5))
def test_without_rollout_log_probs_there_is_no_surprise_in_either(seed, monkeypatch):
    rows, config = rollouts(seed), config_of(log_probs=False)
    found = read_full_data_proto(padded(rows), config)
    assert_same(through_the_queue(rows, config, monkeypatch), found)
    assert found.sum_sq_one_minus_p is found.signature is found.mean_negative_log_prob is None


@pytest.mark.parametrize("seed", range(5))
def test_rewards_in_bfloat16_are_read_in_float32_in_both(seed, monkeypatch):
    rows, config = rollouts(seed, torch.bfloat16), config_of()
    found = read_full_data_proto(padded(rows), config)
    assert_same(through_the_queue(rows, config, monkeypatch), found)
    assert found.reward.tolist() == [float(row["reward"]) for row in rows]


def on_several_tokens(scores, row):
    """Spread a reward in parts that add up without rounding."""
    length = row["responses"].numel()
    for k in range(max(length, 1)):
        scores[k] = row["reward"] / 2 if k == 0 and length > 1 else 0.0
    scores[length - 1] += row["reward"] - scores.sum()


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_on_several_tokens_is_their_sum(seed):
    rows, config = rollouts(seed), config_of()
    assert_same(
        read_full_data_proto(padded(rows), config), read_full_data_proto(padded(rows, on_several_tokens), config)
    )


def at_the_very_end(scores, row):
    scores[-1] = row["reward"]


def on_the_first_token(scores, row):
    scores[0] = row["reward"]


@pytest.mark.parametrize("place", [at_the_very_end, on_the_first_token])
def test_wherever_the_reward_of_a_row_stands_it_counts(place):
    rows, config = rollouts(1), config_of()
    assert_same(read_full_data_proto(padded(rows), config), read_full_data_proto(padded(rows, place), config))


def test_the_reward_of_an_empty_response_which_verl_puts_behind_the_padding_is_not_lost():
    """It moves the mean of its group, and makes a group informative of which all others failed."""
    row = {name: torch.zeros(0, dtype=torch.long) for name in ("responses", "response_mask")}
    row |= {"uid": "one", "prompt": 2, "rollout_log_probs": torch.zeros(0), "reward": torch.tensor(1.0)}
    full = {name: torch.ones(3, dtype=torch.long) for name in ("responses", "response_mask")}
    full |= {"uid": "one", "prompt": 2, "rollout_log_probs": -torch.ones(3), "reward": torch.tensor(0.0)}
    batch = padded([row, full, full])
    assert batch.batch["rm_scores"][0].tolist() == [0.0] * (RESPONSE - 1) + [1.0]
    found = read_full_data_proto(batch, config_of())
    assert found.reward.tolist() == [1.0, 0.0, 0.0]
    assert found.length.tolist() == [0.0, 3.0, 3.0]
    assert found.sequence_length.tolist() == [2, 5, 5]
    assert found.has_advantage.all()
    assert found.advantage == pytest.approx([0.0, -1 / np.sqrt(3), -1 / np.sqrt(3)], abs=1e-5)


def test_the_given_batch_is_left_as_it_is():
    batch = padded(rollouts(0))
    before = {name: column.clone() for name, column in batch.batch.items()}
    read_full_data_proto(batch, config_of())
    assert set(before) == set(batch.batch.keys())
    assert all(torch.equal(batch.batch[name].nan_to_num(7), column.nan_to_num(7)) for name, column in before.items())


def test_a_batch_without_rewards_is_refused_with_the_way_out():
    batch = padded(rollouts(0))
    batch.batch.pop("rm_scores")
    with pytest.raises(ValueError, match=r"no rm_scores when it is balanced.*enable_resource_pool=true"):
        read_full_data_proto(batch, config_of())


@pytest.mark.parametrize("name", ["prompts", "responses", "attention_mask", "response_mask", "uid"])
def test_a_batch_without_a_column_is_refused_by_its_name(name):
    batch = padded(rollouts(0))
    (batch.non_tensor_batch if name == "uid" else batch.batch).pop(name)
    with pytest.raises(ValueError, match=rf"the batch lacks the columns \['{name}'\]; it has \["):
        read_full_data_proto(batch, config_of())


def test_all_missing_columns_are_named_at_once():
    batch = padded(rollouts(0))
    batch.batch.pop("responses")
    batch.non_tensor_batch.pop("uid")
    with pytest.raises(ValueError, match=r"\['responses', 'uid'\]"):
        read_full_data_proto(batch, config_of())


def test_what_is_jagged_here_is_what_verls_own_queue_would_hold():
    """Guards the comparison itself: the queue of these tests nests rows as verl does."""
    rows = [torch.arange(3), torch.arange(1)]
    assert [row.tolist() for row in jagged(rows).unbind()] == [[0, 1, 2], [0]]
