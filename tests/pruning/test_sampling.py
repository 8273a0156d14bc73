import math
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pruning.pivotal_tree import every_path, pivotal_tree

from verl_dppo.pruning import draw, fixed_size_inclusion, neyman_inclusion, score_magnitude
from verl_dppo.pruning.plan import _balance
from verl_dppo.pruning.sampling import DESIGNS

DATA = Path(__file__).parents[1] / "data" / "policy-gradients"

CASES = [
    np.array([0.5, 0.5, 0.5, 0.5]),
    np.array([0.3, 0.9, 0.8, 1.0, 0.25, 0.75]),
    np.array([0.1, 0.2, 0.3]),
    np.array([0.0, 0.7, 0.0, 0.3, 0.999999, 1e-6]),
    np.array([0.4]),
    np.full(8, 0.125),
    np.array([0.9, 0.95, 0.2, 0.97, 0.35, 0.2, 0.2, 0.6]),
    fixed_size_inclusion([1.0, 5.0, 2.0, 8.0, 3.0, 0.1, 4.0], 3, 0.05),
]


# Balancing variables for any pi: those of use, and those that make blocks singular.
BALANCE = {
    "none": lambda pi, length, advantage: None,
    "tokens": lambda pi, length, advantage: np.column_stack([pi * length]),
    "tokens, advantage": lambda pi, length, advantage: np.column_stack([pi * length, advantage]),
    "tokens, advantage, its size": lambda pi, length, advantage: np.column_stack(
        [pi * length, advantage, np.abs(advantage)]
    ),
    "one twice, and zeros": lambda pi, length, advantage: np.column_stack([pi * length, 0 * length, pi * length]),
    "pi, and large constants": lambda pi, length, advantage: np.column_stack([3 * pi, np.full(pi.size, 1e9)]),
    "more than completions": lambda pi, length, advantage: np.power.outer(length, np.linspace(0, 1, 12)),
}
HOW = [("poisson", "none"), ("pivotal", "none"), *(("cube", kind) for kind in BALANCE)]


def variables(kind, pi):
    rng = np.random.default_rng(pi.size)
    return BALANCE[kind](pi, rng.lognormal(3, 1, pi.size), rng.choice([-1.5, 0.5], pi.size))


def joint_inclusion(pi, **how):
    """Return (n, n) probabilities that both are kept, by enumeration, with the inclusion probabilities as diagonal."""
    joint, total = np.zeros((len(pi), len(pi))), 0.0
    for probability, kept in every_path(lambda rng: draw(pi, rng, **how)):
        joint += probability * np.outer(kept, kept)
        total += probability
    assert total == pytest.approx(1, abs=1e-12)
    return joint


