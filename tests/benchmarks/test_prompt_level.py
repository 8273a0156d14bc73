"""What the prompt level is said to cost and to buy, on measured gradients and on simulated histories."""

import sys

import measured_batch
import numpy as np
import prompt_history
import prompt_level
import published_rules as rules
import pytest
from measured_batch import MODES
from prompt_level import AUTO, FORGETTINGS, GROUP, REGIMES, BothLevels, over_seeds, simulate

from verl_dppo.pruning import draw, neyman_inclusion, variance_inflation

FILES = sorted(prompt_level.COPIES.glob("*.npz"))
CELLS = [(path, mode) for path in FILES for mode in MODES]
PREDICTABLE = ("persistent", "slow drift", "learning", "fractional, persistent")
UNPREDICTABLE = ("redrawn each pass", "fractional, redrawn")
SEEDS = (0,)


@pytest.fixture(scope="module", params=CELLS, ids=lambda cell: f"{cell[0].stem}-{cell[1]}")
def cell(request):
    path, mode = request.param
    return measured_batch.load(path, 8), mode


@pytest.fixture(scope="module")
def seen(cell):
    return prompt_level.visits(*cell, choices=40)


@pytest.fixture(scope="module")
def world(cell):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_level, "PROMPT_DRAWS", 20)
        patch.setattr(prompt_level, "PROMPT_KEEPS", np.linspace(0.5, 1.0, 6))
        patch.setattr(prompt_level, "COMPLETION_KEEPS", np.linspace(0.2, 1.0, 9))
        yield BothLevels(*cell)


class TestOnMeasuredGradients:
    def test_the_default_costs_no_more_than_skipping_nothing(self, seen):
        default = prompt_level.DEFAULT
        assert seen.cost(default.rule, default.keep, default.floor) < 1

    def test_uniform_skipping_costs_exactly_one(self, seen):
        for keep in prompt_level.KEEPS:
            assert seen.cost("uniform", keep, 0.3) == pytest.approx(1, abs=1e-12)

    def test_history_predicts_less_than_another_group_and_gains_a_small_part_of_what_an_oracle_would(self, cell, seen):
        figures = prompt_level.prediction(*cell, seen)
        assert 0.2 < figures["rank correlation"] < figures["of two present groups"] < 0.6
        gain, most = (1 - seen.cost(rule, 0.7, 0.3) for rule in ("beta", "oracle, this group"))
        assert -0.01 < gain < most / 5

    def test_below_the_default_keep_there_is_nothing_to_gain_and_the_threshold_rule_loses(self, seen):
        assert abs(seen.cost("beta", 0.7, 0.3) - seen.cost("beta", 0.9, 0.3)) < 0.01
        assert seen.cost("threshold", 0.7, 0.3) > seen.cost("beta", 0.7, 0.3) + 0.05

    def test_the_driver_is_right_about_rho_within_a_factor_of_two_or_so(self, seen):
        for keep, lowest in ((0.5, 0.8), (0.7, 0.8), (0.9, 0.45)):
            pi = seen.inclusion("beta", keep, 0.3)
            true, driver = (prompt_level.cost(pi, energy, keep) / keep - 1 for energy in (seen.energy, seen.seen))
            assert lowest < driver / true < 1.6

    def test_the_energies_are_those_of_the_inner_products(self, cell):
        batch, mode = cell
        first = np.tile(np.arange(8), (len(batch.reward), 1))
        a = batch.factor(mode)
        expected = np.diag(prompt_level.group_gram(batch, mode)) * (a @ batch.gram @ a)
        np.testing.assert_allclose(prompt_level.group_energy(batch, mode, first), expected, rtol=1e-6)

    def test_the_variance_of_independent_draws_is_what_draws_show(self, cell):
        batch, mode = cell
        gram, rng = prompt_level.group_gram(batch, mode), np.random.default_rng(0)
        pi = rng.uniform(0.3, 1, len(gram))
        off = np.array([draw(pi, rng, "poisson") for _ in range(4000)]) / pi - 1
        simulated = np.einsum("rp,rp->r", off @ gram, off)
        exact = (prompt_level.cost(pi, np.diag(gram), 1.0) - 1) * np.trace(gram)
        assert simulated.mean() == pytest.approx(exact, abs=4 * simulated.std() / np.sqrt(4000))


