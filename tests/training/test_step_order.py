"""The order of a step's rows, and the micro-batches of every pass, as they go into the queue."""

import json
import logging
from functools import cache

import numpy as np
import pytest
import torch
import transfer_queue
from cpu.tiny import config as tiny_config
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from training.two_levels_queue import Queue

from verl_dppo import plugin
from verl_dppo.packing import SequenceCost, pack
from verl_dppo.settings import RefusedSettingError
from verl_dppo.training.micro_batches import COLUMNS
from verl_dppo.training.passes import LOG_PROB, REFERENCE_LOG_PROB, UPDATE
from verl_dppo.training.refusals import check_run
from verl_dppo.training.step_order import StepOrder

assert plugin  # registers the configurations
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
PACKING, BALANCE = "algorithm.dppo.packing", "algorithm.dppo.balance"
CAP = 40
EOS = 7


@cache
def composed():
    """Return a run whose three passes all cut micro-batches of CAP tokens."""
    overrides = [
        "algorithm=dppo",
        "data.max_prompt_length=8",
        "data.max_response_length=24",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu={CAP}",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={CAP}",
        f"{ROLLOUT}.n=4",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides)


def step_order(*overrides, ranks=2, cost="tokens"):
    """Return the orderer of that run with other settings."""
    changes = [*overrides, f"trainer.n_gpus_per_node={ranks}", f"{BALANCE}.cost={cost}"]
    config = OmegaConf.merge(composed(), OmegaConf.from_dotlist(changes))
    return StepOrder(check_run(config), config)


class PaddedQueue(Queue):
    """The queue in memory that also takes verl's padding, whose other values than tensors are lists."""

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        columns = {name: list(fields[name]) for name in fields.keys()}  # noqa: SIM118 (as in `Queue`)
        for row, key in enumerate(keys):
            self.put(key, tags[row] if tags else {}, **{name: column[row] for name, column in columns.items()})
        return self.batch(keys)


@pytest.fixture
def rows(monkeypatch):
    """Return a function that puts rows of these lengths into a queue and gives their batch; `rows.queue` has them."""
    store = PaddedQueue()
    store.install(monkeypatch)

    def put(lengths, padding=()):
        for row, n in enumerate(lengths):
            tag = {"seq_len": int(n), "prompt_len": 1, "response_len": int(n) - 1}
            tokens = torch.full((int(n),), row)
            fields = {"uid": f"u{row}", "prompts": tokens[:1], "responses": tokens[1:], "input_ids": tokens}
            fields |= {"position_ids": torch.arange(int(n)), "response_mask": torch.ones(int(n) - 1, dtype=torch.long)}
            store.put(f"u{row}_0_0", tag | ({"is_padding": True} if row in padding else {}), **fields)
        return store.batch([f"u{row}_0_0" for row in range(len(lengths))])

    put.queue = store
    return put


def arranged(order, batch, mini_batch, ranks=2):
    return order.arrange(batch, np.asarray(mini_batch), ranks, EOS)


def row_of(key):
    return int(key.split("_")[0][1:])


def micro_batches(batch, name, ranks, lengths=None):
    """Return (rows, mini-batch) of every micro-batch of each rank from the queue, where verl splits rows evenly."""
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[COLUMNS[name]])
    assert data[COLUMNS[name]].dtype == torch.int64
    found = []
    for place, codes in zip(
        np.array_split(np.arange(len(batch)), ranks), data[COLUMNS[name]].chunk(ranks), strict=True
    ):
        bins = {}
        for i, code in zip(place.tolist(), codes.tolist(), strict=True):
            bins.setdefault(divmod(code, 1 << 32), []).append(i)
        found.append({key: bins[key] for key in sorted(bins)})
    return found


def tokens(batch, places):
    return sum(batch.tags[i]["seq_len"] for i in places)


