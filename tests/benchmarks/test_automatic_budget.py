"""The controller in worlds of measured gradients: where it settles, and that these worlds are what they say."""

import sys

import automatic_budget
import measured_batch
import numpy as np
import published_rules as rules
import pytest
import retention
from automatic_budget import DEFAULT_KEEP, World

FILES = sorted(automatic_budget.COPIES.glob("*.npz"))


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def batch(request):
    return measured_batch.load(request.param, 8)


@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "responses"])
@pytest.mark.parametrize("fixed", [0.0, 0.3])
@pytest.mark.parametrize("mode", measured_batch.MODES)
def test_the_controller_is_never_2_percent_worse_than_the_first_keep(batch, mode, fixed, prompts):
    found = automatic_budget.ratios(World(batch, mode, prompts), fixed)
    assert found.size == 16
    assert found.min() >= 0.98


@pytest.mark.parametrize("mode", measured_batch.MODES)
def test_it_settles_near_the_best_keep(batch, mode):
    world = World(batch, mode)
    for share in automatic_budget.ROLLOUT_SHARES:
        best = world.speed_up(automatic_budget.best_keep(world, share, 0.0), share, 0.0)
        settled = automatic_budget.settle(batch, mode, share, fixed=0.0, steps=200, seed=0)
        assert world.speed_up(settled, share, 0.0) > 0.96 * best


@pytest.mark.parametrize("mode", measured_batch.MODES)
def test_without_prompts_the_speed_up_is_that_of_the_retention_tables(batch, mode):
    noise = measured_batch.rollout_noise(batch, mode, np.random.default_rng(0))
    for keep in (0.3, DEFAULT_KEEP, 1.0):
        pi = retention.inclusion(batch, mode, retention.OURS, keep)
        rho = measured_batch.quality(batch, rules.horvitz_thompson(batch, pi), mode).variance / noise
        expected = retention.speed_up(batch, keep, rho, 0.5)
        assert World(batch, mode, prompts=False).speed_up(keep, 0.5, 0.0) == pytest.approx(expected)


def test_prompts_and_a_fixed_part_count_as_time(batch):
    with_prompts, without = (World(batch, "token-mean", prompts) for prompts in (True, False))
    assert [world.tokens.sum() for world in (with_prompts, without)] == pytest.approx([1, 1])
    assert not np.allclose(with_prompts.tokens, without.tokens)
    pi = with_prompts.inclusion(0.5)
    live = pi > 0
    rho = ((1 / pi[live] - 1) * with_prompts.energy[live]).sum()
    update = 0.45 * (0.2 + 0.8 * (pi * with_prompts.tokens).sum())
    assert with_prompts.speed_up(0.5, 0.5, 0.2) == pytest.approx(1 / ((0.5 + update) * (1 + rho) + 0.05))


def test_the_same_seed_settles_the_same_and_costlier_rollouts_keep_more(batch):
    world = World(batch, "token-mean")
    assert world.settle(0.5, 0.1, 60, 3) == world.settle(0.5, 0.1, 60, 3)
    keeps = [world.settle(share, 0.0, 200, 0) for share in (0.1, 0.5, 0.9)]
    assert keeps == sorted(set(keeps))


def test_the_report_has_both_tables(monkeypatch, capsys):
    monkeypatch.setattr(automatic_budget, "STEPS", (5,))
    monkeypatch.setattr(sys, "argv", ["automatic_budget", str(FILES[0])])
    automatic_budget.main()
    text = capsys.readouterr().out
    assert text.count(f"| {FILES[0].stem} |") == 2 * len(automatic_budget.ROLLOUT_SHARES)
    for fixed in automatic_budget.FIXED_PARTS:
        assert f"\n| {fixed:g} |" in text
    assert "nan" not in text
