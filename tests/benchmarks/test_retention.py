"""The closed forms of the benchmark against draws and enumeration, and the figures that the defaults rest on."""

import sys
from itertools import combinations

import measured_batch
import numpy as np
import published_rules as rules
import pytest
import retention

from verl_dppo.pruning import NormModel, draw, neyman_inclusion, score_magnitude

SEQUENCE = "seq-mean-token-mean"


@pytest.fixture(scope="module")
def even():
    return measured_batch.load(retention.COPIES / "even-length-0.npz", 8)


@pytest.fixture(scope="module")
def mixed():
    return measured_batch.load(retention.COPIES / "mixed-length-0.npz", 8)


def made_up(path, prompts=6, completions=8, parameters=30, seed=0, **changes):
    """Write a file of random rewards, lengths and scores; return the scores (n, parameters)."""
    rng = np.random.default_rng(seed)
    n = prompts * completions
    reward = rng.integers(0, 2, (prompts, completions)).astype(np.float32)
    # The gradients of a prompt agree, so that it matters which of its completions are dropped together.
    shared = np.repeat(rng.normal(size=(prompts, parameters)), completions, axis=0) * (reward.reshape(-1, 1) - 0.5) * 3
    scores = (shared + rng.normal(size=(n, parameters))) * rng.lognormal(sigma=0.3, size=(n, 1))
    arrays = {
        "reward": reward,
        "response_length": rng.integers(5, 40, (prompts, completions)).astype(np.int32),
        "sum_sq_one_minus_p": rng.uniform(0.1, 3, (prompts, completions)).astype(np.float32),
        "prompt_length": rng.integers(5, 9, prompts).astype(np.int32),
        "reward_previous_epoch": rng.integers(0, 2, (prompts, completions)).astype(np.float32),
        "score_gram": scores @ scores.T,
    }
    np.savez(path, **(arrays | changes))
    return scores


def simulated(batch, scores, weights_of_draw, mode, seeds):
    """Return variance and bias of sum w a s from draws of the weights, relative to the full gradient."""
    terms = batch.factor(mode)[:, None] * scores
    full = terms.sum(0)
    estimates = np.array([weights_of_draw(np.random.default_rng(seed)) @ terms for seed in range(seeds)])
    norm = full @ full
    off = estimates.mean(0) - full
    return estimates.var(0).sum() / norm, np.sqrt(off @ off / norm)


