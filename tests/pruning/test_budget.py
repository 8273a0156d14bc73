import json

import numpy as np
import pytest

from verl_dppo.pruning import KeepController, inflation_curve, neyman_inclusion, variance_inflation
from verl_dppo.pruning.budget import (
    CAUTION,
    FIRST_KEEP,
    GRID,
    LARGEST_CHANGE,
    LOWEST_KEEP,
    STEPS_BEFORE_MOVING,
    UpdateTime,
)


def batch(seed=0, n=400):
    rng = np.random.default_rng(seed)
    return rng.lognormal(sigma=1.2, size=n) * (rng.random(n) < 0.8), rng.lognormal(4, 0.6, n)


def trained(rollout, per_token, steps=80, controller=None, tokens=1000.0, fixed=0.0, noise=0.0):
    """Run a controller in a world where times follow its keep, exactly or with noise."""
    controller = controller or KeepController()
    magnitude, cost = batch()
    curve, rng = inflation_curve(magnitude, cost), np.random.default_rng(0)
    for _ in range(steps):
        used = tokens * controller.keep * rng.lognormal(0, noise)
        update = (fixed + per_token * used) * rng.lognormal(0, noise / 3)
        controller.observe(rollout * rng.lognormal(0, noise), update, used, controller.keep, curve)
    return controller


def speedup(keep, rollout, update, caution=1.0, fixed=0.0, of=None):
    """S of a budget, its rho from the probabilities themselves."""
    magnitude, cost = batch() if of is None else of
    rho = caution * variance_inflation(neyman_inclusion(magnitude, cost, keep), magnitude)
    return (rollout + fixed + update) / ((rollout + fixed + update * keep) * (1 + rho))


@pytest.mark.parametrize("rollout_share", [0.1, 0.3, 0.5, 0.65, 0.8, 0.95])
def test_the_budget_settles_where_the_speedup_is_best(rollout_share):
    controller = trained(rollout_share, (1 - rollout_share) / 1000)
    for caution, tolerance in ((CAUTION, 1e-3), (1.0, 0.03)):
        values = [speedup(k, rollout_share, 1 - rollout_share, caution) for k in np.linspace(LOWEST_KEEP, 1, 161)]
        reached = speedup(controller.keep, rollout_share, 1 - rollout_share, caution)
        assert reached > (1 - tolerance) * max(values)


@pytest.mark.parametrize("rollout_share", [0.3, 0.5, 0.8])
def test_completions_that_are_all_alike_are_all_kept(rollout_share):
    """Then dropping any costs more than it saves, and the best budget is 1."""
    alike = np.ones(400), np.full(400, 50.0)
    controller, curve = KeepController(), inflation_curve(*alike)
    for _ in range(60):
        used = 1000 * controller.keep
        controller.observe(rollout_share, (1 - rollout_share) * used / 1000, used, controller.keep, curve)
    assert controller.keep == 1
    assert speedup(0.96, rollout_share, 1 - rollout_share, of=alike) < 1


@pytest.mark.parametrize("rollout_share", [0.3, 0.5, 0.65, 0.8])
@pytest.mark.parametrize("fixed_share", [0.1, 0.3, 0.5])
def test_a_fixed_part_of_the_update_does_not_mislead_it(rollout_share, fixed_share):
    """Nor do steps whose times and token counts scatter by 5 %: within 2 % of the first budget, or better."""
    fixed, update = fixed_share * (1 - rollout_share), (1 - fixed_share) * (1 - rollout_share)
    controller = trained(rollout_share, update / 1000, steps=200, fixed=fixed, noise=0.05)
    worth = [speedup(k, rollout_share, update, fixed=fixed) for k in (controller.keep, FIRST_KEEP)]
    assert worth[0] > 0.98 * worth[1]


def test_costlier_rollouts_keep_more():
    keeps = [trained(share, (1 - share) / 1000).keep for share in (0.1, 0.4, 0.7, 0.95)]
    assert keeps == sorted(keeps)
    assert keeps[0] < keeps[-1]


def test_it_waits_for_the_first_steps_and_then_moves_little_at_a_time():
    controller, seen = KeepController(), []
    for _ in range(12):
        trained(10.0, 1e-6, steps=1, controller=controller)
        seen.append(controller.keep)
    assert seen[:STEPS_BEFORE_MOVING] == [FIRST_KEEP] * STEPS_BEFORE_MOVING
    assert seen[-1] > FIRST_KEEP
    assert np.abs(np.diff(seen)).max() <= LARGEST_CHANGE + 1e-12


