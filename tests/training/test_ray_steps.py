"""What a step of DPPORayPPOTrainer leaves behind, and what it does not let pass."""

import numpy as np
import pytest
import torch
from training.ray_run import COMPLETION, RayRun, run_of_completions
from training.test_two_levels import CELLS
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.workers.utils import losses

from verl_dppo.training.data_proto import MINI_BATCH, ROW, WEIGHT
from verl_dppo.training.loss import dppo_loss
from verl_dppo.training.ray_trainer import PROMPT

NO_ORDER = (
    "algorithm.dppo.packing.enable=false",
    "algorithm.dppo.packing.micro_batch_tokens=null",
    "algorithm.dppo.balance.enable=false",
)


def run_of(*overrides: str) -> RayRun:
    return run_of_completions(*overrides, mini_batches=2)


def begin(run: RayRun, number: int = 1):
    """Return the rollouts of a step that the trainer stands before."""
    run._decided_by(None, number, np.random.default_rng(number))
    run.trainer.total_training_steps = 4
    return run.proto(run.every_row)


def stock_advantages(run: RayRun) -> torch.Tensor:
    batch = run.proto(run.every_row)
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    return compute_advantage(batch, "grpo", config=run.config.algorithm).batch["advantages"]


# ---- after the update -----------------------------------------------------------------------------------------------


def test_after_the_update_the_batch_is_the_full_one_in_the_order_of_submission():
    run = run_of()
    given = begin(run)
    rollouts = run.proto(run.every_row)
    batch, _ = run.until_update(given)
    assert len(batch) < len(run.every_row)
    assert {WEIGHT, ROW, MINI_BATCH} <= set(batch.batch.keys())
    run.trainer._update_actor(batch)
    assert [tuple(row) for row in batch.batch[COMPLETION].tolist()] == run.every_row
    for name, column in rollouts.batch.items():
        assert torch.equal(batch.batch[name], column), name
    for name, column in rollouts.non_tensor_batch.items():
        assert (batch.non_tensor_batch[name] == column).all(), name
    assert not {WEIGHT, ROW, MINI_BATCH, "old_log_probs"} & set(batch.batch.keys())
    assert batch.meta_info["global_token_num"] == rollouts.batch["attention_mask"].sum(1).tolist()
    for name in ("token_level_scores", "token_level_rewards"):
        assert torch.equal(batch.batch[name], rollouts.batch["rm_scores"])


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo"])
def test_after_the_update_advantages_are_those_of_verl_on_the_full_batch_to_the_last_bit(estimator):
    run = run_of(f"algorithm.adv_estimator={estimator}")
    batch, _ = run.until_update(begin(run))
    kept = batch.batch[ROW]
    of_survivors = batch.batch["advantages"]
    run.trainer._update_actor(batch)
    full = run.proto(run.every_row)
    full.batch["token_level_rewards"] = full.batch["rm_scores"]
    full = run.advantage(full, estimator)
    for name in ("advantages", "returns"):
        assert torch.equal(batch.batch[name], full.batch[name])
    drawn = kept >= 0
    assert drawn.any()
    assert torch.equal(of_survivors[drawn], full.batch["advantages"][kept[drawn]])


def test_the_worker_is_asked_for_mini_batches_of_what_is_left():
    run = run_of()
    batch, _ = run.until_update(begin(run))
    rows = len(batch)
    run.trainer._update_actor(batch)
    assert len(run.worker.gradients) == 2
    assert sum(int((weights > 0).sum()) for weights in run.worker.weights) <= rows < 12


# ---- steps that prune nothing ---------------------------------------------------------------------------------------