class TestLoading:
    def test_the_copy_reads_like_the_file_it_was_made_from(self, tmp_path):
        scores = made_up(tmp_path / "full.npz", completions=4)
        full = dict(np.load(tmp_path / "full.npz"))
        gram = full.pop("score_gram")
        rows = (np.arange(6)[:, None] * 4 + np.arange(2)).ravel()
        blocks = np.array([gram[4 * q : 4 * q + 4, 4 * q : 4 * q + 4] for q in range(6)])
        full["score_gram_upper"] = gram[np.ix_(rows, rows)][np.triu_indices(12)]
        full["score_gram_prompt"] = blocks[(slice(None), *np.triu_indices(4))]
        np.savez(tmp_path / "copy.npz", **full)
        one, other = (measured_batch.load(tmp_path / name, 2) for name in ("full.npz", "copy.npz"))
        for name in ("reward", "length", "surprise", "previous", "gram", "prompt_gram", "all_reward"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
        np.testing.assert_allclose(one.gram, scores[rows] @ scores[rows].T)

    def test_refuses_more_completions_than_there_are(self):
        with pytest.raises(ValueError, match="gradients of 8 completions per prompt, not 16"):
            measured_batch.load(retention.COPIES / "even-length-0.npz", 16)

    def test_what_is_known_of_all_completions_lies_beside_that_of_the_batch(self, tmp_path):
        made_up(tmp_path / "data.npz", completions=4)
        batch, full = measured_batch.load(tmp_path / "data.npz", 2), np.load(tmp_path / "data.npz")
        np.testing.assert_array_equal(batch.all_surprise, full["sum_sq_one_minus_p"])
        np.testing.assert_array_equal(batch.all_surprise[:, :2], batch.surprise)
        np.testing.assert_array_equal(batch.prompt_length, full["prompt_length"])

    @pytest.mark.parametrize("shape", [(3, 4), (6, 16), (2, 2)])
    def test_takes_any_shape(self, tmp_path, shape):
        made_up(tmp_path / "data.npz", *shape)
        batch = measured_batch.load(tmp_path / "data.npz", shape[1])
        assert batch.gram.shape == (shape[0] * shape[1],) * 2
        assert batch.gradient_gram("token-mean").sum() == pytest.approx(1)

    def test_tokens_become_signatures_of_the_rows_that_are_used(self, tmp_path):
        length = np.full((2, 4), 3, dtype=np.int32)
        tokens = {"token": np.arange(24), "token_probability": np.full(24, 0.25), "row": np.arange(0, 25, 3)}
        made_up(tmp_path / "data.npz", 2, 4, response_length=length, **tokens)
        batch = measured_batch.load(tmp_path / "data.npz", 2)
        assert batch.signature.shape[0] == 4
        assert np.unique(batch.signature, axis=0).shape[0] == 4
        assert "chain of surprise" in retention.orders(batch)


class TestClosedForms:
    @pytest.fixture
    def case(self, tmp_path):
        scores = made_up(tmp_path / "data.npz")
        return measured_batch.load(tmp_path / "data.npz", 8), scores

    @pytest.mark.parametrize("mode", measured_batch.MODES)
    def test_independent_draws(self, case, mode):
        batch, scores = case
        pi = retention.inclusion(batch, mode, retention.OURS, 0.5)
        inverse = np.where(pi > 0, 1 / np.maximum(pi, 1e-9), 0)
        variance, bias = simulated(batch, scores, lambda rng: draw(pi, rng, "poisson") * inverse, mode, 4000)
        found = measured_batch.quality(batch, rules.horvitz_thompson(batch, pi), mode)
        assert found.kept == pytest.approx(0.5)
        assert found.variance == pytest.approx(variance, rel=0.08)
        assert found.bias == pytest.approx(0, abs=1e-7)
        assert bias < 4 * np.sqrt(variance / 4000)

    def test_skipped_prompts(self, case):
        batch, scores = case
        constant = batch.previous.copy()
        constant[:3] = 1
        batch = measured_batch.Batch(**(vars_of(batch) | {"previous": constant}))
        skip = np.ptp(constant, axis=1) == 0
        weight = 1 / np.where(skip, 0.4, 1.0).mean()

        def weights(rng):
            return np.repeat((~skip | (rng.random(6) < 0.4)) * weight, 8)

        variance, bias = simulated(batch, scores, weights, "token-mean", 4000)
        found = measured_batch.quality(batch, rules.greso(batch, 0.4), "token-mean")
        assert found.variance == pytest.approx(variance, rel=0.08)
        assert found.bias == pytest.approx(bias, rel=0.05)

    @pytest.mark.parametrize("rate", [0.5, 0.9])
    def test_exactly_k_of_m(self, case, rate):
        batch, scores = case
        strata = [
            np.flatnonzero((batch.group == q) & (rules.threshold(batch, 0.5).pi < 1) & batch.informative)
            for q in range(6)
        ]

        def weights(rng):
            w = np.ones(48)
            for rows in strata:
                w[rows] = 1 / (1 - rate)
                w[rng.permutation(rows)[: int(rate * rows.size + 1e-9)]] = 0
            return w

        variance, bias = simulated(batch, scores, weights, SEQUENCE, 4000)
        found = measured_batch.quality(batch, rules.infobatch(batch, rate), SEQUENCE)
        assert found.variance == pytest.approx(variance, rel=0.08)
        assert found.bias == pytest.approx(bias, rel=0.05, abs=0.02)

    def test_fixed_size_designs_are_simulated_without_losing_anything(self, case):
        batch, scores = case
        pi = retention.inclusion(batch, "token-mean", retention.OURS, 0.5)
        order = np.arange(48).reshape(6, 8).T.ravel()  # neighbours from different prompts
        inverse = np.where(pi > 0, 1 / np.maximum(pi, 1e-9), 0)
        by_hand, _ = simulated(batch, scores, lambda rng: draw(pi, rng, "pivotal", order) * inverse, "token-mean", 4000)
        found = retention.simulated_variance(batch, "token-mean", pi, "pivotal", order)
        in_groups = retention.simulated_variance(batch, "token-mean", pi, "pivotal", np.arange(48))
        assert found == pytest.approx(by_hand, rel=0.1)
        assert in_groups < 0.8 * found

    def test_certain_weights_have_bias_alone(self, case):
        batch, scores = case
        weights = rules.cppo(batch, 0.5)
        found = measured_batch.quality(batch, weights, "token-mean")
        terms = batch.factor("token-mean")[:, None] * scores
        full, estimate = terms.sum(0), weights.mean @ terms
        sine = np.sqrt(1 - (full @ estimate) ** 2 / (full @ full) / (estimate @ estimate))
        assert found.variance == 0
        assert found.bias == pytest.approx(np.linalg.norm(estimate - full) / np.linalg.norm(full))
        assert found.scaled_bias == pytest.approx(sine)
        assert found.mse == pytest.approx(found.bias**2)


def vars_of(batch):
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


class TestRolloutNoise:
    def drawn(self, path, completions, seed, prompts=40):
        """Rewards that depend on the scores, as they do in reality."""
        rng = np.random.default_rng(seed)
        scores = rng.normal(size=(prompts * completions, 20))
        shape = (prompts, completions)
        reward = (scores[:, 0] + rng.normal(size=len(scores)) > 0).astype(np.float32).reshape(shape)
        made_up(path, *shape, reward=reward, score_gram=scores @ scores.T, response_length=np.ones(shape))
        batch = measured_batch.load(path, min(completions, 8))
        terms = batch.advantage.reshape(prompts, -1)
        rows = scores.reshape(prompts, completions, 20)[:, : terms.shape[1]]
        return batch, np.einsum("qi,qip->p", terms, rows)

    @pytest.mark.parametrize(("completions", "tolerance"), [(16, 0.1), (8, 0.25)])
    def test_agrees_with_fresh_rollouts(self, tmp_path, completions, tolerance):
        noises, gradients = [], []
        for seed in range(60):
            batch, gradient = self.drawn(tmp_path / "data.npz", completions, seed)
            gradients.append(gradient)
            if seed < 12:
                estimate = measured_batch.rollout_noise(batch, "token-mean", np.random.default_rng(seed))
                noises.append(estimate * (gradient @ gradient))
        true = np.array(gradients).var(0, ddof=1).sum()
        assert np.mean(noises) == pytest.approx(true, rel=tolerance)


class TestPublishedRules:
    def test_pods_takes_the_subset_whose_rewards_vary_most(self, tmp_path):
        reward = np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32)
        made_up(tmp_path / "data.npz", 5, 6, reward=reward)
        batch = measured_batch.load(tmp_path / "data.npz", 6)
        weights = rules.pods(batch, 3)
        kept = weights.pi.reshape(5, 6) > 0
        for q in range(5):
            best = max(combinations(range(6), 3), key=lambda subset: reward[q, list(subset)].var())
            assert tuple(np.flatnonzero(kept[q])) == best
            renormalised = (weights.mean * batch.advantage).reshape(5, 6)[q, list(best)] * 3 / 6
            np.testing.assert_allclose(renormalised, measured_batch.advantages(batch.reward[q, list(best)]))

    def test_cppo_keeps_the_largest_advantages(self, even):
        weights = rules.cppo(even, 0.5)
        kept = weights.pi > 0
        assert np.abs(even.advantage[kept]).min() >= np.abs(even.advantage[~kept]).max() - 1e-12
        assert even.kept(weights.pi) == pytest.approx(0.5, abs=0.01)
        np.testing.assert_allclose(weights.mean[kept], kept.size / kept.sum())

    def test_the_nominal_weight_of_infobatch_is_biased_in_groups(self, even):
        biases = [measured_batch.quality(even, rules.infobatch(even, rate), "token-mean").bias for rate in (0.5, 0.9)]
        assert biases[0] > 0.02
        assert biases[1] > 0.2


