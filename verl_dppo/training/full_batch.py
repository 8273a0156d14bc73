"""What is known of all completions of a step once they are rewarded, whichever container verl holds them in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics

from verl_dppo.pruning import surprise_signature
from verl_dppo.settings import refuse
from verl_dppo.training.passes import base_estimator


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


def describe(
    data: TensorDict,
    uid: NDArray,
    keys: Sequence[str],
    prompt_length: NDArray[np.int64],
    response_length: NDArray[np.int64],
    sequence_length: NDArray[np.int64],
    config: DictConfig,
) -> FullBatch:
    """Describe a step, with the advantage that verl's own function gives the full groups.

    Args:
        data: jagged columns of n rows in the order of submission: response_mask, rm_scores, and, where the rollout's
            log-probs count, rollout_log_probs and responses.
        uid: (n,) prompt of each row.
        keys: (n,) names `{uid}_{session}_{output}`.
        prompt_length, response_length, sequence_length: (n,) tokens.
        config: verl's composed configuration.

    Raises:
        RefusedSettingError: a session with several outputs, under an estimator that would take each for a completion.
    """
    session = [key.rsplit("_", 1)[0] for key in keys]
    estimator = base_estimator(config)
    if estimator != "grpo" and len(set(session)) < len(session):
        reason = "a session of this batch has several outputs, which verl scores as one completion for grpo only"
        way_out = "use grpo, or an agent loop with one output for each session"
        raise refuse("algorithm.adv_estimator", estimator, reason, way_out)
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
        signature = _signature(data["responses"], _like(log_prob, one_minus_p.nan_to_num(0.0, 0.0, 0.0)))
        negative_log_prob = float(-flat.sum() / max(float(counted.sum()), 1.0))
    full = _with_advantage(data.select("response_mask", "rm_scores"), uid, keys, estimator, config)
    _add_lengths(full, prompt_length, response_length)
    first = full.batch["response_mask"].argmax(1)
    advantage = full.batch["advantages"][torch.arange(len(full)), first].double().numpy()
    _, seen_at, group = np.unique(uid.astype(str), return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(seen_at))[group]
    return FullBatch(
        group=group,
        advantage=np.where(length > 0, advantage, 0.0),
        length=length,
        prompt_length=prompt_length,
        sequence_length=sequence_length,
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


def _with_advantage(
    data: TensorDict, uid: NDArray, keys: Sequence[str], estimator: str, config: DictConfig
) -> DataProto:
    """Return the padded batch with verl's own advantage."""
    # Here and not above: importing verl's v1 trainers imports ours, which imports this module.
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    proto = DataProto(batch=data.to_padded_tensor())
    proto.non_tensor_batch["uid"] = uid
    proto.batch["token_level_scores"] = proto.batch["token_level_rewards"] = proto.batch["rm_scores"]
    return compute_advantage_for_multi_trajectories(
        proto,
        batch_keys=list(keys),
        adv_estimator=estimator,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=config.algorithm.get("norm_adv_by_std_in_grpo", True),
        config=config.algorithm,
    )


def _add_lengths(proto: DataProto, prompt: NDArray[np.int64], response: NDArray[np.int64]) -> None:
    """Add what verl's data metrics read besides."""
    proto.batch["prompt_length"] = torch.tensor(prompt).float()
    proto.batch["response_length"] = torch.tensor(response).float()
    # verl's metrics read nothing of these two but their width.
    for name, lengths in (("prompts", prompt), ("responses", response)):
        proto.batch[name] = torch.zeros(1, 1).expand(len(proto), int(lengths.max()))