class ExtremeGenerator:
    """Gives the smallest and the largest number that numpy's generator may give: what is left to chance, happens."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def random(self, size):
        return self.rng.choice([0.0, 1 - 2.0**-53], size)


def assert_floor_or_ceil(count, pi):
    total = math.fsum(pi)
    assert math.floor(total + 1e-9) <= count <= math.ceil(total - 1e-9), (count, total)


@pytest.mark.parametrize("pi", CASES)
@pytest.mark.parametrize(("design", "kind"), HOW)
def test_inclusion_probabilities_are_exact_over_all_paths_of_the_draw(design, kind, pi):
    order = np.random.default_rng(1).permutation(pi.size)
    joint = joint_inclusion(pi, design=design, order=order, balance=variables(kind, pi))
    assert joint.diagonal() == pytest.approx(pi, abs=1e-13)


@settings(max_examples=40, deadline=None)
@given(
    arrays(np.float64, st.integers(0, 6), elements=st.one_of(st.sampled_from([0, 0.25, 0.5, 1]), st.floats(0.01, 1))),
    st.sampled_from(HOW),
)
def test_inclusion_probabilities_are_exact_for_any_pi(pi, how):
    design, kind = how
    assert joint_inclusion(pi, design=design, balance=variables(kind, pi)).diagonal() == pytest.approx(pi, abs=1e-12)


@pytest.mark.parametrize("pi", CASES)
def test_the_pivotal_draw_has_the_distribution_of_one_fight_after_another(pi):
    drawn, defined = defaultdict(float), defaultdict(float)
    for probability, kept in every_path(lambda rng: draw(pi, rng)):
        drawn[frozenset(np.flatnonzero(kept).tolist())] += probability
    for probability, kept in pivotal_tree(pi):
        defined[kept] += probability
    for kept in drawn.keys() | defined.keys():
        assert drawn[kept] == pytest.approx(defined[kept], abs=1e-8), kept


@pytest.mark.parametrize("design", ["pivotal", "cube"])
def test_the_order_decides_who_competes(design):
    """Neighbours with pi = .5 exclude each other, whatever their place in the vector; others do not."""
    joint = joint_inclusion(np.full(4, 0.5), design=design, order=[0, 2, 1, 3])
    assert joint[0, 2] == joint[1, 3] == 0
    assert joint[0, 1] == joint[0, 3] == joint[1, 2] == joint[2, 3] == 0.25


def test_independent_draws_are_independent():
    pi = np.array([0.3, 1.0, 0.6, 0.0, 0.25])
    joint = joint_inclusion(pi, design="poisson")
    assert joint[~np.eye(5, dtype=bool)] == pytest.approx(np.outer(pi, pi)[~np.eye(5, dtype=bool)])


# Ones, zeros, ties, and sums that are integers but for rounding.
inclusion = st.one_of(
    arrays(
        np.float64, st.integers(0, 120), elements=st.one_of(st.sampled_from([0, 0.1, 0.3, 0.7, 1]), st.floats(0, 1))
    ),
    st.builds(np.full, st.integers(1, 120), st.sampled_from([0.1, 0.2, 1 / 3, 0.7, 1e-3, 1 - 1e-12])),
    arrays(np.float64, st.integers(1, 120), elements=st.sampled_from([1e-300, 1e-15, 1e-8, 0.5, 1 - 1e-8, 1 - 1e-16])),
)


@settings(max_examples=300, deadline=None)
@given(
    inclusion,
    st.sampled_from([how for how in HOW if how[0] != "poisson"]),
    st.integers(0, 2**32 - 1),
    st.sampled_from([np.random.default_rng, ExtremeGenerator]),
)
def test_the_kept_count_is_the_sum_of_pi_up_or_down_to_an_integer(pi, how, seed, generator):
    design, kind = how
    order = np.random.default_rng(seed).permutation(pi.size)
    kept = draw(pi, generator(seed), design, order, variables(kind, pi))
    assert_floor_or_ceil(kept.sum(), pi)
    assert kept[pi == 1].all()
    assert not kept[pi == 0].any()


@settings(max_examples=200, deadline=None)
@given(arrays(np.float64, st.integers(1, 200), elements=st.floats(1e-6, 1e6)), st.data())
def test_an_integer_sum_gives_exactly_that_many(magnitude, data):
    size = data.draw(st.integers(1, magnitude.size))
    design, seed = data.draw(st.sampled_from(["pivotal", "cube"])), data.draw(st.integers(0, 2**32 - 1))
    generator = data.draw(st.sampled_from([np.random.default_rng, ExtremeGenerator]))
    order = np.random.default_rng(seed).permutation(magnitude.size)
    assert draw(fixed_size_inclusion(magnitude, size, 0.01), generator(seed), design, order).sum() == size


@pytest.mark.parametrize("design", ["pivotal", "cube"])
@pytest.mark.parametrize("part", [0.1, 0.3, 1 / 3, 0.7])
def test_rounding_costs_no_place_among_a_hundred_thousand(design, part):
    """0.1 a hundred thousand times is 10,000; a plain running sum of it misses that by 2e-8."""
    n = 99_990
    for seed in range(4):
        assert draw(np.full(n, part), ExtremeGenerator(seed), design).sum() == round(n * part)


@settings(max_examples=100, deadline=None)
@given(arrays(np.float64, st.integers(1, 100), elements=st.floats(0, 1)), st.integers(0, 2**32 - 1))
def test_a_pivotal_sample_is_spread_over_the_order(pi, seed):
    """Every first part of the order holds the sum of its pi up or down to an integer."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(pi.size)
    so_far, expected = np.cumsum(draw(pi, rng, "pivotal", order)[order]), np.cumsum(pi[order])
    assert (np.abs(so_far - expected) < 1 + 1e-9).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_a_cube_sample_keeps_the_exact_count_of_every_stratum(strata, seed):
    """Indicators of strata with integer sums of pi can be balanced exactly, and then they must be."""
    rng = np.random.default_rng(seed)
    stratum = rng.permutation(np.repeat(np.arange(strata), rng.integers(2, 12, strata)))
    pi, size = np.zeros(stratum.size), np.zeros(strata, dtype=int)
    for s in range(strata):
        members = np.flatnonzero(stratum == s)
        size[s] = rng.integers(1, members.size)
        pi[members] = fixed_size_inclusion(rng.lognormal(size=members.size), size[s], 0.05)
    kept = draw(pi, rng, "cube", balance=pi[:, None] * (stratum[:, None] == np.arange(strata)))
    assert (np.bincount(stratum[kept], minlength=strata) == size).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_last_variables_are_given_up_first(others, seed):
    """The first variable can be balanced exactly, the others cannot: they must not cost it anything."""
    rng = np.random.default_rng(seed)
    pi = np.concatenate([fixed_size_inclusion(rng.lognormal(size=9), size, 0.05) for size in (4, 6)])
    first, order = np.arange(18) < 9, rng.permutation(18)
    kept = draw(pi, rng, "cube", order, np.column_stack([pi * first, rng.normal(size=(18, others))]))
    assert kept[first].sum() == 4
    assert kept[~first].sum() == 6


