"""New data is what it says: probabilities, lengths and rewards of the policy's own completions, and exact scores."""

import measured_batch
import numpy as np
import policy_gradients
import pytest
import torch


@pytest.fixture(scope="module")
def arrays():
    return policy_gradients.measure(seed=0, prompts=2, completions=3, updates=1)


def test_tokens_probabilities_and_lengths_agree(arrays):
    np.testing.assert_array_equal(np.diff(arrays["row"]), arrays["response_length"].ravel())
    sums = np.add.reduceat((1 - arrays["token_probability"].astype(float)) ** 2, arrays["row"][:-1])
    np.testing.assert_allclose(arrays["sum_sq_one_minus_p"].ravel(), sums, rtol=1e-5)
    assert arrays["token"].shape == arrays["token_probability"].shape


def test_score_norms_grow_with_the_surprise_of_the_tokens(arrays):
    gram = arrays["score_gram"].astype(float)
    np.testing.assert_allclose(gram, gram.T)
    assert np.linalg.eigvalsh(gram).min() > -1e-3 * np.trace(gram)
    order = np.corrcoef(np.log(np.diag(gram)), np.log(arrays["sum_sq_one_minus_p"].ravel()))[0, 1]
    assert order > 0.5


def test_another_seed_is_another_batch_and_the_same_seed_the_same(arrays):
    again = policy_gradients.measure(seed=0, prompts=2, completions=3, updates=1)
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, again[name], err_msg=name)
    other = policy_gradients.measure(seed=1, prompts=2, completions=3, updates=0)
    assert not np.array_equal(other["token"], arrays["token"])


def test_a_score_is_the_gradient_of_the_sum_of_log_probabilities():
    class Table(torch.nn.Module):
        """A policy whose logits depend on the previous token alone."""

        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.randn(5, 5, dtype=torch.float64, generator=torch.manual_seed(0)))

        def forward(self, input_ids, logits_to_keep):
            output = self.logits[input_ids[:, -logits_to_keep:]]
            return type("Output", (), {"logits": output})

    model = Table()
    completion = policy_gradients.Completion([1, 2], policy_gradients.SamplingRule(), [], tokens=[3, 0, 3])
    gradients, probabilities = policy_gradients.scores(model, [completion, completion])
    table = model.logits.detach().softmax(-1).numpy()
    expected = np.zeros((5, 5))
    for before, token in ((2, 3), (3, 0), (0, 3)):
        expected[before] -= table[before]
        expected[before, token] += 1
    np.testing.assert_allclose(gradients, np.stack([expected.ravel()] * 2), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(probabilities[1], [table[2, 3], table[3, 0], table[0, 3]])
    np.testing.assert_allclose(policy_gradients.gram(gradients), gradients.astype(float) @ gradients.T.astype(float))


def test_the_file_is_what_the_benchmark_reads(arrays, tmp_path):
    np.savez_compressed(tmp_path / "data.npz", **arrays)
    batch = measured_batch.load(tmp_path / "data.npz", 2)
    assert batch.gram.shape == (4, 4)
    assert batch.signature is not None
