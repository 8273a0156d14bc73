import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pruning.pivotal_tree import ScriptedGenerator, pivotal_tree

from verl_dppo.pruning import draw, fixed_size_inclusion

CASES = [
    np.array([0.5, 0.5, 0.5, 0.5]),
    np.array([0.3, 0.9, 0.8, 1.0, 0.25, 0.75]),
    np.array([0.1, 0.2, 0.3]),
    np.array([0.0, 0.7, 0.0, 0.3, 0.999999, 1e-6]),
    fixed_size_inclusion([1.0, 5.0, 2.0, 8.0, 3.0, 0.1], 3, 0.05),
]


@pytest.mark.parametrize("pi", CASES)
def test_every_path_of_the_draw_is_the_pivotal_designs_and_the_probabilities_are_exact(pi):
    inclusion, total = np.zeros_like(pi), 0.0
    for probability, luck, kept in pivotal_tree(pi):
        drawn = draw(pi, ScriptedGenerator(luck))
        assert set(np.flatnonzero(drawn)) == set(kept), (luck, kept)
        inclusion[drawn] += probability
        total += probability
    assert total == pytest.approx(1, abs=1e-12)
    assert inclusion == pytest.approx(pi, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(arrays(np.float64, st.integers(1, 200), elements=st.floats(1e-6, 1e6)), st.data())
def test_an_integer_sum_gives_exactly_that_many(magnitude, data):
    size = data.draw(st.integers(1, magnitude.size))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    order = rng.permutation(magnitude.size)
    assert draw(fixed_size_inclusion(magnitude, size, 0.01), rng, order=order).sum() == size


@pytest.mark.parametrize("design", ["pivotal", "poisson"])
def test_frequencies_of_many_draws_match_pi(design):
    """20,000 draws of 12: no |z| above 4.5, which a true design exceeds with probability 8e-5."""
    rng = np.random.default_rng(3)
    pi, draws = rng.uniform(0.02, 0.98, 12), 20_000
    order = rng.permutation(12)
    count = sum(draw(pi, rng, design, order).astype(int) for _ in range(draws))
    z = (count - draws * pi) / np.sqrt(draws * pi * (1 - pi))
    assert np.abs(z).max() < 4.5


def test_the_order_decides_who_competes():
    """Neighbours with pi = .5 exclude each other, whatever their place in the vector."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        kept = draw(np.full(4, 0.5), rng, order=[0, 2, 1, 3])
        assert kept[0] != kept[2]
        assert kept[1] != kept[3]


def test_the_same_generator_state_draws_the_same():
    pi = np.random.default_rng(1).uniform(size=50)
    assert (draw(pi, np.random.default_rng(9)) == draw(pi, np.random.default_rng(9))).all()


def test_the_empty_and_the_certain_draw():
    rng = np.random.default_rng(0)
    assert draw([], rng).size == 0
    assert draw([1.0, 0.0, 1.0], rng).tolist() == [True, False, True]


def test_bad_input_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="systematic"):
        draw([0.5], rng, "systematic")
    for pi in ([1.2], [-0.1], [float("nan")]):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            draw(pi, rng)
    with pytest.raises(ValueError, match="permutation"):
        draw([0.5, 0.5], rng, order=[0, 0])
