import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pruning.pivotal_tree import pivotal_tree

from verl_dppo.pruning import (
    PromptHistory,
    PromptKeepController,
    draw,
    prompt_inclusion,
    prompt_inflation,
    rank_correlation,
)
from verl_dppo.pruning import skipped_energy as skipped_share
from verl_dppo.pruning.prompt_budget import PROMPT_GRID

FLOOR = 0.3

# ---- figures of one step --------------------------------------------------------------------------------------------


def test_figures_of_a_step_by_hand():
    pi, energy = np.array([0.5, 1.0, 0.25]), np.array([1.0, 4.0, 2.0])
    whole = 1 / 0.5 + 4 + 2 / 0.25
    assert prompt_inflation(pi, energy) == pytest.approx((2 * 1 + 0 + 8 * 3) / whole)
    assert skipped_share(pi, energy) == pytest.approx((1 * 1 + 0 + 2 * 3) / whole)


@pytest.mark.parametrize("figure", [prompt_inflation, skipped_share])
def test_without_energy_or_without_skipping_the_figures_are_zero(figure):
    assert figure(np.array([0.5, 0.25]), np.zeros(2)) == 0
    assert figure(np.ones(2), np.array([1.0, 3.0])) == 0
    assert figure(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize("seed", range(4))
def test_over_all_draws_the_sums_behind_the_figures_are_those_of_all_candidates(seed):
    rng = np.random.default_rng(seed)
    energy = rng.lognormal(size=8)
    pi = prompt_inclusion(rng.uniform(0.1, 0.5, 8), np.ones(8, bool), 5, FLOOR, "beta")
    mean = {"whole": 0.0, "inflation": 0.0, "skipped": 0.0}
    for probability, kept in pivotal_tree(pi):
        kept = sorted(kept)
        p, e = pi[kept], energy[kept]
        whole = (e / p).sum()
        mean["whole"] += probability * whole
        mean["inflation"] += probability * prompt_inflation(p, e) * whole
        mean["skipped"] += probability * skipped_share(p, e) * whole
    assert mean["whole"] == pytest.approx(energy.sum(), rel=1e-10)
    assert mean["inflation"] == pytest.approx(((1 / pi - 1) * energy).sum(), rel=1e-10)
    assert mean["skipped"] == pytest.approx(((1 - pi) * energy).sum(), rel=1e-10)


def spearman(one, other):
    """From its definition: Pearson's correlation of mid-ranks, each counted by comparison with all others."""
    ranks = [[sum(y < x for y in v) + (sum(y == x for y in v) + 1) / 2 for x in v] for v in (one, other)]
    centred = [[r - sum(v) / len(v) for r in v] for v in ranks]
    product = [sum(a * b for a, b in zip(u, v, strict=True)) for u in centred for v in centred]
    scale = (product[0] * product[3]) ** 0.5
    return product[1] / scale if scale else 0.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=0, max_size=12))
def test_the_rank_correlation_is_spearmans_with_ties(pairs):
    one, other = (np.array([p[k] for p in pairs], dtype=float) for k in (0, 1))
    assert rank_correlation(one, other) == pytest.approx(spearman(one.tolist(), other.tolist()), abs=1e-12)


def test_the_rank_correlation_reads_ranks_alone():
    x = np.array([0.1, 0.2, 0.3, 0.5])
    assert rank_correlation(x, np.exp(9 * x)) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)
    assert rank_correlation(x, np.ones(4)) == 0


# ---- the controller -------------------------------------------------------------------------------------------------


def shares(spread, total):
    """clip(factor * spread, floor, 1) with the given sum, by halving: apart from the product's solution."""
    floor = min(FLOOR, total / spread.size)
    low, high = 0.0, 2 / spread.min()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * spread, floor, 1).sum() < total else (low, middle)
    return np.clip(high * spread, floor, 1)


def step(controller, spread, energy, rng, keep=None):
    """Draw and observe one step; return what a reference needs to know of it."""
    n = spread.size
    pi = prompt_inclusion(spread, np.ones(n, bool), round((keep or controller.keep) * n), FLOOR, "beta")
    kept = draw(pi, rng)
    controller.observe(spread, FLOOR, "beta", kept, pi, energy[kept])
    return spread, pi, kept, energy[kept]


