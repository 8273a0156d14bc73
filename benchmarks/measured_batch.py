"""A batch of completions with exact policy gradients, and what an estimator of its gradient is worth on it.

The full-batch gradient is g = sum_i a_i s_i, with s_i the score function of completion i and a_i = A_i c_i. An
estimator is g_hat = sum_i w_i a_i s_i with random weights w. Everything about it follows from the mean and the
covariance of w and from the inner products of the scores. All figures are relative to ||g||^2.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from verl_dppo.pruning.order import surprise_signature

Array = np.ndarray
MODES = ("token-mean", "seq-mean-token-mean")
SPLITS = 200


def advantages(reward: Array) -> Array:
    """Return GRPO's advantages of rewards (..., G); 0 where a group's rewards are equal."""
    spread = np.ptp(reward, axis=-1, keepdims=True)
    centred = reward - reward.mean(-1, keepdims=True)
    return np.where(spread > 0, centred / (reward.std(-1, ddof=1, keepdims=True) + 1e-6), 0.0)


@dataclass(frozen=True)
class Batch:
    """P prompts with C completions each, of which the first G are the batch; n = P * G rows, prompt by prompt.

    Attributes:
        all_reward, all_length, all_surprise: (P, C) reward, response tokens, and sum over these of (1 - p_t)^2, of all
            completions.
        prompt_length: (P,) tokens of the prompts.
        prompt_gram: (P, C, C) inner products of the scores inside each prompt.
        reward, length, surprise: (P, G) of the batch.
        previous: (P, C) rewards under an older policy.
        gram: (n, n) inner products of the scores.
        signature: (n, d) surprise per token id, or None where the file has no tokens.
    """

    all_reward: Array
    all_length: Array
    all_surprise: Array
    prompt_length: Array
    prompt_gram: Array
    reward: Array
    length: Array
    surprise: Array
    previous: Array
    gram: Array
    signature: Array | None

    @property
    def completions(self) -> int:
        """The group size G."""
        return self.reward.shape[1]

    @cached_property
    def advantage(self) -> Array:
        """The advantages, (n,)."""
        return advantages(self.reward).ravel()

    @cached_property
    def tokens(self) -> Array:
        """Response tokens, (n,)."""
        return self.length.ravel()

    @cached_property
    def group(self) -> Array:
        """The prompt of each row, (n,)."""
        return np.repeat(np.arange(len(self.reward)), self.completions)

    @cached_property
    def informative(self) -> Array:
        """Whether a row's group has different rewards, (n,) bool."""
        return np.repeat(np.ptp(self.reward, axis=1) > 0, self.completions)

    @cached_property
    def informative_token_share(self) -> float:
        """Share of the response tokens that belong to informative groups."""
        return float(self.tokens[self.informative].sum() / self.tokens.sum())

    def factor(self, mode: str) -> Array:
        """Return a = A * c, (n,), with c = 1 or 1 / length."""
        return self.advantage / self.tokens if mode == "seq-mean-token-mean" else self.advantage

    def norm(self) -> Array:
        """Return the true norms of the scores, (n,)."""
        return np.sqrt(np.diag(self.gram))

    def gradient_gram(self, mode: str) -> Array:
        """Return the inner products of a_i s_i, (n, n), divided by ||g||^2."""
        a = self.factor(mode)
        products = a[:, None] * self.gram * a
        return products / products.sum()

    def kept(self, pi: Array) -> float:
        """Return the expected share of the informative response tokens that is kept."""
        return float((pi * self.tokens)[self.informative].sum() / self.tokens[self.informative].sum())


def load(path: Path, completions: int) -> Batch:
    """Read a file of benchmarks/policy_gradients.py, or its small copy of tests/data/policy-gradients.

    Raises:
        ValueError: more completions than the file has inner products for.
    """
    data = dict(np.load(path))
    reward, length = data["reward"].astype(float), data["response_length"].astype(float)
    surprise = data["sum_sq_one_minus_p"].astype(float)
    prompts, available = reward.shape
    if "score_gram" in data:
        full = data["score_gram"].astype(float)
        blocks = full.reshape(prompts, available, prompts, available)
        prompt_gram = blocks[np.arange(prompts), :, np.arange(prompts)]
        stored = available
    else:
        full = _symmetric(data["score_gram_upper"].astype(float))
        prompt_gram = _symmetric(data["score_gram_prompt"].astype(float))
        stored = len(full) // prompts
    if completions > stored:
        raise ValueError(f"{path} has gradients of {stored} completions per prompt, not {completions}")
    rows = (np.arange(prompts)[:, None] * stored + np.arange(completions)).ravel()
    return Batch(
        all_reward=reward,
        all_length=length,
        all_surprise=surprise,
        prompt_length=data["prompt_length"].astype(float),
        prompt_gram=prompt_gram,
        reward=reward[:, :completions],
        length=length[:, :completions],
        surprise=surprise[:, :completions],
        previous=data["reward_previous_epoch"].astype(float),
        gram=full[np.ix_(rows, rows)],
        signature=_signature(data)[rows] if "token" in data else None,
    )


