import numpy as np
import pytest

from verl_dppo.pruning import order as order_module
from verl_dppo.pruning.order import chain_order, snake_order, surprise_signature


def tokens_of(rows):
    """Flatten [(tokens, surprises), ...] to the arguments of `surprise_signature`."""
    token = np.concatenate([np.asarray(t) for t, _ in rows])
    surprise = np.concatenate([np.asarray(s, dtype=float) for _, s in rows])
    return token, surprise, np.repeat(np.arange(len(rows)), [len(t) for t, _ in rows]), len(rows)


def assert_permutation(order, n):
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


class TestSurpriseSignature:
    def test_sums_the_surprise_of_each_token_id(self):
        rows = [([5, 5, 9], [0.25, 0.5, 0.0]), ([5], [0.75]), ([9], [0.75])]
        signature = surprise_signature(*tokens_of(rows), dims=64)
        np.testing.assert_allclose(signature[0], signature[1])
        assert np.abs(signature[0]).sum() == 0.75
        assert np.abs(signature[2]).argmax() != np.abs(signature[0]).argmax()

    def test_inner_products_estimate_those_over_the_vocabulary(self):
        rng = np.random.default_rng(0)
        n, vocabulary, length = 40, 150_000, 300
        token = rng.integers(0, 400, (n, length)) * 375
        surprise = rng.uniform(0.1, 1, (n, length))
        full = np.zeros((n, vocabulary))
        np.add.at(full, (np.arange(n)[:, None], token), surprise)
        row = np.repeat(np.arange(n), length)
        sketch = surprise_signature(token.ravel(), surprise.ravel(), row, n, dims=1024)
        norm = np.linalg.norm(full, axis=1)
        error = (sketch @ sketch.T - full @ full.T) / np.outer(norm, norm)
        assert np.abs(error).mean() < 2 / np.sqrt(1024)
        assert abs(error[np.triu_indices(n, 1)].mean()) < 0.01

    def test_neighbouring_ids_spread_over_entries_and_signs(self):
        n, dims = 4096, 64
        signature = surprise_signature(np.arange(n), np.ones(n), np.arange(n), n, dims)
        entry = np.abs(signature).argmax(axis=1)
        counts = np.bincount(entry, minlength=dims)
        assert counts.min() > 0.5 * n / dims
        assert counts.max() < 1.5 * n / dims
        assert abs(signature.sum()) < 0.1 * n

    def test_ignores_tokens_that_were_all_but_certain(self):
        rows = [([1, 2, 3], [0.001, 0.0, 0.01])]
        assert not surprise_signature(*tokens_of(rows)).any()

    def test_completions_without_tokens_have_no_signature(self):
        signature = surprise_signature(np.array([7]), np.array([0.5]), np.array([1]), 3, dims=8)
        assert not signature[[0, 2]].any()
        assert signature.shape == (3, 8)
        assert surprise_signature(np.zeros(0, int), np.zeros(0), np.zeros(0, int), 0).shape == (0, 128)

    @pytest.mark.parametrize(
        ("token", "surprise", "row", "n", "dims", "words"),
        [
            ([1, 2], [0.5], [0, 0], 1, 8, "shapes"),
            ([1], [0.5], [0], 1, 0, "dims=0"),
            ([1], [0.5], [1], 1, 8, "row must be in"),
            ([1], [0.5], [-1], 1, 8, "row must be in"),
        ],
    )
    def test_refuses_what_makes_no_sense(self, token, surprise, row, n, dims, words):
        with pytest.raises(ValueError, match=words):
            surprise_signature(np.array(token), np.array(surprise), np.array(row), n, dims)