class TestFigures:
    @pytest.mark.parametrize(
        ("mode", "least"), [("token-mean", (7.8, 4.5, 4.6)), (SEQUENCE, (21, 16, 19))], ids=["token", "sequence"]
    )
    @pytest.mark.parametrize("name", [retention.FIRST_POWER, retention.OURS])
    def test_variance_of_the_threshold_rule_over_ours_at_its_own_kept_share(self, even, mode, least, name):
        for rate, bound in zip(retention.RATES, least, strict=True):
            found = measured_batch.quality(even, rules.threshold(even, rate), mode)
            ours = retention.poisson_variance(even, mode, retention.inclusion(even, mode, name, found.kept))
            assert found.variance / ours >= bound

    @pytest.mark.parametrize("mode", measured_batch.MODES)
    def test_at_equal_budgets_only_the_oracle_has_less_variance_than_ours(self, even, mixed, mode):
        for batch in (even, mixed):
            for keep in retention.KEEPS:
                variance = {
                    name: retention.poisson_variance(batch, mode, retention.inclusion(batch, mode, name, keep))
                    for name in retention.slopes(batch, mode)
                }
                ours = variance.pop(retention.OURS)
                assert variance.pop(retention.ORACLE) < ours
                assert all(other > 0.99 * ours for other in variance.values()), (keep, variance, ours)

    @pytest.mark.parametrize("mode", measured_batch.MODES)
    def test_fixed_size_designs_have_less_variance_than_independent_draws(self, even, mode):
        pi = retention.inclusion(even, mode, retention.OURS, 0.5)
        order = retention.orders(even)["group, sign, length"]
        independent = retention.poisson_variance(even, mode, pi)
        for design in retention.DRAWS:
            assert retention.simulated_variance(even, mode, pi, design, order) < 0.97 * independent

    @pytest.mark.parametrize("mode", measured_batch.MODES)
    def test_every_biased_rule_has_a_larger_error_than_ours_at_what_it_keeps(self, even, mode):
        for name, weights in retention.biased_candidates(even):
            found = measured_batch.quality(even, weights, mode)
            ours = retention.poisson_variance(even, mode, retention.inclusion(even, mode, retention.OURS, found.kept))
            assert ours < found.mse, name

    @pytest.mark.parametrize("mode", measured_batch.MODES)
    def test_what_the_driver_sees_of_the_added_noise_is_within_a_factor_of_2_and_a_half(self, even, mixed, mode):
        for batch in (even, mixed):
            noise = measured_batch.rollout_noise(batch, mode, np.random.default_rng(0))
            for keep in retention.KEEPS:
                pi = retention.inclusion(batch, mode, retention.OURS, keep)
                true = retention.poisson_variance(batch, mode, pi) / noise
                assert 0.9 < retention.driver_rho(batch, mode, keep) / true < 2.5

    @pytest.mark.parametrize("mode", measured_batch.MODES)
    def test_norms_fitted_from_probes_hardly_lose_and_may_gain(self, even, mixed, mode):
        ratios = []
        for batch in (even, mixed):
            prompt_length = batch.prompt_length[batch.group]
            ours = retention.poisson_variance(batch, mode, retention.inclusion(batch, mode, retention.OURS, 0.5))
            for seed in range(retention.PROBE_SEEDS):
                model = retention.probed_model(batch, mode, seed)
                assert model != NormModel()
                magnitude = score_magnitude(
                    batch.advantage, batch.tokens, batch.surprise.ravel(), mode, model, prompt_length
                )
                pi = neyman_inclusion(magnitude, batch.tokens, 0.5)
                ratios.append(retention.poisson_variance(batch, mode, pi) / ours)
        assert max(ratios) < 1.15
        assert np.mean(ratios[: retention.PROBE_SEEDS]) < 0.95, "of even-length"


