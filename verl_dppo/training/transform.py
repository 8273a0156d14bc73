"""Reading, pruning and reordering a step's batch as verl's v1 trainer holds it: a KVBatchMeta over the transfer
queue."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from verl_dppo.pruning import CompletionPlan
from verl_dppo.training.full_batch import FullBatch, describe

PADDING_TOKENS = 2  # one of prompt, one of response: the least that verl's engines take


def in_submission_order(batch: KVBatchMeta, position: Mapping[str, int]) -> KVBatchMeta:
    """Order rows by prompt (as submitted), session and output, in place of the order in which rollouts finished.

    Keys are `{uid}_{session}_{output}` and uids are random: without this, draws and sums would differ from run to run.
    """

    def place(row: int) -> tuple[int, str, int, int]:
        uid, session, output = batch.keys[row].rsplit("_", 2)
        return position.get(uid, len(position)), uid, int(session), int(output)

    batch.reorder(sorted(range(len(batch)), key=place))
    return batch


def read_full_batch(batch: KVBatchMeta, config: DictConfig) -> FullBatch:
    """Fetch what is known after the reward; see `describe`.

    Args:
        batch: all rows of the step, without padding.
        config: verl's composed configuration.
    """
    fields = ["uid", "response_mask", "rm_scores"]
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        fields += ["rollout_log_probs", "responses"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    uid = np.array(data.pop("uid").tolist(), dtype=object)
    prompt, response, sequence = (
        np.array([tag[name] for tag in batch.tags], dtype=np.int64)
        for name in ("prompt_len", "response_len", "seq_len")
    )
    return describe(data, uid, batch.keys, prompt, response, sequence, config)


@contextmanager
def _tiny_padding() -> Iterator[None]:
    """Let verl's padding rows have PADDING_TOKENS tokens instead of a constant 128, for the duration of one call."""
    of_verl = padding_utils.SYNTHETIC_PADDING_SEQ_LEN
    padding_utils.SYNTHETIC_PADDING_SEQ_LEN = PADDING_TOKENS
    try:
        yield
    finally:
        padding_utils.SYNTHETIC_PADDING_SEQ_LEN = of_verl


def append_padding(batch: KVBatchMeta, rows: int, eos_token_id: int) -> KVBatchMeta:
    """Append `rows` of verl's own inert rows (tagged, zero mask, a uid of their own), as short as they can be."""
    if rows == 0:
        return batch
    with _tiny_padding():
        return padding_utils.upsample_batch_to_divisible_size(batch, len(batch) + rows, eos_token_id)


def rank_order(
    sequence_length: Sequence[int], mini_batch: NDArray[np.int64], ranks: int
) -> tuple[list[int], list[list[int]]]:
    """Order rows so that verl's contiguous split gives each rank its balanced part of every mini-batch.

    Args:
        sequence_length: (rows,) tokens.
        mini_batch: (rows,) mini-batch of each row; each holds the same number of rows, a multiple of `ranks`.
        ranks: data-parallel ranks.

    Returns:
        The order, and the rows of each rank: its part of mini-batch 0, then of mini-batch 1, and so on.
    """
    tokens = torch.tensor(list(sequence_length), dtype=torch.int64)
    of_rank: list[list[int]] = [[] for _ in range(ranks)]
    for k in range(int(mini_batch.max()) + 1):
        members = np.flatnonzero(mini_batch == k)
        parts = [list(range(members.size))]
        if ranks > 1:
            workload = calculate_workload(tokens[members])
            parts = get_seqlen_balanced_partitions(workload, k_partitions=ranks, equal_size=True)
        for rank, part in enumerate(parts):
            of_rank[rank].extend(int(members[i]) for i in part)
    return [row for rows in of_rank for row in rows], of_rank


def keep_rows(batch: KVBatchMeta, rows: NDArray[np.int64]) -> KVBatchMeta:
    """Return the batch of these rows; their data stays where it is."""
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[batch.keys[i] for i in rows],
        tags=[batch.tags[i] for i in rows],
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def prune(batch: KVBatchMeta, plan: CompletionPlan, eos_token_id: int) -> tuple[KVBatchMeta, NDArray[np.int64]]:
    """Cut the batch down to the plan's rows, and pad each mini-batch to the common size.

    Args:
        batch: the full batch, in the order that the plan was made for.
        plan: from `plan_completions`.
        eos_token_id: token of padding rows.

    Returns:
        The new batch, and (rows,) the mini-batch of each row. Data of dropped rows is still in the queue.
    """
    kept = append_padding(keep_rows(batch, plan.kept), sum(plan.padding), eos_token_id)
    mini_batch = np.concatenate(
        [np.full(r.size, k) for k, r in enumerate(plan.rows)] + [np.full(p, k) for k, p in enumerate(plan.padding)]
    )
    return kept, mini_batch


def order_for_ranks(batch: KVBatchMeta, mini_batch: NDArray[np.int64], ranks: int) -> dict[str, float]:
    """Order a batch in place for the ranks, by verl's own balance, and return verl's metrics; see `rank_order`."""
    tokens = [tag["seq_len"] for tag in batch.tags]
    order, of_rank = rank_order(tokens, mini_batch, ranks)
    batch.reorder(order)
    return log_seqlen_unbalance(tokens, of_rank, prefix="global_seqlen")


def put_columns(batch: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
    """Write columns into the queue and return the batch that lists them.

    Workers fetch the columns that the batch lists and no others: a batch from before this call would silently be
    trained on without them.
    """
    listed = tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(dict(columns), batch_size=len(batch)),
    )
    listed.extra_info = {**batch.extra_info, **listed.extra_info}
    return listed
