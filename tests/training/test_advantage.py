import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn

from verl_dppo.training.advantage import compute_dppo_advantage, remember_full_groups


def batch(seed=0, groups=5, size=6, width=7):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.randint(1, width + 1, (groups * size, 1), generator=generator)).float()
    rewards = torch.zeros(groups * size, width)
    rewards[:, 0] = torch.rand(groups * size, generator=generator)
    index = [f"uid-{i % groups}" for i in range(groups * size)]
    return rewards, mask, index


def test_it_is_registered_with_verl():
    assert get_adv_estimator_fn("dppo") is compute_dppo_advantage


@pytest.mark.parametrize("normalised", [True, False])
def test_survivors_keep_the_advantage_of_the_full_group(normalised):
    rewards, mask, index = batch()
    config = {"norm_adv_by_std_in_grpo": normalised}
    full, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=normalised)
    remember_full_groups(rewards, index)
    kept = [0, 1, 4, 9, 17, 28]
    ours, returns = compute_dppo_advantage(rewards[kept], mask[kept], index=[index[i] for i in kept], config=config)
    torch.testing.assert_close(ours, full[kept], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours, returns)
    survivors, _ = compute_grpo_outcome_advantage(
        rewards[kept], mask[kept], [index[i] for i in kept], norm_adv_by_std_in_grpo=normalised
    )
    assert (survivors - full[kept]).abs().max() > 0.1, "the test would pass with the statistics of the survivors"


def test_the_order_of_rows_does_not_matter():
    rewards, mask, index = batch()
    remember_full_groups(rewards, index)
    straight, _ = compute_dppo_advantage(rewards, mask, index=index)
    order = torch.randperm(len(index), generator=torch.Generator().manual_seed(1)).tolist()
    remember_full_groups(rewards[order], [index[i] for i in order])
    shuffled, _ = compute_dppo_advantage(rewards[order], mask[order], index=[index[i] for i in order])
    torch.testing.assert_close(shuffled, straight[order])


def test_a_group_of_one_is_scored_as_in_verl():
    rewards, mask, _ = batch(groups=1, size=1)
    remember_full_groups(rewards, ["only"])
    ours, _ = compute_dppo_advantage(rewards, mask, index=["only"])
    theirs, _ = compute_grpo_outcome_advantage(rewards, mask, ["only"])
    torch.testing.assert_close(ours, theirs)


def test_an_unknown_group_raises_and_names_the_way_out():
    rewards, mask, index = batch()
    remember_full_groups(rewards, index)
    with pytest.raises(RuntimeError, match="remember_full_groups on the full batch"):
        compute_dppo_advantage(rewards, mask, index=["other"] * len(index))


def test_statistics_of_the_step_before_are_forgotten():
    rewards, mask, index = batch()
    remember_full_groups(rewards, index)
    remember_full_groups(rewards[:1], ["new"])
    with pytest.raises(RuntimeError, match="no full-group statistics"):
        compute_dppo_advantage(rewards, mask, index=index)
