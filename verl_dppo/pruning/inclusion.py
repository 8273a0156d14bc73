"""From scores to inclusion probabilities pi: who is kept, and how surely.

Whatever a rule computes here, the estimate stays unbiased as long as every completion with a gradient has pi > 0 and
its weight is 1/pi (Horvitz and Thompson 1952): a poor score costs variance, never bias.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.pruning.norm_model import NormModel

Array = NDArray[np.float64]

PER_TOKEN_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
PER_SEQUENCE_MODES = ("seq-mean-token-mean",)


def _vector(name: str, values: ArrayLike, size: int | None = None) -> Array:
    """Return `values` as a finite, non-negative float64 vector of the given size, or raise ValueError."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or (size is not None and vector.size != size):
        raise ValueError(f"{name} has shape {vector.shape}, expected ({'n' if size is None else size},)")
    if not np.isfinite(vector).all() or (vector < 0).any():
        raise ValueError(f"{name} must be finite and >= 0, got {vector[~(np.isfinite(vector) & (vector >= 0))][:3]}")
    return vector


def score_magnitude(
    advantage: ArrayLike,
    length: ArrayLike,
    sum_sq_one_minus_p: ArrayLike | None = None,
    loss_agg_mode: str = "token-mean",
    norm_model: NormModel | None = None,
    prompt_length: ArrayLike | None = None,
) -> Array:
    """Estimate the gradient norm of each completion up to a common factor: |A| * c * u^1.25.

    The token scores of an on-policy completion are martingale differences whose norm is close to 1 - p_t, so
    u = sqrt(sum_t (1 - p_t)^2) over its response tokens predicts the norm of its score function. c is the factor by
    which the aggregation mode scales the completion's tokens: 1, or 1/length where the loss averages over them.
    `token_factor` gives it.

    Args:
        advantage: (n,) advantage of each completion, from the statistics of its full group.
        length: (n,) response tokens.
        sum_sq_one_minus_p: (n,) sum over response tokens of (1 - p_t)^2 under the rollout policy, or None where the
            rollout reported no log-probabilities; then |A| * c is returned.
        loss_agg_mode: one of verl's `actor.loss_agg_mode`.
        norm_model: how the norm follows from u and the lengths; None means u^1.25.
        prompt_length: (n,) prompt tokens, for a norm model that uses them; None means that all are the same.

    Returns:
        (n,) float64, 0 where the advantage is 0 or the response is empty.

    Raises:
        ValueError: unknown mode, shapes that differ, or values that are not finite, the magnitudes among them.
    """
    tokens = _vector("length", length)
    size = np.abs(np.asarray(advantage, dtype=np.float64))
    magnitude = _vector("abs(advantage)", size, tokens.size) * token_factor(tokens, loss_agg_mode)
    if sum_sq_one_minus_p is not None:
        surprise = _vector("sum_sq_one_minus_p", sum_sq_one_minus_p, tokens.size)
        # A response that was certain at every token still gets a probability: zero surprise is a rounding, not a proof.
        smallest = np.min(surprise[surprise > 0], initial=np.inf)
        surprise = np.maximum(surprise, smallest if np.isfinite(smallest) else 1.0)
        model = NormModel() if norm_model is None else norm_model
        prompt = np.ones_like(tokens) if prompt_length is None else _vector("prompt_length", prompt_length, tokens.size)
        with np.errstate(over="ignore"):
            magnitude = magnitude * model.norm(surprise, np.maximum(tokens, 1.0), np.maximum(prompt, 1.0))
    # What underflows still has a gradient, and 0 would say that it has none.
    live = (tokens > 0) & (size > 0)
    return _vector("magnitude", np.where(live, np.maximum(magnitude, np.finfo(np.float64).tiny), 0.0))


def token_factor(length: Array, loss_agg_mode: str) -> Array:
    """Return (n,) c, by which the aggregation mode scales each token of a completion, up to a common constant.

    Raises:
        ValueError: unknown mode.
    """
    if loss_agg_mode in PER_SEQUENCE_MODES:
        return 1.0 / np.maximum(length, 1.0)
    if loss_agg_mode not in PER_TOKEN_MODES:
        raise ValueError(
            f"loss_agg_mode={loss_agg_mode!r} is unknown; use one of {(*PER_TOKEN_MODES, *PER_SEQUENCE_MODES)}"
        )
    return np.ones_like(length)


def threshold_inclusion(score: ArrayLike, group: ArrayLike, rate: float, rtol: float = 1e-4) -> Array:
    """Keep what scores at least its group's mean; keep the rest with probability 1 - rate (paper-like).

    Args:
        score: (n,) score of each completion, e.g. |A|.
        group: (n,) labels that can be sorted; completions of one prompt share one.
        rate: in [0, 1), the probability that a below-mean completion is dropped.
        rtol: a score counts as below the mean only if it is so by more than this fraction. Without it, when half of a
            group is right, every |A| equals the mean and float rounding decides.

    Returns:
        (n,) float64, 1 or 1 - rate.

    Raises:
        ValueError: rate outside [0, 1), or shapes that differ.
    """
    if not 0 <= rate < 1:
        raise ValueError(
            f"rate={rate} must be in [0, 1): at 1 a completion could never be kept and no weight repairs it"
        )
    scores = _vector("score", score)
    _, index = np.unique(np.asarray(group), return_inverse=True)
    if index.shape != scores.shape:
        raise ValueError(f"group has shape {index.shape}, expected {scores.shape}")
    mean = np.bincount(index, scores) / np.maximum(np.bincount(index), 1)
    return np.where(scores < mean[index] * (1 - rtol), 1.0 - rate, 1.0)


