"""How the norm of a completion's score function follows from what the driver knows, fitted to norms that were measured.

The fit only ever sees earlier steps. The probabilities of a step are then a function of its past and its rollouts, so
that the weights 1/pi stay exact; a poor fit costs variance, never bias.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Weight of the prior against measured norms, in variances of a feature: about so many norms move a coefficient half of
# the way to what they say. A prior of 16 gains about 1 % of variance more on average, and loses up to 20 % where a
# policy is unlike the others, 64 up to 12 %.
PRIOR_STRENGTH = 64.0
SURPRISE_RANGE = (0.0, 2.5)
LENGTH_RANGE = (-1.0, 1.0)


@dataclass(frozen=True)
class NormModel:
    """log ||s|| = surprise * log u + length * log(response tokens) + prompt * log(prompt tokens) + constant, with
    u = sqrt(sum_t (1 - p_t)^2)."""

    surprise: float = 1.25
    """Power of u. Token scores that were martingale differences of norm 1 - p_t would give 1; 1.25 is measured."""

    length: float = 0.0
    """Power of the number of response tokens."""

    prompt: float = 0.0
    """Power of the number of prompt tokens."""

    def norm(self, sum_sq_one_minus_p: Array, length: Array, prompt_length: Array) -> Array:
        """Return (n,) norms up to a common factor, for (n,) u^2 > 0 and (n,) tokens of response and of prompt > 0."""
        return sum_sq_one_minus_p ** (self.surprise / 2) * length**self.length * prompt_length**self.prompt


def fit_norm_model(
    sum_sq_one_minus_p: ArrayLike,
    length: ArrayLike,
    prompt_length: ArrayLike,
    norm: ArrayLike,
    step: ArrayLike,
    prior: NormModel | None = None,
) -> NormModel:
    """Fit the powers by ridge regression towards the prior.

    Each step has a constant of its own, because the scale of gradients drifts while a policy is trained.

    Args:
        sum_sq_one_minus_p: (k,) u^2 of each measured completion, > 0.
        length: (k,) its response tokens, > 0.
        prompt_length: (k,) its prompt tokens, > 0.
        norm: (k,) its measured norm, divided by |A| and by the factor of the aggregation mode, > 0.
        step: (k,) the step in which it was measured.
        prior: what to believe without measurements.

    Returns:
        The model, its powers held in SURPRISE_RANGE, and in LENGTH_RANGE for both lengths.

    Raises:
        ValueError: values that are not positive and finite, or shapes that differ.
    """
    start = NormModel() if prior is None else prior
    columns = [np.asarray(values, dtype=np.float64) for values in (sum_sq_one_minus_p, length, prompt_length, norm)]
    steps = np.asarray(step)
    if any(column.ndim != 1 or column.shape != steps.shape for column in columns):
        raise ValueError(f"shapes differ: {[c.shape for c in columns]} and {steps.shape}")
    if not all((np.isfinite(column) & (column > 0)).all() for column in columns):
        raise ValueError("surprise, lengths and norm of a measured completion must be finite and > 0")
    if steps.size == 0:
        return start
    log_surprise, log_length, log_prompt, log_norm = (_centred(np.log(column), steps) for column in columns)
    features = np.column_stack([log_surprise / 2, log_length, log_prompt])
    believed = np.array([start.surprise, start.length, start.prompt])
    # In units of the features' own spread, so that the prior weighs the same for any spread of lengths.
    penalty = PRIOR_STRENGTH * np.maximum(features.var(0), 1e-4)
    moved = np.linalg.solve(features.T @ features + np.diag(penalty), features.T @ (log_norm - features @ believed))
    surprise, *powers = (believed + moved).tolist()
    response, prompt = np.clip(powers, *LENGTH_RANGE).tolist()
    return NormModel(float(np.clip(surprise, *SURPRISE_RANGE)), response, prompt)


def _centred(values: Array, step: NDArray) -> Array:
    _, index = np.unique(step, return_inverse=True)
    return values - (np.bincount(index, values) / np.bincount(index))[index]