def _symmetric(upper: Array) -> Array:
    """Return (..., m, m) from upper triangles (..., m (m + 1) / 2)."""
    m = int((np.sqrt(8 * upper.shape[-1] + 1) - 1) / 2)
    row, column = np.triu_indices(m)
    full = np.empty((*upper.shape[:-1], m, m))
    full[..., row, column] = full[..., column, row] = upper
    return full


def _signature(data: dict[str, Array]) -> Array:
    n = len(data["row"]) - 1
    row = np.repeat(np.arange(n), np.diff(data["row"]))
    return surprise_signature(data["token"], 1.0 - data["token_probability"].astype(float), row, n)


@dataclass(frozen=True)
class Weights:
    """The random weights of an estimator: mean (n,), covariance (n, n), inclusion probabilities (n,)."""

    mean: Array
    covariance: Array
    pi: Array


@dataclass(frozen=True)
class Quality:
    """An estimator's error; `scaled_bias` is the bias that the best constant factor on the estimate leaves."""

    kept: float
    variance: float
    bias: float
    scaled_bias: float

    @property
    def mse(self) -> float:
        """Mean squared error."""
        return self.variance + self.bias**2


def quality(batch: Batch, weights: Weights, mode: str) -> Quality:
    """Return the error of an estimator on a batch: variance, bias and mean squared error, exactly."""
    products = batch.gradient_gram(mode)
    off = weights.mean - 1
    along, square = (products @ weights.mean).sum(), weights.mean @ products @ weights.mean
    scaled = 1 - along**2 / square if square > 0 else 1.0
    return Quality(
        kept=batch.kept(weights.pi),
        variance=float((weights.covariance * products).sum()),
        bias=float(np.sqrt(max(off @ products @ off, 0.0))),
        scaled_bias=float(np.sqrt(max(scaled, 0.0))),
    )


def rollout_noise(batch: Batch, mode: str, rng: np.random.Generator) -> float:
    """Estimate V_roll / ||g||^2: the variance of g over the completions, for these prompts.

    Where a prompt has 2 G completions, they are split at random into two groups of G: half the squared distance of the
    two groups' gradients is an unbiased estimate, advantages of a whole group included. Averaged over splits. With
    fewer completions it is the jackknife (Efron and Stein 1981), which errs upwards.
    """
    prompts, available = batch.all_reward.shape
    size = batch.completions
    scale = 1 / batch.all_length if mode == "seq-mean-token-mean" else np.ones_like(batch.all_length)
    a = batch.factor(mode)
    total = a @ batch.gram @ a
    if available < 2 * size:
        return _jackknife(batch, scale) / total
    noise = 0.0
    for _ in range(SPLITS):
        half = rng.random((prompts, available)).argsort(axis=1)
        difference = np.zeros((prompts, available))
        for members, sign in ((half[:, :size], 1.0), (half[:, size : 2 * size], -1.0)):
            chosen = advantages(np.take_along_axis(batch.all_reward, members, axis=1))
            np.put_along_axis(difference, members, sign * chosen, axis=1)
        difference *= scale
        noise += 0.5 * np.einsum("qi,qij,qj->", difference, batch.prompt_gram, difference)
    return noise / SPLITS / total


def _jackknife(batch: Batch, scale: Array) -> float:
    size = batch.completions
    left_out = np.zeros((size, *batch.reward.shape))
    for i in range(size):
        rest = np.delete(np.arange(size), i)
        left_out[i][:, rest] = advantages(batch.reward[:, rest]) * size / (size - 1)
    off = (left_out - left_out.mean(0)) * scale[:, :size]
    return (size - 1) / size * np.einsum("rqi,qij,rqj->", off, batch.prompt_gram[:, :size, :size], off)


def batch_noise(batch: Batch, mode: str) -> float:
    """Estimate the variance of g over prompts and completions, relative to ||g||^2, from the spread of the prompts."""
    prompts = len(batch.reward)
    a = batch.factor(mode).reshape(batch.reward.shape)
    size = batch.completions
    squares = np.einsum("qi,qij,qj->", a, batch.prompt_gram[:, :size, :size], a)
    total = a.ravel() @ batch.gram @ a.ravel()
    return prompts / (prompts - 1) * (squares / total - 1 / prompts)