def test_the_cost_is_keep_times_the_cautious_noise_of_all_past_steps():
    rng, controller, past = np.random.default_rng(0), PromptKeepController(), []
    assert controller.cost() == pytest.approx(PROMPT_GRID * (1 + 1.1 * (1 / PROMPT_GRID - 1)))
    for _ in range(4):
        past.append(step(controller, rng.uniform(0.1, 0.5, 20), rng.lognormal(size=20), rng, keep=0.7))
    for keep, cost in zip(PROMPT_GRID, controller.cost(), strict=True):
        noisy = plain = 0.0
        for age, (spread, pi, kept, energy) in enumerate(reversed(past)):
            at_keep = shares(spread, keep * spread.size)[kept]
            noisy += 0.97**age * (energy / pi[kept] / at_keep).sum()
            plain += 0.97**age * (energy / pi[kept]).sum()
        assert cost == pytest.approx(keep * (1 + 1.1 * (noisy / plain - 1)), rel=1e-9)
    assert controller.best() == PROMPT_GRID[np.argmin(controller.cost())]


def run(persistent, seed=0, start=1.0, steps=150):
    """Simulated training with a history: 40 of 160 prompts a step, pass rates of which many are near 0 or 1.

    Returns every keep. Pass rates stay what they are, or are drawn anew in each step, so that no visit tells of the
    next. The energy of a group is the variance of its rewards, times what history does not know.
    """
    rng, history, controller = np.random.default_rng(seed), PromptHistory(), PromptKeepController()
    rate, controller.keep = rng.beta(0.3, 0.3, 160), start
    ids = np.array([f"p{k}" for k in range(160)])
    history.observe(ids.tolist(), rng.random((160, 8)) < rate[:, None], 0)
    keeps = [controller.keep]
    for number in range(1, steps + 1):
        rows = rng.choice(160, 40, replace=False)
        if not persistent:
            rate = rng.beta(0.3, 0.3, 160)
        rewards = (rng.random((40, 8)) < rate[rows, None]).astype(float)
        energy = rewards.var(axis=1) * rng.lognormal(0, 0.5, 40)
        _, _, kept, _ = step(controller, history.spread(ids[rows].tolist()), energy, rng)
        history.observe(ids[rows[kept]].tolist(), rewards[kept], number)
        keeps.append(controller.keep)
    return np.array(keeps)


@pytest.mark.parametrize("seed", range(2))
def test_where_history_predicts_it_keeps_less(seed):
    assert (run(persistent=True, seed=seed)[80:] < 0.9).all()


@pytest.mark.parametrize("start", [1.0, 0.6])
def test_where_history_predicts_nothing_it_keeps_everything(start):
    assert (run(persistent=False, start=start)[80:] > 0.99).all()


def test_it_starts_at_one_waits_for_five_steps_and_moves_by_little():
    keeps = run(persistent=True)
    assert (keeps[:6] == 1).all()
    assert keeps[6] < 1
    assert np.abs(np.diff(keeps)).max() <= 0.02 + 1e-12
    assert ((keeps >= 0.5) & (keeps <= 1)).all()


def test_steps_without_energy_move_nothing():
    controller = PromptKeepController()
    for _ in range(9):
        controller.observe(np.full(4, 0.4), FLOOR, "beta", np.ones(4, bool), np.ones(4), np.zeros(4))
    assert controller.keep == 1
    assert np.isfinite(controller.cost()).all()


@pytest.mark.parametrize("stop", [0, 3, 20])
def test_continuing_from_a_saved_state_equals_not_having_stopped_to_the_bit(stop):
    rng = np.random.default_rng(3)
    whole, resumed = PromptKeepController(), PromptKeepController()
    for k in range(40):
        if k == stop:
            resumed = PromptKeepController()
            resumed.load_state_dict(whole.state_dict())
        spread, pi = rng.uniform(0.1, 0.5, 12), rng.uniform(0.3, 1, 12)
        kept = rng.random(12) < pi
        for controller in {id(c): c for c in (whole, resumed)}.values():
            controller.observe(spread, FLOOR, "beta", kept, pi, (spread**2)[kept])
    assert resumed.state_dict() == whole.state_dict()
    assert whole.keep < 1


@pytest.mark.parametrize(
    "change",
    [
        {"weighted": [1.0] * 25},
        {"weighted": [[1.0] * 26]},
        {"weighted": [float("nan")] * 26},
        {"weighted": [-1.0] * 26},
        {"keep": 0.4},
        {"keep": 1.1},
        {"keep": float("nan")},
        {"energy": float("inf")},
        {"energy": -1.0},
        {"steps": -1},
        {"steps": "many"},
    ],
)
def test_a_state_that_no_run_left_is_refused_and_changes_nothing(change):
    controller = PromptKeepController()
    before = controller.state_dict()
    with pytest.raises(ValueError, match=r"saved prompt budget|invalid literal"):
        controller.load_state_dict(before | change)
    assert controller.state_dict() == before


@pytest.mark.parametrize("name", ["keep", "steps", "energy", "weighted"])
def test_a_state_that_lacks_a_part_is_refused(name):
    state = PromptKeepController().state_dict()
    del state[name]
    with pytest.raises(KeyError, match=name):
        PromptKeepController().load_state_dict(state)
