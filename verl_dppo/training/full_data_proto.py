"""Reads what is known of all completions of a step from the DataProto of verl's classic trainers."""

from collections import Counter
from typing import Any

import torch
from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu

from verl_dppo.training.full_batch import FullBatch, describe

_NEEDED = ("prompts", "responses", "attention_mask", "response_mask")


def read_full_data_proto(batch: DataProto, config: DictConfig) -> FullBatch:
    """Read the padded batch of a step after its reward; see `describe`.

    Args:
        batch: all rows of the step in the order of submission: prompts padded on the left, responses on the right.
        config: verl's composed configuration.

    Raises:
        ValueError: rewards, or another column, that are not there.
    """
    missing = [name for name in _NEEDED if name not in batch.batch]
    missing += [] if "uid" in batch.non_tensor_batch else ["uid"]
    if "rm_scores" not in batch.batch:
        raise ValueError(
            "the batch has no rm_scores when it is balanced: DPPO prunes by the rewards of whole groups, so that they "
            "must come with the rollout, from a reward function or a reward model with devices of its own "
            "(reward.reward_model.enable_resource_pool=true)"
        )
    if missing:
        raise ValueError(f"the batch lacks the columns {missing}; it has {sorted([*batch.batch.keys()])}")
    attended = batch.batch["attention_mask"].bool()
    width = batch.batch["prompts"].shape[1]
    prompt, response = attended[:, :width].sum(1), attended[:, width:].sum(1)
    cut = _Cut(response, batch.batch["responses"].shape[1])
    columns = {"response_mask": cut(batch.batch["response_mask"]), "rm_scores": cut.totals(batch.batch["rm_scores"])}
    if config.actor_rollout_ref.rollout.calculate_log_probs and "rollout_log_probs" in batch.batch:
        columns |= {name: cut(batch.batch[name]) for name in ("rollout_log_probs", "responses")}
    uid = batch.non_tensor_batch["uid"]
    return describe(
        tu.get_tensordict(columns),
        uid,
        _keys(uid),
        prompt.numpy(),
        response.numpy(),
        (prompt + response).numpy(),
        config,
    )


class _Cut:
    """Makes jagged tensors of padded ones. An empty response keeps one masked position, where its reward can stand."""

    def __init__(self, response_length: torch.Tensor, width: int) -> None:
        length = response_length.clamp(min=1)
        self.offsets = torch.nn.functional.pad(length.cumsum(0), (1, 0))
        self.last = length - 1
        self.inside = torch.arange(width) < length[:, None]

    def __call__(self, padded: torch.Tensor) -> Any:
        return torch.nested.nested_tensor_from_jagged(padded[self.inside], self.offsets)

    def totals(self, padded: torch.Tensor) -> Any:
        """Put the sum of each row at its end: verl itself may have put the reward behind an empty response."""
        dtype = torch.promote_types(padded.dtype, torch.float32)
        moved = torch.zeros(padded.shape, dtype=dtype)
        moved[torch.arange(len(padded)), self.last] = padded.to(dtype).sum(-1)
        return self(moved)


def _keys(uid: Any) -> list[str]:
    """Return names `{uid}_{session}_{output}`, each row being a session of its own."""
    seen: Counter = Counter()
    keys = []
    for name in uid:
        keys.append(f"{name}_{seen[name]}_0")
        seen[name] += 1
    return keys