def _clipped(factor: float, slope: Array, floor: float) -> Array:
    return np.clip(factor * slope, floor, 1.0)


def _solve(slope: Array, cost: Array, budget: float, floor: float) -> Array:
    """Return pi = clip(lambda * slope, floor, 1) with sum(pi * cost) = budget, exact up to rounding.

    The spent cost is piecewise linear in lambda, with a bend where an element leaves the floor or reaches 1. The
    bends are sorted, the segment that holds the budget is found by bisection over them, and lambda follows on it in
    closed form.
    """
    bends = np.unique(np.concatenate([floor / slope, 1.0 / slope]))
    low, high = 0, bends.size - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if (_clipped(bends[middle], slope, floor) * cost).sum() <= budget else (low, middle)
    centre = 0.5 * (bends[low] + bends[high])
    free = (centre * slope > floor) & (centre * slope < 1.0)
    pi = _clipped(centre, slope, floor)
    weighted = (slope[free] * cost[free]).sum()
    if weighted > 0:
        factor = (budget - (pi[~free] * cost[~free]).sum()) / weighted
        pi[free] = np.clip(factor * slope[free], floor, 1.0)
    return pi


def neyman_inclusion(magnitude: ArrayLike, cost: ArrayLike, keep: float, floor: float | None = None) -> Array:
    """Spend a budget of cost so that the variance of the estimate is least: pi ~ magnitude / sqrt(cost).

    This is Neyman's allocation for the Horvitz-Thompson estimator, with every probability held in [floor, 1].

    Args:
        magnitude: (n,) estimated gradient norm; a completion with magnitude 0 has no gradient and gets pi = 0.
        cost: (n,) cost of keeping it, e.g. response tokens.
        keep: in (0, 1], the share of the cost of all completions with magnitude > 0 that is spent in expectation.
        floor: smallest pi of a completion with magnitude > 0, in (0, keep]; None means keep / 4, which bounds the
            weight by 4 / keep.

    Returns:
        (n,) float64 with sum(pi * cost) = keep * sum(cost where magnitude > 0).

    Raises:
        ValueError: a share outside its range, or values that are negative or not finite.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} must be in (0, 1]")
    lowest = keep / 4 if floor is None else floor
    if not 0 < lowest <= keep:
        raise ValueError(f"floor={lowest} must be in (0, keep={keep}]: the smallest feasible keep is the floor itself")
    norms = _vector("magnitude", magnitude)
    costs = _vector("cost", cost, norms.size)
    pi = np.zeros_like(norms)
    live = norms > 0
    if live.any():
        spent = np.maximum(costs[live], np.finfo(float).tiny)
        slope = _relative(norms[live] / np.sqrt(np.maximum(spent, 1e-12)))
        pi[live] = _solve(slope, spent, keep * spent.sum(), lowest)
    return pi


def _relative(slope: Array) -> Array:
    """Scale to a largest value of 1; what is lost to underflow is at the floor anyway."""
    return np.maximum(slope / slope.max(), 1e-100)


def fixed_size_inclusion(magnitude: ArrayLike, size: int, floor: float) -> Array:
    """Return pi ~ magnitude, held in [floor, 1], whose sum is exactly `size`: the input of a fixed-size draw.

    Where n completions at the floor are more than `size`, it gives way to half the mean probability, size / (2 n).

    Args:
        magnitude: (n,) > 0.
        size: number of completions that the draw keeps, in [0, n]; 0 only for n = 0.
        floor: smallest pi, in (0, 1].

    Raises:
        ValueError: a magnitude or floor of 0, or a size outside [1, n].
    """
    norms = _vector("magnitude", magnitude)
    if norms.size == 0 and size == 0:
        return norms
    if not 1 <= size <= norms.size or size != int(size):
        raise ValueError(
            f"size={size} must be an integer in [1, {norms.size}], the number of completions with a gradient"
        )
    if (norms == 0).any() or not 0 < floor <= 1:
        raise ValueError(f"every magnitude and the floor must be > 0, got {norms.min()} and {floor}")
    feasible = floor if floor * norms.size <= size else size / (2 * norms.size)
    return proportional_inclusion(norms, size, feasible)


def proportional_inclusion(slope: Array, total: float, floor: float) -> Array:
    """Return pi ~ slope, held in [floor, 1], with the given sum.

    Args:
        slope: (n,) > 0.
        total: the sum, in [floor * n, n], where n or more stands for all.
        floor: smallest pi, in (0, 1].
    """
    if total >= slope.size:
        return np.ones_like(slope)
    if total <= floor * slope.size:
        return np.full_like(slope, total / slope.size)
    return _solve(_relative(slope), np.ones_like(slope), float(total), floor)