def informative_completions(mode, keep):
    """Return pi, length, advantage and order of 64 groups of 8 completions of real policy gradients."""
    with np.load(DATA / "even-length-0.npz") as data:
        reward, length, surprise = (
            data[name][:, :8].astype(float) for name in ("reward", "response_length", "sum_sq_one_minus_p")
        )
    deviation = reward.std(axis=1, ddof=1, keepdims=True)
    advantage = ((reward - reward.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, np.inf)).ravel()
    length, group = length.ravel(), np.repeat(np.arange(64), 8)
    pi = neyman_inclusion(score_magnitude(advantage, length, surprise.ravel(), mode), length, keep)
    return pi, length, advantage, np.lexsort((length, np.sign(advantage), group))


# Coefficient of variation of the kept tokens, at most. Below .3 fewer are kept, and the landing weighs more.
VARIATION = {0.7: 0.015, 0.5: 0.015, 0.3: 0.015, 0.15: 0.025}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("keep", VARIATION)
def test_the_cube_keeps_nearly_the_same_tokens_every_time(mode, keep):
    """Standard deviation over mean of 200 draws of 512, balanced as the trainer does: and below half of pivotal's."""
    pi, length, advantage, order = informative_completions(mode, keep)
    assert pi.size == 512
    rng = np.random.default_rng(0)
    balance = _balance(pi, length, advantage)

    def variation(**how):
        tokens = np.array([length[draw(pi, rng, order=order, **how)].sum() for _ in range(200)])
        return tokens.std() / tokens.mean()

    cube = variation(design="cube", balance=balance)
    assert cube < VARIATION[keep]
    assert cube < 0.5 * variation(design="pivotal")


def test_the_cube_holds_the_total_of_advantages_too():
    pi, length, advantage, order = informative_completions("token-mean", 0.5)
    rng, total = np.random.default_rng(0), advantage.sum()

    def spread(balance):
        kept = (draw(pi, rng, "cube", order, balance) for _ in range(200))
        return np.sqrt(np.mean([((advantage[k] / pi[k]).sum() - total) ** 2 for k in kept]))

    assert spread(np.column_stack([pi * length, advantage])) < 0.3 * spread(np.column_stack([pi * length]))


def assert_counts(count, draws, pi, family=1e-4):
    """Each count is binomial: the chance that any leaves its bound is at most `family` (Bonferroni)."""
    assert (count[pi == 1] == draws).all()
    assert (count[pi == 0] == 0).all()
    random = (pi > 0) & (pi < 1)
    p = pi[random]
    z = (count[random] - draws * p) / np.sqrt(draws * p * (1 - p))
    assert np.abs(z).max() < NormalDist().inv_cdf(1 - family / (2 * p.size))