def step_of(rows, seed, ranks=2, mini_batches=3, per_rank=5):
    """Rows of random lengths, the mini-batch of each where verl would cut it, and their batch."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 33, ranks * mini_batches * per_rank)
    mini_batch = np.tile(np.repeat(np.arange(mini_batches), per_rank), ranks)
    return rows(lengths), mini_batch


# ---- the order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_verls_contiguous_split_gives_each_rank_its_balanced_part_of_every_mini_batch(rows, seed):
    batch, mini_batch = step_of(rows, seed)
    before = dict(zip(batch.keys, mini_batch.tolist(), strict=True))
    ordered, metrics = arranged(step_order(), batch, mini_batch)
    assert sorted(ordered.keys) == sorted(before)
    loads = np.zeros((2, 3))
    for rank, of_rank in enumerate(ordered.chunk(2)):
        for k, of_mini_batch in enumerate(of_rank.chunk(3)):
            assert [before[key] for key in of_mini_batch.keys] == [k] * 5
            loads[rank, k] = sum(tag["seq_len"] for tag in of_mini_batch.tags)
    assert np.abs(np.diff(loads, axis=0)).max() <= 2
    assert metrics["dppo/balance/mini_batch_tokens"] == pytest.approx(loads.max(0).sum() / loads.mean(0).sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_columns_are_the_micro_batches_of_each_pass(rows, seed):
    """The update has some in each mini-batch, the log-probs over all rows of a rank; none is above its cap."""
    batch, mini_batch = step_of(rows, seed)
    overrides = (f"{PACKING}.micro_batch_tokens=36", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=64")
    order = step_order(f"{ACTOR}.ppo_max_token_len_per_gpu=50", *overrides)
    ordered, metrics = arranged(order, batch, mini_batch)
    assert {COLUMNS[UPDATE], COLUMNS[LOG_PROB]} <= set(ordered.fields)
    update, log_prob = (micro_batches(ordered, name, 2) for name in (UPDATE, LOG_PROB))
    assert list(update[0]) == list(update[1])
    assert list(log_prob[0]) == list(log_prob[1])
    for rank in (0, 1):
        for (k, _), places in update[rank].items():
            assert {i - 15 * rank for i in places} <= set(range(5 * k, 5 * k + 5))
            assert tokens(ordered, places) <= 36
        numbers = [[m for k, m in update[rank] if k == mine] for mine in range(3)]
        assert all(of == list(range(len(of))) and len(of) >= 2 for of in numbers)
        assert [k for k, _ in log_prob[rank]] == [0] * len(log_prob[rank])
        assert max(tokens(ordered, places) for places in log_prob[rank].values()) <= 36
    assert metrics["dppo/packing/micro_batches"] == len(update[0])


def test_what_the_batch_said_before_it_still_says(rows):
    batch, mini_batch = step_of(rows, 0)
    batch.extra_info["temperature"] = 0.5
    ordered, _ = arranged(step_order(), batch, mini_batch)
    assert ordered.extra_info["temperature"] == 0.5
    assert set(batch.fields) < set(ordered.fields)


def test_mini_batches_with_fewer_rows_are_filled_up_with_inert_ones(rows):
    """Three mini-batches of which one has two rows, the others four: two are missing."""
    lengths = [9, 8, 7, 6, 5, 5, 4, 4, 3, 3]
    ordered, metrics = arranged(step_order(), rows(lengths), [0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    assert len(ordered) == 12
    padding = [i for i, tag in enumerate(ordered.tags) if tag.get("is_padding")]
    assert metrics["dppo/packing/padding_rows"] == len(padding) == 2
    assert [ordered.tags[i]["seq_len"] for i in padding] == [2, 2]
    assert sorted(i % 6 // 2 for i in padding) == [2, 2]
    assert sorted(row_of(k) for i, k in enumerate(ordered.keys) if i not in padding) == list(range(10))


# ---- switches -------------------------------------------------------------------------------------------------------


def test_without_balance_rows_stay_where_they_are_and_micro_batches_are_the_bins_of_pack(rows):
    """But for a rank that has fewer than another: one of its bins is split."""
    batch, mini_batch = step_of(rows, 4)
    before = list(batch.keys)
    ordered, metrics = arranged(step_order(f"{BALANCE}.enable=false"), batch, mini_batch)
    assert ordered.keys == before
    assert not any(name.startswith("global_seqlen") for name in metrics)
    length = np.array([tag["seq_len"] for tag in ordered.tags])
    bins = micro_batches(ordered, UPDATE, 2)
    as_packed = 0
    for k in range(3):
        packed = [pack(length[15 * rank + 5 * k :][:5], CAP) for rank in (0, 1)]
        for rank in (0, 1):
            ran = [[i - 15 * rank - 5 * k for i in places] for (mine, _), places in bins[rank].items() if mine == k]
            assert len(ran) == max(map(len, packed))
            if len(packed[rank]) == len(ran):
                assert ran == [rows_.tolist() for rows_ in packed[rank]]
                as_packed += 1
    assert as_packed >= 3


def test_the_window_is_that_of_pack(rows):
    lengths = [20, 15, 22, 18, 25, 14, 21, 19]
    found = []
    for window in ("null", "1"):
        order = step_order(f"{BALANCE}.enable=false", f"{PACKING}.window={window}", ranks=1)
        ordered, _ = arranged(order, rows(lengths), [0] * 8, ranks=1)
        found.append(list(micro_batches(ordered, UPDATE, 1)[0].values()))
        expected = pack(lengths, CAP, None if window == "null" else int(window))
        assert found[-1] == [rows_.tolist() for rows_ in expected]
    assert found[0] != found[1]


def test_the_window_also_holds_where_rows_are_balanced(rows):
    """A window of one row needs more micro-batches for these than one of all rows."""
    lengths = [25, 30, 10, 15, 10, 30]
    needed = []
    for window in ("null", "1"):
        order = step_order(f"{PACKING}.window={window}", ranks=1)
        _, metrics = arranged(order, rows(lengths), [0] * 6, ranks=1)
        needed.append(metrics["dppo/packing/micro_batches"])
    assert needed == [3, len(pack(lengths, CAP, 1))]
    assert needed[1] > needed[0]


def test_without_packing_rows_are_balanced_and_no_column_is_written(rows):
    batch, mini_batch = step_of(rows, 0)
    fields = list(batch.fields)
    ordered, metrics = arranged(step_order(f"{PACKING}.enable=false"), batch, mini_batch)
    assert ordered.fields == fields
    assert not set(COLUMNS.values()) & set().union(*map(set, rows.queue.fields.values()))
    assert metrics["dppo/balance/mini_batch_tokens"] < 1.05
    assert not any("packing" in name or "micro_step" in name for name in metrics)


def save(folder, model):
    (folder / "config.json").write_text(json.dumps({**model, "architectures": ["Qwen2ForCausalLM"]}))


def test_a_cost_of_tokens_balances_tokens_and_one_of_flops_what_the_model_computes(rows, tmp_path):
    """In a model of hardly more than attention a sequence costs nearly the square of its length."""
    model = tiny_config(hidden_size=2, intermediate_size=1, num_attention_heads=2, vocab_size=8, head_dim=4096)
    save(tmp_path, model.to_dict())
    lengths = [100, 70, 70, 30, 20, 10]
    found = {}
    for kind in ("tokens", "flops"):
        order = step_order(f"actor_rollout_ref.model.path={tmp_path}", f"{PACKING}.enable=false", cost=kind)
        ordered, found[kind] = arranged(order, rows(lengths), [0] * 6)
        parts = [sorted(lengths[row_of(key)] for key in part.keys) for part in ordered.chunk(2)]
        assert [10, 70, 70] in parts if kind == "tokens" else [10, 20, 100] in parts
        cost = SequenceCost.tokens() if kind == "tokens" else SequenceCost.from_config(model)
        assert order.cost(lengths).tolist() == cost(lengths).tolist()
    assert found["tokens"]["dppo/balance/mini_batch_cost"] == found["tokens"]["dppo/balance/mini_batch_tokens"] == 1
    assert found["flops"]["dppo/balance/mini_batch_tokens"] == pytest.approx(170 / 150)
    of_ranks = [order.cost([100, 20, 10]).sum(), order.cost([70, 70, 30]).sum()]
    assert found["flops"]["dppo/balance/mini_batch_cost"] == pytest.approx(max(of_ranks) / np.mean(of_ranks))


def test_a_model_whose_flops_are_not_known_is_refused_with_the_way_out(tmp_path):
    save(tmp_path, {**tiny_config().to_dict(), "model_type": "gpt2"})
    with pytest.raises(RefusedSettingError, match=r"balance\.cost=flops is refused.*gpt2.*set .*balance\.cost=tokens"):
        step_order(f"actor_rollout_ref.model.path={tmp_path}", cost="flops")


def test_by_default_such_a_model_is_balanced_by_tokens_with_a_warning_and_others_by_flops(tmp_path, caplog):
    model = tiny_config()
    save(tmp_path, model.to_dict())
    assert step_order(f"actor_rollout_ref.model.path={tmp_path}", cost="auto").cost == SequenceCost.from_config(model)
    assert "to cost its tokens" not in caplog.text
    save(tmp_path, {**model.to_dict(), "model_type": "gpt2"})
    assert step_order(f"actor_rollout_ref.model.path={tmp_path}", cost="auto").cost == SequenceCost.tokens()
    assert "a sequence is taken to cost its tokens" in caplog.text
    assert "gpt2" in caplog.text


# ---- passes with ranks and caps of their own ------------------------------------------------------------------------


def test_the_reference_has_its_own_ranks_and_cap(rows):
    """Two of its devices share a sequence: one rank over all rows, and micro-batches of twice a device's tokens."""
    order = step_order(
        f"{ACTOR}.use_kl_loss=true",
        f"{REF}.log_prob_use_dynamic_bsz=true",
        f"{REF}.log_prob_max_token_len_per_gpu=25",
        f"{REF}.ulysses_sequence_parallel_size=2",
    )
    ordered, _ = arranged(order, *step_of(rows, 1))
    (whole,) = micro_batches(ordered, REFERENCE_LOG_PROB, 1)
    assert sorted(i for places in whole.values() for i in places) == list(range(30))
    largest = max(tokens(ordered, places) for places in whole.values())
    assert 25 < largest <= 50
    assert (
        max(tokens(ordered, places) for rank in micro_batches(ordered, LOG_PROB, 2) for places in rank.values()) <= CAP
    )


