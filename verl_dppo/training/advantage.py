"""The advantage estimator registered as `dppo`: that of the FULL group, also after pruning.

Trainers that compute advantages from what is left of a group need it: DPPORayPPOTrainer, which tells it the advantage
of every survivor, and training loops of your own, which call `remember_full_groups` before they drop rows and get
GRPO's. verl's v1 trainer does not use it: v1 knows several trajectories per session under the name `grpo` only, and
the DPPO trainer puts the advantages back itself.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

_full_groups: dict[Hashable, tuple[float, float]] = {}
_survivors: tuple[list[Hashable], torch.Tensor, torch.Tensor] | None = None


def remember_survivors(advantage: torch.Tensor, reward: torch.Tensor, index: Sequence[Hashable]) -> None:
    """Keep the advantage of each row that is left, in place of what was kept of the step before.

    Args:
        advantage: (rows, response_length) in the full group, in the order in which the rows are trained on.
        reward: (rows,) that it was computed from.
        index: (rows,) the group of each row.
    """
    global _survivors
    if not len(index) == len(advantage) == len(reward):
        raise ValueError(f"{len(index)} group labels and {len(reward)} rewards for {len(advantage)} rows of advantages")
    _full_groups.clear()
    _survivors = list(index), advantage, reward


def forget_full_groups() -> None:
    """Keep nothing: until something is remembered again, the estimator raises."""
    global _survivors
    _full_groups.clear()
    _survivors = None


def remember_full_groups(token_level_rewards: torch.Tensor, index: Sequence[Hashable]) -> None:
    """Keep mean and standard deviation of the rewards of each group, in place of those of the step before.

    Args:
        token_level_rewards: (n, response_length) of the full batch.
        index: (n,) the group of each row: verl's `uid`.
    """
    if len(index) != len(token_level_rewards):
        raise ValueError(f"{len(index)} group labels for {len(token_level_rewards)} rows of rewards")
    forget_full_groups()
    scores = token_level_rewards.sum(-1).to(torch.float64)
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(index):
        members.setdefault(group, []).append(row)
    for group, rows in members.items():
        own = scores[rows]
        # A group of one is scored as in verl's GRPO: mean 0 and deviation 1.
        _full_groups[group] = (own.mean().item(), own.std().item()) if len(rows) > 1 else (0.0, 1.0)


@register_adv_est("dppo")
def compute_dppo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable],
    config: Any = None,
    epsilon: float = 1e-6,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages of the full groups, on every response token.

    They are those that were remembered of these very rows, or (R - mean) / (std + epsilon) with the mean and standard
    deviation that were remembered of their groups.

    Args:
        token_level_rewards: (n, response_length) of the rows that are left.
        response_mask: (n, response_length).
        index: (n,) the group of each row.
        config: verl's `algorithm` node; `norm_adv_by_std_in_grpo=False` leaves the division out (Dr.GRPO).
        epsilon: as in verl's GRPO.

    Returns:
        Advantages and returns, both (n, response_length).

    Raises:
        RuntimeError: rows, or a group, of which nothing was remembered in this step, or with other rewards.
    """
    if _survivors is not None:
        remembered, advantage, reward = _survivors
        if remembered != list(index) or advantage.shape != response_mask.shape:
            raise RuntimeError(
                "adv_estimator=dppo knows the advantages of the rows that DPPO kept, in their order, and these are "
                "others: rows must neither be dropped nor reordered between `_balance_batch` and the advantage"
            )
        if not torch.allclose(token_level_rewards.sum(-1).double(), reward.double(), rtol=1e-4, atol=1e-5):
            raise RuntimeError(
                "the rewards are not those that DPPO pruned and computed advantages by: what shapes them must do so "
                "before `_balance_batch`, where whole groups are there, e.g. in the reward function"
            )
        advantage = advantage.to(token_level_rewards.device, _float_like(token_level_rewards))
        return advantage.clone(), advantage.clone()
    # Idle rows, which fill a mini-batch up, are in nobody's group and have no token.
    counted = response_mask.any(-1).tolist()
    unseen = [group for group, counts in zip(index, counted, strict=True) if counts and group not in _full_groups]
    if unseen:
        raise RuntimeError(
            f"adv_estimator=dppo has no full-group statistics for group {unseen[0]!r} and {len(unseen) - 1} more: with "
            "DPPORayPPOTrainer its `_balance_batch` must run in every step (trainer.balance_batch=true, and `super()` "
            "where it is overridden); in a loop of your own call verl_dppo.training.advantage.remember_full_groups on "
            "the full batch before rows are dropped"
        )
    statistics = [_full_groups.get(group, (0.0, 1.0)) for group in index]
    mean, std = torch.tensor(statistics, device=token_level_rewards.device).unbind(1)
    advantage = token_level_rewards.sum(-1) - mean
    if config is None or config.get("norm_adv_by_std_in_grpo", True):
        advantage = advantage / (std + epsilon)
    advantage = (advantage.unsqueeze(-1) * response_mask).to(_float_like(token_level_rewards))
    return advantage, advantage


def _float_like(rewards: torch.Tensor) -> torch.dtype:
    """Return the type of advantages: that of the rewards, unless these are integers."""
    return rewards.dtype if rewards.dtype.is_floating_point else torch.float32