def mixed_inclusion(n, rng):
    """Return pi with ones, zeros, ties and many at a floor, in random order."""
    pi = np.clip(rng.lognormal(-1, 1, n), 0.125, 1)
    pi[: n // 10] = 0.0
    pi[n // 10 : n // 5] = 0.5
    return rng.permutation(pi)


# One cube draw of 64 takes 2 ms: as many of them as of the others are left to the long tests.
MANY_DRAWS = [
    ("poisson", 64, 200_000),
    ("pivotal", 64, 200_000),
    ("cube", 12, 10_000),
    pytest.param("cube", 64, 200_000, marks=pytest.mark.long),
    ("poisson", 4096, 2_000),
    ("pivotal", 4096, 2_000),
    ("cube", 4096, 2_000),
]


@pytest.mark.parametrize(("design", "n", "draws"), MANY_DRAWS)
def test_inclusion_counts_of_many_draws_match_pi(design, n, draws):
    rng = np.random.default_rng(3)
    pi = mixed_inclusion(n, rng)
    how = {"order": rng.permutation(n), "balance": variables("tokens, advantage", pi) if design == "cube" else None}
    count = np.zeros(n, dtype=np.int64)
    for _ in range(draws):
        count += draw(pi, rng, design, **how)
    assert_counts(count, draws, pi)


@pytest.mark.parametrize(("design", "kind"), HOW)
def test_the_same_generator_state_draws_the_same(design, kind):
    pi = np.random.default_rng(1).uniform(size=50)
    first, second = (draw(pi, np.random.default_rng(9), design, balance=variables(kind, pi)) for _ in range(2))
    assert (first == second).all()


@pytest.mark.parametrize("design", DESIGNS)
def test_the_empty_the_certain_and_the_impossible_draw(design):
    rng = np.random.default_rng(0)
    how = {"design": design, "order": None}
    assert draw([], rng, **how).shape == (0,)
    assert draw([1.0], rng, **how).tolist() == [True]
    assert draw([0.0], rng, **how).tolist() == [False]
    assert draw([1.0, 0.0, 1.0], rng, **how).tolist() == [True, False, True]
    assert draw([], rng, design, order=[]).dtype == bool
    if design == "cube":
        assert draw([], rng, design, balance=np.zeros((0, 2))).shape == (0,)
        assert draw([1.0, 0.0], rng, design, balance=np.zeros((2, 0))).tolist() == [True, False]


class TestRefusals:
    @pytest.mark.parametrize("design", DESIGNS)
    @pytest.mark.parametrize("bad", [1.2, -0.1, float("nan"), float("inf")])
    def test_a_probability_outside_its_range(self, design, bad):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            draw([0.5, bad], np.random.default_rng(0), design)

    @pytest.mark.parametrize("pi", [0.5, [[0.5, 0.5]]])
    def test_pi_that_is_no_vector(self, pi):
        with pytest.raises(ValueError, match=r"expected \(n,\)"):
            draw(pi, np.random.default_rng(0))

    def test_an_unknown_design(self):
        with pytest.raises(ValueError, match="systematic"):
            draw([0.5], np.random.default_rng(0), "systematic")

    @pytest.mark.parametrize("design", DESIGNS)
    @pytest.mark.parametrize("order", [[0, 0], [0], [0, 1, 2], [1, 2], [[0, 1]], [0.5, 1]])
    def test_an_order_that_is_no_permutation(self, design, order):
        with pytest.raises(ValueError, match="permutation"):
            draw([0.5, 0.5], np.random.default_rng(0), design, order)

    @pytest.mark.parametrize("balance", [[1.0, 2.0], [[1.0], [2.0], [3.0]], [[1.0, 2.0]]])
    def test_balancing_variables_of_another_shape(self, balance):
        with pytest.raises(ValueError, match=r"expected \(2, k\)"):
            draw([0.5, 0.5], np.random.default_rng(0), "cube", balance=balance)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_balancing_variables_that_are_not_finite(self, bad):
        with pytest.raises(ValueError, match="finite"):
            draw([0.5, 0.5], np.random.default_rng(0), "cube", balance=[[1.0], [bad]])

    @pytest.mark.parametrize("design", ["pivotal", "poisson"])
    def test_balancing_variables_that_the_design_would_ignore(self, design):
        with pytest.raises(ValueError, match="needs design='cube'"):
            draw([0.5, 0.5], np.random.default_rng(0), design, balance=[[1.0], [2.0]])
