"""Reading, pruning and reordering a step's batch as verl's v1 trainer holds it: a KVBatchMeta over the transfer
queue."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from verl_dppo.pruning import CompletionPlan, surprise_signature
from verl_dppo.settings import refuse

PADDING_TOKENS = 2  # one of prompt, one of response: the least that verl's engines take


@dataclass(frozen=True)
class FullBatch:
    """What the plan and the metrics need to know of all n completions of a step, before pruning.

    Attributes:
        group: (n,) int, the prompt of each completion, numbered in the order of submission.
        advantage: (n,) float64, from the full group.
        length: (n,) float64, response tokens that enter the loss.
        prompt_length: (n,) int, prompt tokens.
        sequence_length: (n,) int, prompt and response tokens, those of tools and environments included.
        reward: (n,) float64; that of a session stands at each of its outputs.
        session: (n,) int, the session of each completion; its outputs share one.
        has_advantage: (n,) bool, whether the advantage is one, and not the rounded zero of equal rewards.
        sum_sq_one_minus_p: (n,) float64, sum of (1 - p_t)^2 over its response, or None without rollout log-probs; not
            finite where one of these is not.
        signature: (n, d) float64, which tokens surprised, or None without rollout log-probs; see `chain_order`.
        mean_negative_log_prob: mean of -log p over all response tokens, an estimate of the rollout's entropy, or None.
        verl_metrics: verl's own metrics of rewards, advantages and lengths, taken over all n completions.
    """

    group: NDArray[np.int64]
    advantage: NDArray[np.float64]
    length: NDArray[np.float64]
    prompt_length: NDArray[np.int64]
    sequence_length: NDArray[np.int64]
    reward: NDArray[np.float64]
    session: NDArray[np.int64]
    has_advantage: NDArray[np.bool_]
    sum_sq_one_minus_p: NDArray[np.float64] | None
    signature: NDArray[np.float64] | None
    mean_negative_log_prob: float | None
    verl_metrics: dict[str, float]


def in_submission_order(batch: KVBatchMeta, position: Mapping[str, int]) -> KVBatchMeta:
    """Order rows by prompt (as submitted), session and output, in place of the order in which rollouts finished.

    Keys are `{uid}_{session}_{output}` and uids are random: without this, draws and sums would differ from run to run.
    """

    def place(row: int) -> tuple[int, str, int, int]:
        uid, session, output = batch.keys[row].rsplit("_", 2)
        return position.get(uid, len(position)), uid, int(session), int(output)

    batch.reorder(sorted(range(len(batch)), key=place))
    return batch


def row_sums(values: Any) -> NDArray[np.float64]:
    """Return (n,) sums of the rows of a jagged tensor."""
    lengths = values.offsets().diff()
    row = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return torch.zeros(lengths.numel(), dtype=torch.float64).index_add_(0, row, values.values().double()).numpy()


def usual_where_not_finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Replace values that are not finite by the median of the others: a log-prob of NaN must not end a run."""
    finite = np.isfinite(values)
    return np.where(finite, values, np.median(values[finite]) if finite.any() else 1.0)


def has_advantage(
    reward: NDArray[np.float64], advantage: NDArray[np.float64], group: NDArray[np.int64], session: Sequence[str]
) -> NDArray[np.bool_]:
    """Return for each row whether its advantage is one, and not a rounded zero.

    Rewards that are equal in a group leave no advantage, although in float32 it may come out as .05. Of a group that
    lost all sessions but one, verl takes the reward itself as advantage.

    Args:
        reward: (n,) of each row.
        advantage: (n,) as verl computed it, which only decides for sessions that are alone.
        group: (n,) its prompt, numbered from 0.
        session: (n,) its session; several rows may belong to one.
    """
    highest, lowest = np.full(group.max() + 1, -np.inf), np.full(group.max() + 1, np.inf)
    np.maximum.at(highest, group, reward)
    np.minimum.at(lowest, group, reward)
    group_of_session = dict(zip(session, group, strict=True))
    sessions = np.bincount(list(group_of_session.values()), minlength=group.max() + 1)
    return np.where(sessions[group] > 1, (highest > lowest)[group], advantage != 0)


