"""The expected gradient of every optimiser step of DPPORayPPOTrainer: all draws enumerated, through its own hooks on a
padded DataProto, verl's own advantage and update, and verl's real loss in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from training.ray_run import NO_PROMPTS, RayRun, answers, compare, run_of_completions
from training.test_two_levels import CELLS
from training.two_levels_run import Cell, enumerate_steps

from verl_dppo.training import ray_trainer
from verl_dppo.training.completion_level import CompletionLevel
from verl_dppo.training.loss import WEIGHT
from verl_dppo.training.ray_trainer import DPPORayPPOTrainer

BOUND = 1e-12
ESTIMATORS = {
    "grpo": ("algorithm.adv_estimator=grpo",),
    "grpo without division": ("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false"),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "opo": ("algorithm.adv_estimator=opo",),
}
TWO_RANKS = "trainer.n_gpus_per_node=2"

each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@each_estimator
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_expected_gradient_of_each_mini_batch_is_that_of_the_full_batch(estimator, mini_batches):
    ranks = [TWO_RANKS] if mini_batches == 2 else []
    run = run_of_completions(*ESTIMATORS[estimator], *ranks, mini_batches=mini_batches)
    found = compare(run)
    print(found)
    assert found.error < BOUND
    assert found.paths > 4
    assert found.compared == mini_batches


@pytest.mark.parametrize(
    ("estimator", "mini_batches"), [("grpo", 1), *((estimator, 2) for estimator in ESTIMATORS)], ids=str
)
def test_also_with_kl_and_entropy_terms_where_the_constant_group_is_trained_on(estimator, mini_batches):
    run = run_of_completions(*ESTIMATORS[estimator], mini_batches=mini_batches, terms=True)
    found = compare(run)
    print(found)
    assert found.error < BOUND
    assert found.paths > 4
    assert found.compared == mini_batches


def test_also_where_independent_draws_leave_idle_rows():
    cell = Cell("ab", (0, 1), 1, 2, mini_batches=2, n=3, completions=0.5)
    two_groups = (*answers()[:3], *answers()[6:9])
    found = compare(RayRun(cell, NO_PROMPTS, "algorithm.dppo.completion.design=poisson", answers=two_groups))
    print(found)
    assert "idle rows" in found.features
    assert found.error < BOUND


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize(("name", "steps"), [("refill", 4), ("shrink, 2 mini-batches", 3)])
def test_with_prompts_pruned_too_it_is_that_of_all_candidates(name, steps, terms):
    found = enumerate_steps(RayRun(dataclasses.replace(CELLS[name][0], completions=0.5, terms=terms, steps=steps)))
    print(found)
    assert found.error < BOUND
    assert found.compared > 3
    assert "pruned" in found.features


# ---- what is wrong shows --------------------------------------------------------------------------------------------


def advantage_of_survivors(monkeypatch):
    use = DPPORayPPOTrainer._use_estimator
    monkeypatch.setattr(DPPORayPPOTrainer, "_use_estimator", lambda trainer, pruned: use(trainer, pruned=False))
    monkeypatch.setattr(DPPORayPPOTrainer, "_check_advantages", lambda trainer, batch: None)


def change_pruned(monkeypatch, change):
    prune = ray_trainer.prune_data_proto

    def changed(batch, plan):
        pruned = prune(batch, plan)
        change(pruned, plan)
        return pruned

    monkeypatch.setattr(ray_trainer, "prune_data_proto", changed)


def no_weights(monkeypatch):
    def change(pruned, plan):
        pruned.batch[WEIGHT] = (pruned.batch[WEIGHT] > 0).double()

    change_pruned(monkeypatch, change)


def shuffled_weights(monkeypatch):
    """As if rows had been put into another order than their weights, within their mini-batches."""

    def change(pruned, plan):
        weight = pruned.batch[WEIGHT].split([rows.size for rows in plan.rows] + [sum(plan.padding)])
        pruned.batch[WEIGHT] = torch.cat([*(w.roll(1) for w in weight[:-1]), weight[-1]])

    change_pruned(monkeypatch, change)


def change_step(monkeypatch, change):
    draw = CompletionLevel.draw

    def changed(level, *arguments):
        step = draw(level, *arguments)
        return dataclasses.replace(step, **change(step))

    monkeypatch.setattr(CompletionLevel, "draw", changed)


def tokens_of_what_is_left(monkeypatch):
    change_step(monkeypatch, lambda step: {"tokens": np.array([step.full.length[k].sum() for k in step.plan.rows])})


def size_of_what_is_left(monkeypatch):
    change_step(monkeypatch, lambda step: {"size": np.array([float(k.size) for k in step.plan.rows])})


@pytest.mark.parametrize(
    "fault",
    [advantage_of_survivors, no_weights, shuffled_weights, tokens_of_what_is_left, size_of_what_is_left],
    ids=lambda fault: fault.__name__,
)
def test_the_enumeration_sees_a_fault(fault, monkeypatch):
    fault(monkeypatch)
    found = compare(run_of_completions(mini_batches=2))
    print(found)
    assert found.error > 1e-2


def test_the_enumeration_sees_that_prompts_have_no_weights(monkeypatch):
    change_step(monkeypatch, lambda step: {"plan": dataclasses.replace(step.plan, weight=(step.plan.weight > 0) * 2.0)})
    cell = dataclasses.replace(CELLS["refill"][0], completions=0.5, steps=3)
    assert enumerate_steps(RayRun(cell)).error > 1e-2