class TestOnSimulatedHistories:
    @pytest.mark.parametrize("name", UNPREDICTABLE)
    def test_auto_goes_to_one_where_history_predicts_nothing(self, name):
        found = over_seeds(SEEDS, REGIMES[name], None)
        assert found.last > 0.99
        assert found.cost < 1.005

    @pytest.mark.parametrize("name", PREDICTABLE)
    def test_auto_stays_below_nine_tenths_where_it_does_and_comes_near_the_best_constant_keep(self, name):
        found = over_seeds(SEEDS, REGIMES[name], None)
        best = min(over_seeds(SEEDS, REGIMES[name], keep).cost for keep in (0.6, 0.7, 0.8))
        assert found.last < 0.9
        assert found.cost < 0.95
        assert found.cost < best + 0.03

    def test_the_default_keep_loses_little_where_history_is_worthless_and_gains_more_where_it_is_not(self):
        cost = {name: over_seeds(SEEDS, REGIMES[name], 0.9).cost for name in (*PREDICTABLE, *UNPREDICTABLE)}
        assert max(cost[name] for name in UNPREDICTABLE) < 1.04
        assert max(cost[name] for name in PREDICTABLE) < 0.95

    @pytest.mark.parametrize("name", ["persistent", "fast drift", "learning", "redrawn each pass"])
    def test_no_forgetting_is_much_better_than_the_default_one(self, name):
        regime = REGIMES[name]
        default = simulate(regime, 0.9).cost
        assert default < min(simulate(regime, 0.9, forgetting=factor).cost for factor in FORGETTINGS) + 0.04

    def test_skipping_nothing_costs_one(self):
        found = simulate(REGIMES["persistent"], 1.0, measured=prompt_level.EARLY)
        assert found.keep == pytest.approx(1, abs=1e-12)
        assert found.cost == pytest.approx(1, abs=1e-12)

    def test_a_constant_keep_is_kept(self):
        assert simulate(REGIMES["persistent"], 0.8).keep == pytest.approx(0.8, abs=0.01)

    @pytest.mark.parametrize(
        "name", ["persistent", "fractional, persistent", "fractional, persistent, A not normalised"]
    )
    def test_energies_are_on_average_what_the_cost_takes_them_for(self, name):
        regime, rng = REGIMES[name], np.random.default_rng(0)
        for logit in (-4.0, -1.5, 0.0, 2.5):
            many = np.full(20_000, logit)
            energy = regime.energy(regime.rewards(many, rng), rng)
            expected = regime.expected_energy(many[:1])[0]
            assert energy.mean() == pytest.approx(expected, abs=5 * energy.std() / np.sqrt(many.size) + 1e-12)
            assert energy.max() < 60 * GROUP

    def test_pass_rates_stay_or_are_drawn_anew_or_rise(self):
        for name, likeness, change in (("persistent", 1, 0), ("redrawn each pass", 0, 0), ("learning", 1, 0.15)):
            logits = REGIMES[name].logits(np.random.default_rng(0))
            assert np.corrcoef(logits[10], logits[11])[0, 1] == pytest.approx(likeness, abs=0.15)
            assert np.mean(np.diff(logits.mean(1))) == pytest.approx(change, abs=0.03)
            assert logits.std() == pytest.approx(4, abs=0.5)