def read_full_batch(batch: KVBatchMeta, config: DictConfig) -> FullBatch:
    """Fetch what is known after the reward, and compute the advantage on full groups with verl's own function.

    Args:
        batch: all rows of the step, without padding.
        config: verl's composed configuration.

    Raises:
        RefusedSettingError: a session with several outputs, under an estimator that would take each for a completion.
    """
    session = [key.rsplit("_", 1)[0] for key in batch.keys]
    estimator = config.algorithm.adv_estimator
    if estimator != "grpo" and len(set(session)) < len(session):
        reason = "a session of this batch has several outputs, which verl scores as one completion for grpo only"
        way_out = "use grpo, or an agent loop with one output for each session"
        raise refuse("algorithm.adv_estimator", estimator, reason, way_out)
    fields = ["uid", "response_mask", "rm_scores"]
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        fields += ["rollout_log_probs", "responses"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    uid = np.array(data.pop("uid").tolist(), dtype=object)
    mask = data["response_mask"]
    length, reward = row_sums(mask), row_sums(data["rm_scores"])
    # In bfloat16 the mean of a half-right group is off by .2 %: its two advantages would no longer be of one size.
    data["rm_scores"] = data["rm_scores"].to(torch.promote_types(data["rm_scores"].dtype, torch.float32))
    surprise = signature = negative_log_prob = None
    if "rollout_log_probs" in data:
        log_prob = data["rollout_log_probs"]
        counted = mask.values().bool()
        flat = torch.where(counted, log_prob.values().to(torch.float64), 0.0)
        one_minus_p = (1 - flat.exp()) * counted
        surprise = row_sums(_like(log_prob, one_minus_p**2))
        signature = _signature(data.pop("responses"), _like(log_prob, one_minus_p.nan_to_num(0.0, 0.0, 0.0)))
        negative_log_prob = float(-flat.sum() / max(float(counted.sum()), 1.0))
    full = _with_advantage(data.select("response_mask", "rm_scores"), uid, batch, config)
    first = full.batch["response_mask"].argmax(1)
    advantage = full.batch["advantages"][torch.arange(len(full)), first].double().numpy()
    _, seen_at, group = np.unique(uid.astype(str), return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(seen_at))[group]
    return FullBatch(
        group=group,
        advantage=np.where(length > 0, advantage, 0.0),
        length=length,
        prompt_length=np.array([tag["prompt_len"] for tag in batch.tags], dtype=np.int64),
        sequence_length=np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64),
        reward=reward,
        session=np.unique(session, return_inverse=True)[1],
        has_advantage=has_advantage(reward, advantage, group, session),
        sum_sq_one_minus_p=surprise,
        signature=signature,
        mean_negative_log_prob=negative_log_prob,
        verl_metrics=compute_data_metrics(full, use_critic=False),
    )


def _like(jagged: Any, values: torch.Tensor) -> Any:
    """Return a jagged tensor of other values in the same rows."""
    return torch.nested.nested_tensor_from_jagged(values, jagged.offsets())


def _signature(response: Any, one_minus_p: Any) -> NDArray[np.float64]:
    """Return (n, d) signatures of n responses from the jagged token ids and their 1 - p."""
    lengths = response.offsets().diff()
    if not torch.equal(lengths, one_minus_p.offsets().diff()):
        raise RuntimeError("the rollout's log-probs are not one for each response token, of every completion")
    row = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return surprise_signature(response.values().numpy(), one_minus_p.values().numpy(), row.numpy(), lengths.numel())


def _with_advantage(data: TensorDict, uid: NDArray, batch: KVBatchMeta, config: DictConfig) -> DataProto:
    """Return the padded batch with verl's own advantage, and what verl's data metrics read besides."""
    # Here and not above: importing verl's v1 trainers imports ours, which imports this module.
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    proto = DataProto(batch=data.to_padded_tensor())
    proto.non_tensor_batch["uid"] = uid
    proto.batch["token_level_scores"] = proto.batch["token_level_rewards"] = proto.batch["rm_scores"]
    proto = compute_advantage_for_multi_trajectories(
        proto,
        batch_keys=batch.keys,
        adv_estimator=config.algorithm.adv_estimator,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
        config=config.algorithm,
    )
    prompt, response = (torch.tensor([tag[name] for tag in batch.tags]) for name in ("prompt_len", "response_len"))
    proto.batch["prompt_length"], proto.batch["response_length"] = prompt.float(), response.float()
    # verl's metrics read nothing of these two but their width.
    for name, lengths in (("prompts", prompt), ("responses", response)):
        proto.batch[name] = torch.zeros(1, 1).expand(len(batch), int(lengths.max()))
    return proto


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
