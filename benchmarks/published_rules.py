"""The rules of other methods, from the formulas of their papers, as random weights on the terms of the full batch.

Weight 1 on every row is the full batch. A rule that averages over what it keeps, k of n rows, gives each n / k.
"""

import numpy as np
from measured_batch import Array, Batch, Weights, advantages

from verl_dppo.pruning import threshold_inclusion


def horvitz_thompson(batch: Batch, pi: Array) -> Weights:
    """Independent draws with weight 1 / pi. Rows with pi = 0 must have no gradient."""
    live = pi > 0
    variance = np.zeros_like(pi)
    variance[live] = (1 - pi[live]) / pi[live]
    return Weights(np.ones_like(pi), np.diag(variance), pi)


def threshold(batch: Batch, rate: float) -> Weights:
    """Keep |A| >= the group's mean, the rest with probability 1 - rate, weight 1 / pi (like 2603.04135)."""
    pi = threshold_inclusion(np.abs(batch.advantage), batch.group, rate)
    return horvitz_thompson(batch, np.where(batch.informative, pi, 0.0))


def cppo(batch: Batch, keep: float) -> Weights:
    """Keep the k completions with the largest |A|, averaged over the k (2503.22342; ties in order of arrival).

    k is the number whose informative tokens come closest to the budget.
    """
    order = np.argsort(-np.abs(batch.advantage), kind="stable")
    cost = np.where(batch.informative, batch.tokens, 0.0)
    spent = np.cumsum(cost[order]) / cost.sum()
    k = int(np.abs(spent - keep).argmin()) + 1
    pi = np.zeros(order.size)
    pi[order[:k]] = 1.0
    return _certain(pi, pi * order.size / k)


def pods(batch: Batch, size: int) -> Weights:
    """Of each group keep the `size` rollouts whose rewards vary most, advantages normalised on them (2504.13818).

    The subset of largest variance is a number of the highest rewards and of the lowest ones.
    """
    order = np.argsort(batch.reward, axis=1, kind="stable")
    new = np.zeros_like(batch.reward)
    pi = np.zeros_like(batch.reward)
    for q, row in enumerate(order):
        subsets = [np.concatenate([row[: size - high], row[row.size - high :]]) for high in range(size + 1)]
        best = max(subsets, key=lambda subset: batch.reward[q, subset].var())
        new[q, best] = advantages(batch.reward[q, best])
        pi[q, best] = 1.0
    old = np.where(batch.informative, batch.advantage, 1.0)
    weight = np.where(batch.informative, new.ravel() / old, 0.0) * batch.completions / size
    return _certain(pi.ravel(), weight)


def greso(batch: Batch, exploration: float) -> Weights:
    """Skip a prompt whose last group was all right or all wrong, but for `exploration`; no weights (2506.02177).

    The history here is one visit. The batch is refilled and averaged over the prompts that were generated: their random
    number is replaced by its expectation.
    """
    constant = np.ptp(batch.previous, axis=1) == 0
    probability = np.where(constant, max(exploration, 0.01), 1.0)
    weight = 1 / probability.mean()
    variance = np.repeat(probability * (1 - probability), batch.completions) * weight**2
    same = batch.group[:, None] == batch.group
    pi = np.repeat(probability, batch.completions)
    return Weights(pi * weight, same * variance, pi)


def infobatch(batch: Batch, rate: float) -> Weights:
    """Of the m below-mean rows of a group drop int(rate * m) at random, weight 1 / (1 - rate) on the rest (2303.04947).

    The paper draws once from the whole data set, where rounding hardly matters; in groups of a policy gradient it does.
    """
    below = (threshold_inclusion(np.abs(batch.advantage), batch.group, 0.5) < 1) & batch.informative
    m = np.bincount(batch.group, below, minlength=len(batch.reward))[batch.group]
    share = np.where(below, 1 - np.floor(rate * m + 1e-9) / np.maximum(m, 1), 1.0)
    weight = np.where(below, 1 / (1 - rate), 1.0)
    variance = weight**2 * share * (1 - share)
    pairs = (batch.group[:, None] == batch.group) & below & below[:, None]
    covariance = np.where(pairs, -variance / np.maximum(m - 1, 1), 0.0)
    np.fill_diagonal(covariance, variance)
    return Weights(weight * share, covariance, np.where(batch.informative, share, 0.0))


def _certain(pi: Array, weight: Array) -> Weights:
    return Weights(weight, np.zeros((pi.size, pi.size)), pi)