def test_an_annealed_step_is_verls_own():
    run = run_of("algorithm.dppo.anneal_fraction=0.5", *NO_ORDER)
    batch, metrics = run.until_update(begin(run, 2))
    assert (run.config.algorithm.adv_estimator, run.worker.loss.func) == ("dppo", dppo_loss)
    run.trainer._update_actor(batch)
    run.finish(metrics)
    given, stock = begin(run, 3), run.proto(run.every_row)
    RayPPOTrainer._balance_batch(run.trainer, stock, {})
    batch, metrics = run.until_update(given)
    assert (run.config.algorithm.adv_estimator, run.worker.loss.func) == ("grpo", losses.ppo_loss)
    assert run.config.algorithm.dppo.base_estimator == "grpo"
    assert torch.equal(batch.batch[COMPLETION], stock.batch[COMPLETION])
    assert not {WEIGHT, ROW, MINI_BATCH} & set(batch.batch.keys())
    advantage = stock_advantages(run)
    place = [run.every_row.index(tuple(row)) for row in stock.batch[COMPLETION].tolist()]
    assert torch.equal(batch.batch["advantages"], advantage[place])
    run.trainer._update_actor(batch)
    assert torch.equal(batch.batch[COMPLETION], stock.batch[COMPLETION])
    for k, gradient in enumerate(run.worker.gradients):
        mine = [run.every_row[i] for i in place[6 * k : 6 * k + 6]]
        tokens = sum(int(run.completion(*row).mask.sum()) for row in mine)
        assert gradient == pytest.approx(run.full_gradient(mine, tokens, 6), abs=1e-15)
    run.finish(metrics)


def test_with_nothing_pruned_the_loss_and_the_estimator_are_verls_from_the_first_step():
    run = run_of("algorithm.dppo.completion.enable=false", "algorithm.adv_estimator=rloo")
    batch, metrics = run.until_update(begin(run))
    assert run.config.algorithm.adv_estimator == "rloo"
    assert run.worker.loss is None, "verl gave the workers its own loss before"
    assert sorted(tuple(row) for row in batch.batch[COMPLETION].tolist()) == run.every_row
    run.trainer._update_actor(batch)
    run.finish(metrics)
    assert "dppo/packing/density" in metrics
    assert not {WEIGHT, ROW} & set(batch.batch.keys())


# ---- what does not pass ---------------------------------------------------------------------------------------------


def test_a_step_that_was_not_finished_stops_the_next_one_and_the_way_out_is_named():
    run = run_of()
    batch, metrics = run.until_update(begin(run))
    run.trainer._update_actor(batch)
    with pytest.raises(RuntimeError, match=r"step 1 was not finished: .*finish_step\(metrics\)"):
        run.trainer._balance_batch(begin(run, 2), {})
    run.finish(metrics)
    run.trainer._balance_batch(begin(run, 2), {})


def test_a_step_is_not_finished_without_its_seconds():
    run = run_of()
    _, metrics = run.until_update(begin(run))
    with pytest.raises(ValueError, match=r"lack timing_s/step; add verl's compute_timing_metrics"):
        run.trainer.finish_step(metrics)


def reverse(batch):
    batch.reorder(torch.arange(len(batch) - 1, -1, -1))


def cut(batch):
    """Drop the last row, in place."""
    shorter = batch[: len(batch) - 1]
    batch.batch, batch.non_tensor_batch = shorter.batch, shorter.non_tensor_batch


@pytest.mark.parametrize("between", [reverse, cut])
def test_rows_that_were_moved_or_dropped_before_the_advantage_stop_the_step(between):
    run = run_of()
    with pytest.raises(RuntimeError, match="must neither be dropped nor reordered between `_balance_batch` and the"):
        run.until_update(begin(run), between)


def test_an_advantage_without_a_balanced_batch_is_refused():
    run = run_of()
    batch = begin(run)
    batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
    with pytest.raises(RuntimeError, match=r"`_balance_batch` must run in every step \(trainer\.balance_batch=true"):
        run.advantage(batch, run.config.algorithm.adv_estimator)


def test_a_new_trainer_knows_nothing_of_the_groups_of_an_earlier_one():
    first = run_of()
    batch, _ = first.until_update(begin(first))
    second = run_of()
    with pytest.raises(RuntimeError, match="no full-group statistics"):
        second.advantage(batch, second.config.algorithm.adv_estimator)