def test_a_reference_that_is_not_asked_gets_no_column(rows):
    ordered, _ = arranged(step_order(), *step_of(rows, 1))
    assert COLUMNS[REFERENCE_LOG_PROB] not in ordered.fields


def test_a_pass_with_fixed_micro_batches_gets_no_column(rows):
    order = step_order(f"{ROLLOUT}.log_prob_use_dynamic_bsz=false", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1")
    ordered, _ = arranged(order, *step_of(rows, 1))
    assert COLUMNS[UPDATE] in ordered.fields
    assert COLUMNS[LOG_PROB] not in ordered.fields


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("balanced", [True, False])
def test_a_sequence_above_the_cap_is_refused_with_setting_key_length_and_cap(rows, balanced):
    order = step_order(f"{ROLLOUT}.log_prob_max_token_len_per_gpu=39", f"{BALANCE}.enable={balanced}")
    arranged(order, rows([5, 39, 6, 7]), [0] * 4)
    message = (
        r"rollout\.log_prob_max_token_len_per_gpu=39 is refused: the sequence u1_0_0 has 40 tokens, and a micro-batch "
        r"39 at most.*raise it"
    )
    with pytest.raises(RefusedSettingError, match=message):
        arranged(order, rows([5, 40, 6, 7]), [0] * 4)


def warnings_of(caplog, *overrides):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="verl_dppo.training.step_order"):
        step_order(*overrides)
    return [record.getMessage() for record in caplog.records if record.name == "verl_dppo.training.step_order"]


