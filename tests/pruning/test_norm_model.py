import json

import numpy as np
import pytest

from verl_dppo.pruning import NormModel, NormRecord, fit_norm_model, score_magnitude


def measured(k, surprise=1.0, length=0.5, prompt=0.3, noise=0.0, seed=0, steps=4):
    rng = np.random.default_rng(seed)
    columns = {
        "sum_sq_one_minus_p": rng.lognormal(1, 1, k),
        "length": rng.integers(20, 400, k).astype(float),
        "prompt_length": rng.integers(10, 90, k).astype(float),
    }
    step = rng.integers(0, steps, k)
    norm = NormModel(surprise, length, prompt).norm(*columns.values()) * np.exp(noise * rng.normal(size=k) + 3 * step)
    return columns, norm, step


def test_many_norms_give_the_law_they_were_made_by():
    columns, norm, step = measured(4000, noise=0.3)
    model = fit_norm_model(*columns.values(), norm, step)
    assert (model.surprise, model.length, model.prompt) == pytest.approx((1.0, 0.5, 0.3), abs=0.05)


def test_without_norms_it_is_the_prior_and_a_few_move_it_part_of_the_way():
    assert fit_norm_model([], [], [], [], []) == NormModel(1.25, 0.0, 0.0)
    columns, norm, step = measured(64, steps=4)
    assert 0 < fit_norm_model(*columns.values(), norm, step).length < 0.5


def test_scale_does_not_matter_not_even_one_that_drifts_from_step_to_step():
    columns, norm, step = measured(60, noise=0.2)
    drifted = norm * np.array([1.0, 40.0, 0.01, 7.0])[step]
    a, b = (fit_norm_model(*columns.values(), values, step) for values in (norm, drifted))
    assert (a.surprise, a.length, a.prompt) == pytest.approx((b.surprise, b.length, b.prompt))


def test_wild_norms_leave_the_powers_within_their_ranges():
    columns, norm, step = measured(500, surprise=30.0, length=-9.0, prompt=9.0)
    model = fit_norm_model(*columns.values(), norm, step)
    assert model.surprise == 2.5
    assert (model.length, model.prompt) == (-1.0, 1.0)


def test_unusable_values_are_refused():
    with pytest.raises(ValueError, match="finite and > 0"):
        fit_norm_model([1.0], [1.0], [1.0], [0.0], [1])
    with pytest.raises(ValueError, match="shapes differ"):
        fit_norm_model([1.0, 2.0], [1.0], [1.0], [1.0], [1])


def test_the_model_enters_the_magnitude():
    advantage, length, surprise, prompt = [1.0, -2.0], [4, 9], [2.0, 3.0], [5, 7]
    plain = score_magnitude(advantage, length, surprise)
    assert plain == pytest.approx(score_magnitude(advantage, length, surprise, norm_model=NormModel()))
    got = score_magnitude(advantage, length, surprise, "seq-mean-token-mean", NormModel(1.0, 0.5, 0.25), prompt)
    expected = [2**0.5 * 4**0.5 * 5**0.25 / 4, 2 * 3**0.5 * 9**0.5 * 7**0.25 / 9]
    assert got == pytest.approx(expected)


def observed(record, step, k=8, noise=0.0, seed=0):
    columns, norm, _ = measured(k, noise=noise, seed=seed, steps=1)
    scale = np.linspace(0.5, 2, k)
    magnitude = scale * NormModel(1.0, 0.5, 0.3).norm(*columns.values())
    record.observe(step, **columns, scale=scale, magnitude=magnitude, norm=norm * scale, weight=np.linspace(1, 3, k))


def test_a_perfect_magnitude_has_correlation_one_and_costs_nothing():
    record = NormRecord()
    assert record.figures() == {}
    observed(record, 1)
    observed(record, 2, seed=1)
    figures = record.figures()
    assert figures["correlation"] == pytest.approx(1)
    assert figures["residual_std"] == pytest.approx(0, abs=1e-9)
    assert figures["second_moment_ratio"] == pytest.approx(1)


def test_a_noisy_magnitude_shows():
    record = NormRecord()
    for step in range(16):
        observed(record, step, noise=1.0, seed=step)
    figures = record.figures()
    assert 0.3 < figures["correlation"] < 0.95
    assert figures["residual_std"] == pytest.approx(1, abs=0.3)
    assert figures["second_moment_ratio"] > 1.3


def test_the_ratio_is_what_the_mismatch_costs():
    """Probabilities m / lambda and n / lambda' of the same sum: the sums of n^2 / pi compare as the figure says."""
    record, rng = NormRecord(), np.random.default_rng(3)
    norm, magnitude = rng.lognormal(size=50), rng.lognormal(size=50)
    ones = np.ones(50)
    record.observe(
        1,
        sum_sq_one_minus_p=ones,
        length=ones,
        prompt_length=ones,
        scale=ones,
        magnitude=magnitude,
        norm=norm,
        weight=ones,
    )
    pi, best = magnitude / magnitude.sum(), norm / norm.sum()
    assert record.figures()["second_moment_ratio"] == pytest.approx((norm**2 / pi).sum() / (norm**2 / best).sum())


def test_norms_that_have_no_logarithm_are_left_out():
    record = NormRecord()
    ones = np.ones(4)
    record.observe(
        1, sum_sq_one_minus_p=ones, length=ones, prompt_length=ones, scale=ones, magnitude=[1, 1, 0, 1],
        norm=[1.0, np.nan, 1.0, 0.0], weight=ones,
    )  # fmt: skip
    assert record.columns["norm"].tolist() == [1.0]


def test_the_record_forgets_resumes_and_fits():
    record = NormRecord(window=20)
    for step in range(5):
        observed(record, step, seed=step)
    assert record.columns["step"].tolist() == [2] * 4 + [3] * 8 + [4] * 8
    again = NormRecord(window=20)
    again.load_state_dict(json.loads(json.dumps(record.state_dict())))
    assert again.model() == record.model() != NormModel()
    with pytest.raises(ValueError, match="columns of lengths"):
        again.load_state_dict(record.state_dict() | {"norm": [1.0]})


def test_norms_without_log_probs_compare_but_do_not_fit():
    record = NormRecord()
    columns, norm, _ = measured(8, steps=1)
    record.observe(
        1,
        **columns | {"sum_sq_one_minus_p": np.zeros(8)},
        scale=np.ones(8),
        magnitude=norm,
        norm=norm,
        weight=np.ones(8),
    )
    assert record.model() == NormModel()
    assert record.figures()["correlation"] == pytest.approx(1)