def test_advantages_of_what_is_left_of_the_groups_are_not_trained_on():
    run = run_of()
    batch, _ = run.until_update(begin(run))
    batch = run.advantage(batch, "grpo")
    with pytest.raises(RuntimeError, match=r"advantages at the update are not those of the full groups.*is dppo in"):
        run.trainer._update_actor(batch)
    assert not run.worker.gradients


def test_advantages_that_are_changed_in_place_stop_the_step():
    run = run_of()
    batch, _ = run.until_update(begin(run))
    batch.batch["advantages"] *= 2
    with pytest.raises(RuntimeError, match="not those of the full groups"):
        run.trainer._update_actor(batch)


def test_rows_reordered_between_the_advantage_and_the_update_stop_the_step():
    run = run_of()
    batch, _ = run.until_update(begin(run))
    reverse(batch)
    with pytest.raises(RuntimeError, match=r"not those of the full groups.*on the rows as they are"):
        run.trainer._update_actor(batch)


def test_rewards_that_are_shaped_after_the_draw_stop_the_step():
    def shape(batch):
        batch.batch["rm_scores"] = batch.batch["rm_scores"] * 2

    run = run_of()
    with pytest.raises(RuntimeError, match=r"rewards are not those that DPPO pruned.*before `_balance_batch`"):
        run.until_update(begin(run), shape)


def test_rewards_that_are_shaped_before_the_draw_are_what_is_pruned_by():
    run = run_of()
    given = begin(run)
    given.batch["rm_scores"] = given.batch["rm_scores"] * 2 - given.batch["response_mask"] * 0.1
    full = DataProto(given.batch.clone(), dict(given.non_tensor_batch))
    full.batch["token_level_rewards"] = full.batch["rm_scores"]
    expected = run.advantage(full, "grpo").batch["advantages"]
    batch, _ = run.until_update(given)
    drawn = batch.batch[ROW] >= 0
    assert torch.equal(batch.batch["advantages"][drawn], expected[batch.batch[ROW][drawn]])
    assert not torch.allclose(expected, stock_advantages(run), atol=1e-2)


# ---- which prompt a row belongs to ----------------------------------------------------------------------------------


def drawn_run():
    """Return a run that drew prompts of different weights for its next step, and the rows of their rollouts."""
    run, rng = RayRun(CELLS["refill, some rows alike"][0]), np.random.default_rng(3)
    node = run.start()
    for number in range(1, 5):
        drawn = run.draw(node, number, rng)
        made = drawn.node.level.submission
        if len(set(made.pi)) > 1:
            return run, made, list(drawn.row_of_key.values())
        node = run.update(drawn, rng).node
    raise AssertionError("all prompts had the same weight")


def test_a_group_that_was_lost_leaves_the_other_groups_their_own_prompt_weights():
    """A recipe may drop rollouts that failed: by their place in the batch, the rest would get their neighbours'."""
    run, made, rows = drawn_run()
    groups, n = len(made.pi), run.cell.n
    assert groups == 2
    assert made.pi[0] != made.pi[1]
    batch = run.proto(rows).select_idxs(np.arange(n, groups * n))  # as if the first group had failed
    run.trainer._balance_batch(batch, {})
    assert run.trainer._step.plan.weight == pytest.approx(np.full(n, 1 / made.pi[1]))


def test_a_batch_without_the_numbers_of_its_prompts_stops_the_step():
    run, _, rows = drawn_run()
    batch = run.proto(rows)
    assert batch.batch[PROMPT].tolist() == np.repeat([0, 1], run.cell.n).tolist()
    batch.batch.pop(PROMPT)
    with pytest.raises(RuntimeError, match=r"lost its column 'dppo_prompt'.*dppo\.prompt\.enable=false"):
        run.trainer._balance_batch(batch, {})