def test_lengths_that_may_exceed_a_cap_are_warned_of_before_the_run(caplog):
    (message,) = warnings_of(caplog, "data.max_response_length=33", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=99")
    assert "max_response_length = 41" in message
    assert f"micro-batch of {CAP} tokens" in message
    assert f"see {ACTOR}.ppo_max_token_len_per_gpu" in message
    assert warnings_of(caplog, "data.max_response_length=32") == []


def test_fixed_micro_batches_are_warned_of_because_there_is_nothing_to_pack(caplog):
    fixed = (f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    (message,) = warnings_of(caplog, *fixed)
    assert "nothing to pack" in message
    assert f"{ACTOR}.use_dynamic_bsz=true" in message
    assert warnings_of(caplog, *fixed, f"{PACKING}.enable=false") == []


def test_with_fixed_micro_batches_rows_are_balanced_all_the_same(rows):
    order = step_order(f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    ordered, metrics = arranged(order, *step_of(rows, 2))
    assert COLUMNS[UPDATE] not in ordered.fields
    assert metrics["dppo/balance/mini_batch_tokens"] < 1.05
    assert not any("packing" in name or "micro_step" in name for name in metrics)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures_of_a_step_by_hand(rows):
    """Ranks get 30 + 12 and 24 + 18 tokens, which do not fit together: two micro-steps, as long as 30 and 18."""
    ordered, metrics = arranged(step_order(), rows([30, 24, 18, 12]), [0] * 4)
    assert sorted(sorted(map(row_of, part.keys)) for part in ordered.chunk(2)) == [[0, 3], [1, 2]]
    assert metrics["dppo/balance/mini_batch_cost"] == metrics["dppo/balance/mini_batch_tokens"] == 1
    assert metrics["dppo/balance/micro_step_cost"] == pytest.approx((30 + 18) / 42)
    assert metrics["dppo/balance/micro_step_tokens"] == pytest.approx((30 + 18) / 42)
    assert metrics["dppo/packing/micro_batches"] == 2
    assert metrics["dppo/packing/density"] == pytest.approx(84 / (2 * 2 * CAP))
    assert metrics["dppo/packing/padding_rows"] == 0
    assert metrics["global_seqlen/balanced_min"] == metrics["global_seqlen/balanced_max"] == 42


def test_figures_of_an_order_that_is_not_ours_by_hand(rows):
    """The first rank has 54 of 84 tokens. Micro-steps are as long as 30 and 24."""
    _, metrics = arranged(step_order(f"{BALANCE}.enable=false"), rows([30, 24, 18, 12]), [0] * 4)
    assert metrics["dppo/balance/mini_batch_tokens"] == pytest.approx(54 / 42)
    assert metrics["dppo/balance/micro_step_tokens"] == pytest.approx((30 + 24) / 42)
    assert metrics["dppo/packing/density"] == pytest.approx(84 / (2 * 2 * CAP))


def test_padding_rows_count_as_such_and_not_as_valid_tokens(rows):
    """Of rows that were padding when they came as well as of rows that are filled up here."""
    _, metrics = arranged(step_order(), rows([30, 24, 18, 2, 12], padding=[3]), [0] * 5)
    assert metrics["dppo/packing/padding_rows"] == 2
    of_bins = metrics["dppo/packing/micro_batches"] * 2 * CAP
    assert metrics["dppo/packing/density"] == pytest.approx((30 + 24 + 18 + 12) / of_bins)