class TestOnBothLevels:
    @pytest.mark.parametrize("share", prompt_level.ROLLOUT_SHARES)
    def test_each_level_at_its_own_best_is_the_best_of_both_together_within_a_hundredth(self, world, share):
        assert prompt_level.separability(world, share) > 0.99

    @pytest.mark.parametrize("share", prompt_level.ROLLOUT_SHARES)
    def test_the_controllers_come_within_a_tenth_of_the_best_pair_of_keeps(self, world, share):
        assert prompt_level.against_best(world, share) > 0.92

    @pytest.mark.parametrize("share", prompt_level.ROLLOUT_SHARES)
    def test_with_prompts_skipped_automatic_keeps_are_worth_no_less_than_without(self, world, share):
        both, alone = (world.chosen(share, keep, AUTO).speed_up(share) for keep in (AUTO, 1.0))
        assert both > 0.98 * alone

    def test_without_skipped_prompts_the_noise_is_that_of_the_completions(self, cell, world):
        batch, mode = cell
        pi = neyman_inclusion(world.magnitude, batch.tokens, 0.6)
        point = world.point(1.0, 0.6)
        assert point.driver == pytest.approx(1 + variance_inflation(pi, world.magnitude))
        variance = measured_batch.quality(batch, rules.horvitz_thompson(batch, pi), mode).variance
        assert point.true == pytest.approx(1 + variance / np.trace(prompt_level.group_gram(batch, mode)))
        assert point.sampled == pytest.approx(1)
        assert point.trained == pytest.approx(0.6 * batch.informative_token_share)

    def test_without_pruned_completions_the_noise_is_that_of_the_prompts(self, cell, world):
        group, pi = np.diag(prompt_level.group_gram(*cell)), world.prompt_inclusion(0.7)
        point = world.point(0.7, 1.0)
        assert point.true == pytest.approx(prompt_level.cost(pi, group, 1.0))
        assert point.sampled == pytest.approx((pi * world.of_prompts(world.tokens)).sum())

    def test_with_both_the_noise_is_what_draws_show(self, cell, world):
        batch, mode = cell
        gram, rng, squares = batch.gradient_gram(mode), np.random.default_rng(0), []
        of_prompt = world.prompt_inclusion(0.7)
        for _ in range(1000):
            kept = draw(of_prompt, rng, "poisson")
            rows = np.flatnonzero(kept[batch.group])
            weight, inner = np.zeros(batch.group.size), 1 / of_prompt[batch.group[rows]]
            pi = neyman_inclusion(world.magnitude[rows] * inner, batch.tokens[rows], 0.5)
            drawn = draw(pi, rng, "poisson")
            weight[rows[drawn]] = (inner / np.where(pi > 0, pi, 1))[drawn]
            off = (weight - 1) * batch.informative
            squares.append(off @ gram @ off)
        shown = 1 + np.mean(squares) / np.trace(prompt_level.group_gram(batch, mode))
        assert world.point(0.7, 0.5).true == pytest.approx(shown, rel=0.1)

    def test_the_speed_up_pays_for_noise_and_the_time_does_not(self):
        point = prompt_level.Point(sampled=0.7, trained=0.3, true=1.5, driver=1.2)
        assert point.time(0.5) == pytest.approx(0.35 + 0.45 * 0.3 + 0.05)
        assert point.speed_up(0.5) == pytest.approx(1 / ((0.35 + 0.135) * 1.5 + 0.05))
        assert point.speed_up(0.5, driver=True) == pytest.approx(1 / ((0.35 + 0.135) * 1.2 + 0.05))


def test_the_report_has_all_tables(monkeypatch, capsys):
    for name, value in {
        "CHOICES": 2,
        "DRAWS": 50,
        "PROMPT_DRAWS": 2,
        "CONTROLLED_STEPS": 8,
        "PROMPT_KEEPS": np.array([0.7, 1.0]),
        "COMPLETION_KEEPS": np.array([0.5, 1.0]),
        "PROMPTS": 96,
        "LATE": (3, 4),
        "REGIMES": {"persistent": REGIMES["persistent"]},
    }.items():
        monkeypatch.setattr(prompt_level, name, value)
    prompt_level.simulate.cache_clear()
    monkeypatch.setattr(
        sys, "argv", ["prompt_level", str(FILES[0]), "--seeds", "1", "--parts", "real", "simulated", "both"]
    )
    prompt_level.main()
    prompt_level.simulate.cache_clear()
    text = capsys.readouterr().out
    for title in ("How well history", "Cost, mean", "Where keep=auto", "Cost by rule and floor", "Time of a step"):
        assert title in text
    assert text.count("| persistent |") == 6
    assert "nan" not in text


def test_the_cost_of_a_large_history_is_reported(monkeypatch, capsys):
    arguments = ["prompt_history", "--prompts", "3000", "--batch", "64", "--repeats", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    prompt_history.main()
    text = capsys.readouterr().out
    assert "3000 prompts; a batch of 64 x 8" in text
    assert text.count("\n| ") == 13
    assert "nan" not in text


def test_a_million_prompts_stay_below_40_megabytes():
    level = prompt_history.visited_level(5000, 64, 8)
    found = prompt_history.history_times(level.history, level.ids[:64], 8, 1)
    assert found["file, ids apart"] == 16 * 5000
    assert found["file"] * 1_000_000 / 5000 < 40e6
