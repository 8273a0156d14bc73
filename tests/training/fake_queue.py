"""The transfer queue as `read_full_batch` sees it, without Ray."""

from collections.abc import Sequence

import numpy as np
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from verl_dppo.training import transform
from verl_dppo.training.full_batch import FullBatch


def jagged(rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def algorithm(estimator="grpo", norm_by_std=True):
    """Return the part of verl's configuration that an advantage depends on."""
    node = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": norm_by_std}
    return OmegaConf.create(
        {"algorithm": node, "actor_rollout_ref": {"rollout": {"n": 2, "calculate_log_probs": False}}}
    )


def read(
    monkeypatch,
    rewards: Sequence[Sequence[float]],
    config=None,
    lengths: Sequence[int] | None = None,
    dtype=torch.float32,
    keys: Sequence[str] | None = None,
) -> FullBatch:
    """Return what `read_full_batch` makes of these groups of rewards.

    Args:
        monkeypatch: pytest's.
        rewards: for each prompt, the reward of each completion.
        config: from `algorithm`.
        lengths: response tokens of each completion; 3 by default.
        dtype: of the rewards in the queue.
        keys: of each completion; one session each by default.
    """
    group = np.repeat(np.arange(len(rewards)), [len(own) for own in rewards])
    flat = [reward for own in rewards for reward in own]
    lengths = [3] * len(flat) if lengths is None else lengths
    scores = [torch.zeros(n, dtype=dtype) for n in lengths]
    for score, reward in zip(scores, flat, strict=True):
        score[-1] = reward
    data = tu.get_tensordict(
        {
            "uid": np.array([f"u{g}" for g in group], dtype=object),
            "response_mask": jagged(torch.ones(n, dtype=torch.long) for n in lengths),
            "rm_scores": jagged(scores),
        }
    )
    monkeypatch.setattr(transform.tq, "kv_batch_get", lambda **_: data)
    batch = KVBatchMeta(
        partition_id="train",
        keys=list(keys or (f"u{g}_{i}_0" for i, g in enumerate(group))),
        tags=[{"prompt_len": 2, "response_len": n, "seq_len": n + 2} for n in lengths],
    )
    return transform.read_full_batch(batch, algorithm() if config is None else config)