class TestChainOrder:
    def test_every_completion_is_followed_by_the_most_similar_of_those_left(self):
        rng = np.random.default_rng(0)
        signature, advantage = rng.normal(size=(60, 6)), rng.choice([-1.0, 0.5], 60)
        order = chain_order(signature, advantage, np.arange(60) // 4)
        assert_permutation(order, 60)
        unit = signature / np.linalg.norm(signature, axis=1, keepdims=True) * np.sign(advantage)[:, None]
        cosine = unit @ unit.T
        for place in range(59):
            left = order[place + 1 :]
            assert cosine[order[place], order[place + 1]] >= cosine[order[place], left].max() - 1e-6

    def test_equal_tokens_with_opposite_advantages_are_far_apart(self):
        signature = np.repeat(np.eye(2), 4, axis=0)
        advantage = np.array([1.0, -1, 1, -1, 1, -1, 1, -1])
        order = chain_order(signature, advantage, np.zeros(8, int))
        signed = signature[order] * advantage[order, None]
        changes = (np.abs(np.diff(signed, axis=0)).sum(axis=1) > 0).sum()
        assert changes == 3

    @pytest.mark.parametrize("n", [0, 1, 2, 5, 300, 2000])
    def test_is_a_permutation_for_any_size(self, n):
        rng = np.random.default_rng(n)
        advantage = rng.choice([-1.0, 0.0, 1.0], n)
        order = chain_order(rng.normal(size=(n, 4)), advantage, rng.integers(0, 9, n))
        assert_permutation(order, n)
        idle = np.flatnonzero(advantage[order] == 0)
        np.testing.assert_array_equal(idle, np.arange(n - idle.size, n))

    def test_blocks_are_chains_of_whole_stretches_of_prompts(self, monkeypatch):
        monkeypatch.setattr(order_module, "SHORTEST_CHAIN", 8)
        monkeypatch.setattr(order_module, "COSINES", 8 * 24)
        rng = np.random.default_rng(1)
        group = rng.permutation(np.repeat(np.arange(6), 4))
        order = chain_order(rng.normal(size=(24, 4)), np.ones(24), group)
        for block in range(3):
            assert set(group[order[8 * block : 8 * block + 8]]) == {2 * block, 2 * block + 1}

    def test_no_advantage_or_no_signature_is_no_trouble(self):
        assert_permutation(chain_order(np.ones((5, 3)), np.zeros(5), np.zeros(5, int)), 5)
        assert_permutation(chain_order(np.zeros((300, 3)), np.ones(300), np.zeros(300, int)), 300)

    def test_repeats(self):
        rng = np.random.default_rng(2)
        arguments = rng.normal(size=(400, 8)), rng.choice([-1.0, 1.0], 400), np.arange(400) // 8
        np.testing.assert_array_equal(chain_order(*arguments), chain_order(*arguments))

    def test_refuses_shapes_that_differ(self):
        with pytest.raises(ValueError, match="shapes"):
            chain_order(np.ones((3, 2)), np.ones(4), np.zeros(3))
        with pytest.raises(ValueError, match="shapes"):
            chain_order(np.ones(3), np.ones(3), np.zeros(3))


class TestSnakeOrder:
    def test_runs_through_signed_surprise_and_back(self):
        surprise = np.array([3.0, 1, 2, 4, 9, 8, 7, 6])
        advantage = np.array([1.0, 1, -1, -1, -1, 1, -1, 1])
        group = np.array([5, 5, 5, 5, 2, 2, 2, 2])
        order = snake_order(surprise, advantage, group)
        signed = (np.sign(advantage) * surprise)[order]
        np.testing.assert_array_equal(signed, [-9, -7, 6, 8, 3, 1, -2, -4])
        np.testing.assert_array_equal(group[order], [2, 2, 2, 2, 5, 5, 5, 5])

    @pytest.mark.parametrize("n", [0, 1, 50])
    def test_is_a_permutation_for_any_size(self, n):
        rng = np.random.default_rng(n)
        assert_permutation(snake_order(rng.random(n), rng.choice([-1.0, 0, 1], n), rng.integers(0, 5, n)), n)

    def test_refuses_shapes_that_differ(self):
        with pytest.raises(ValueError, match="shapes"):
            snake_order(np.ones(3), np.ones(4), np.zeros(3))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_rows_of_a_small_integer_type_do_not_overflow(dtype):
    row = np.array([3, 100, 120], dtype=dtype)
    found = surprise_signature([5, 6, 7], [0.5, 0.6, 0.7], row, 128)
    assert np.flatnonzero(found.any(axis=1)).tolist() == [3, 100, 120]
    assert surprise_signature([], [], [], 4).shape == (4, 128)


def test_what_is_not_finite_is_refused_by_the_chain():
    with pytest.raises(ValueError, match="finite"):
        chain_order([[np.nan, 1.0], [1.0, 2.0]], [1.0, -1.0], [0, 0])