def test_it_stays_between_its_bounds_whatever_it_sees():
    assert trained(1e-9, 1.0, steps=200).keep >= LOWEST_KEEP
    assert trained(1e9, 1e-9, steps=200).keep <= 1.0
    free = KeepController()
    for _ in range(100):
        free.observe(0.0, 0.0, 0.0, free.keep, np.zeros(GRID.size))
    assert LOWEST_KEEP <= free.keep <= 1


def test_a_saved_budget_continues_exactly_also_through_json():
    whole = trained(0.5, 0.0005, steps=20)
    first = trained(0.5, 0.0005, steps=11)
    second = KeepController()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed, expected = (c.state_dict() for c in (trained(0.5, 0.0005, steps=9, controller=second), whole))
    for state in (resumed, expected):  # of seconds, an earlier process counts less, as it may have run elsewhere
        state.pop("update_time_sums")
    assert resumed.pop("inflation") == expected.pop("inflation")
    assert resumed == pytest.approx(expected)


def test_one_step_that_hangs_does_not_bend_the_line():
    time, rng = UpdateTime(), np.random.default_rng(0)
    for step in range(30):
        tokens = rng.uniform(800, 1200)
        time.observe(tokens, (1 + 0.01 * tokens) * (20 if step == 20 else 1))
    assert time.line[0] + 1000 * time.line[1] == pytest.approx(11, rel=0.1)


def test_a_budget_of_another_grid_is_refused():
    state = KeepController().state_dict() | {"inflation": [0.0]}
    with pytest.raises(ValueError, match="1 and 5 figures"):
        KeepController().load_state_dict(state)


def test_update_time_finds_the_fixed_part_where_token_counts_vary():
    time, rng = UpdateTime(), np.random.default_rng(0)
    for tokens in rng.uniform(200, 2000, 200):
        time.observe(tokens, 3 + 0.01 * tokens)
    fixed, per_token = time.line
    assert per_token == pytest.approx(0.01, rel=0.1)
    assert fixed == pytest.approx(3, rel=0.3)


def test_update_time_is_proportional_where_they_do_not_and_never_negative():
    time = UpdateTime()
    assert time.line == (0.0, 0.0)
    time.observe(100, 2.0)
    assert time.line == pytest.approx((0.0, 0.02))
    for tokens, seconds in ((100, 2.0), (1000, 1.0), (50, 3.0)) * 10:
        time.observe(tokens, seconds)
    assert time.line[1] == 0.0, "time that falls with tokens"
    assert time.line[0] > 0


def test_inflation_is_the_variance_of_independent_draws_over_that_of_the_rollouts():
    magnitude, cost = batch()
    pi = neyman_inclusion(magnitude, cost, 0.5)
    rng, live = np.random.default_rng(1), magnitude > 0
    totals = [
        (magnitude[live] * rng.normal(size=live.sum()) * (rng.random(live.sum()) < pi[live]) / pi[live]).sum()
        for _ in range(20000)
    ]
    added = np.var(totals) / (magnitude**2).sum() - 1
    assert variance_inflation(pi, magnitude) == pytest.approx(added, abs=0.08)


def test_the_curve_falls_to_zero_at_full_batches_and_stands_empty_batches():
    magnitude, cost = batch()
    curve = inflation_curve(magnitude, cost)
    assert (np.diff(curve) < 1e-12).all()
    assert curve[-1] == pytest.approx(0, abs=1e-12)
    assert (inflation_curve(np.zeros(5), np.ones(5)) == 0).all()
    assert inflation_curve(np.ones(0), np.ones(0)).shape == GRID.shape


@pytest.mark.parametrize("floor", [None, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_the_curve_is_that_of_the_neyman_probabilities(floor, seed):
    magnitude, cost = batch(seed, n=[1, 7, 300, 20000][seed])
    magnitude[:1] = 1.0
    expected = [
        variance_inflation(
            neyman_inclusion(magnitude, cost, keep, None if floor is None else min(floor, keep)), magnitude
        )
        for keep in GRID
    ]
    assert inflation_curve(magnitude, cost, floor) == pytest.approx(expected, rel=1e-6, abs=1e-9)
