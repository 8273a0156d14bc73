import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, get_adv_estimator_fn

from verl_dppo.training.advantage import (
    compute_dppo_advantage,
    forget_full_groups,
    remember_full_groups,
    remember_survivors,
)


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


def test_labels_that_are_not_one_for_each_row_are_refused():
    rewards, _, index = batch()
    with pytest.raises(ValueError, match="29 group labels for 30 rows of rewards"):
        remember_full_groups(rewards, index[:-1])


def test_whole_numbers_as_rewards_give_the_advantages_of_the_same_floats():
    _, mask, index = batch()
    rewards = torch.zeros(len(index), 7, dtype=torch.long)
    rewards[::3, 0] = 1
    remember_full_groups(rewards, index)
    ours, _ = compute_dppo_advantage(rewards, mask, index=index)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, compute_grpo_outcome_advantage(rewards.float(), mask, index)[0])


def test_rows_without_a_token_need_no_group():
    rewards, mask, index = batch()
    remember_full_groups(rewards, index)
    mask[3], index[3] = 0, "filled up"
    ours, _ = compute_dppo_advantage(rewards, mask, index=index)
    assert not ours[3].any()
    mask[4], index[4] = 1, "no such group"
    with pytest.raises(RuntimeError, match="no full-group statistics for group 'no such group' and 0 more"):
        compute_dppo_advantage(rewards, mask, index=index)


# ---- the advantages of the survivors themselves ---------------------------------------------------------------------


def survivors():
    """Return rewards, response mask, groups and advantages of a few rows, as a trainer remembers them."""
    rewards, mask, index = batch(groups=2, size=3)
    advantage = torch.randn(len(index), generator=torch.Generator().manual_seed(4))[:, None] * mask
    remember_survivors(advantage, rewards.sum(1).double(), index)
    return rewards, mask, index, advantage


def test_what_was_remembered_of_the_survivors_is_given_back():
    rewards, mask, index, advantage = survivors()
    ours, returns = compute_dppo_advantage(rewards, mask, index=index)
    assert torch.equal(ours, advantage)
    assert torch.equal(returns, advantage)
    ours += 1
    assert torch.equal(returns, advantage), "one can be written into, and the other is left as it is"
    assert torch.equal(compute_dppo_advantage(rewards, mask, index=index)[0], advantage)


@pytest.mark.parametrize("change", ["one fewer", "another order", "another width"])
def test_other_rows_than_those_that_were_remembered_are_refused(change):
    rewards, mask, index, _ = survivors()
    if change == "one fewer":
        rewards, mask, index = rewards[1:], mask[1:], index[1:]
    elif change == "another order":
        index = index[::-1]
    else:
        mask = mask[:, 1:]
    with pytest.raises(RuntimeError, match="must neither be dropped nor reordered"):
        compute_dppo_advantage(rewards, mask, index=index)


def test_other_rewards_than_those_that_were_pruned_by_are_refused():
    rewards, mask, index, _ = survivors()
    compute_dppo_advantage(rewards * (1 + 1e-6), mask, index=index)
    rewards[2, 0] += 0.01
    with pytest.raises(RuntimeError, match=r"rewards are not those that DPPO pruned.*e\.g\. in the reward function"):
        compute_dppo_advantage(rewards, mask, index=index)


@pytest.mark.parametrize(("of_rewards", "of_index"), [(5, 6), (6, 5)])
def test_survivors_need_a_reward_and_a_group_for_each_row(of_rewards, of_index):
    rewards, mask, index = batch(groups=2, size=3)
    with pytest.raises(ValueError, match=rf"{of_index} group labels and {of_rewards} rewards for 6 rows"):
        remember_survivors(mask, rewards.sum(1)[:of_rewards], index[:of_index])


@pytest.mark.parametrize("last", ["survivors", "full groups", "nothing"])
def test_only_what_was_remembered_last_counts(last):
    rewards, mask, index, advantage = survivors()
    remember_full_groups(rewards, index)
    if last == "survivors":
        remember_survivors(advantage, rewards.sum(1), index)
        assert torch.equal(compute_dppo_advantage(rewards, mask, index=index)[0], advantage)
    elif last == "full groups":
        full, _ = compute_grpo_outcome_advantage(rewards, mask, index)
        torch.testing.assert_close(compute_dppo_advantage(rewards, mask, index=index)[0], full)
    else:
        forget_full_groups()
        with pytest.raises(RuntimeError, match="no full-group statistics"):
            compute_dppo_advantage(rewards, mask, index=index)