def test_probes_see_nothing_of_the_batch(tmp_path):
    made_up(tmp_path / "data.npz", 12, 8)
    batch = measured_batch.load(tmp_path / "data.npz", 4)
    found = retention.probed_model(batch, SEQUENCE, 0)
    changed = batch.prompt_gram.copy()
    changed[:, :4, :4] *= 100
    of_batch = {
        "gram": batch.gram * 9,
        "prompt_gram": changed,
        "reward": 1 - batch.reward,
        "surprise": batch.surprise**2,
    }
    assert retention.probed_model(measured_batch.Batch(**(vars_of(batch) | of_batch)), SEQUENCE, 0) == found
    changed[:, 4:, 4:] *= np.linspace(1, 3, 4)[:, None] * np.linspace(1, 3, 4)
    other = measured_batch.Batch(**(vars_of(batch) | {"prompt_gram": changed}))
    assert retention.probed_model(other, SEQUENCE, 0) != found


def test_the_report_has_every_section(tmp_path, monkeypatch, capsys):
    made_up(tmp_path / "data.npz", 5, 4)
    monkeypatch.setattr(retention, "DRAWS", {"pivotal": 3, "cube": 3})
    out = tmp_path / "folder" / "report.md"
    monkeypatch.setattr(sys, "argv", ["retention", str(tmp_path / "data.npz"), "--completions", "4", "--out", str(out)])
    retention.main()
    text = out.read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    for mode in measured_batch.MODES:
        for title in retention.SECTIONS:
            assert f"### {title}: data, {mode}" in text
    assert "nan" not in text
