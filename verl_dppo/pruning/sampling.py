"""From inclusion probabilities to a sample: who is kept this time.

Every design here includes completion i with probability pi_i; they differ in which completions are kept together. The
fixed-size designs walk pi to a corner of the unit cube by steps that leave its expectation alone: in the pivotal
design two neighbours trade probability, in the cube design a few neighbours do so that balanced totals stand still.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.pruning.cube import balanced_sample
from verl_dppo.pruning.pivotal import pivotal_sample

Array = NDArray[np.float64]
Index = NDArray[np.int64]

DESIGNS = ("pivotal", "poisson", "cube")


def draw(
    pi: ArrayLike,
    rng: np.random.Generator,
    design: str = "pivotal",
    order: ArrayLike | None = None,
    balance: ArrayLike | None = None,
) -> NDArray[np.bool_]:
    """Draw a sample in which completion i is kept with probability pi_i exactly.

    Args:
        pi: (n,) inclusion probabilities in [0, 1]. Completions at 1 are always kept, those at 0 never.
        rng: the generator that decides.
        design: `pivotal` (Deville and Tille 1998, ordered): neighbours in `order` compete for a place, so that the
            sample spreads over the order. `cube` (Deville and Tille 2004): neighbours in `order` trade probability so
            that the Horvitz-Thompson totals of `balance` stay what they are in the population, until a handful is
            left. Both keep floor(sum(pi)) or ceil(sum(pi)) completions; a sum within 1e-9 of an integer is that
            integer. `poisson`: independent, so that the size is random.
        order: (n,) permutation of the completions; neighbours should be alike. None means as given.
        balance: (n, k) balancing variables x of the cube design, the most important first: the sum of x_i / pi_i over
            what is kept comes close to the sum of x_i over all. The last ones are given up first at the end. pi itself
            is always balanced, and None balances nothing else.

    Returns:
        (n,) bool with E[kept] = pi.

    Raises:
        ValueError: a probability outside [0, 1], an unknown design, an order that is not a permutation, or balancing
            variables that are not finite, not of shape (n, k), or given to another design than `cube`.
    """
    probabilities = np.asarray(pi, dtype=np.float64)
    if probabilities.ndim != 1:
        raise ValueError(f"pi has shape {probabilities.shape}, expected (n,)")
    outside = ~((probabilities >= 0) & (probabilities <= 1))
    if outside.any():
        raise ValueError(f"pi must be in [0, 1], got {probabilities[outside][:3]}")
    if design not in DESIGNS:
        raise ValueError(f"design={design!r} is unknown; use one of {DESIGNS}")
    if balance is not None and design != "cube":
        raise ValueError(f"balance needs design='cube', got design={design!r}, which would ignore it")
    sequence = _permutation(order, probabilities.size)
    variables = _balancing_variables(balance, probabilities.size)
    if design == "poisson":
        return rng.random(probabilities.size) < probabilities
    kept = probabilities >= 1
    contenders = sequence[(probabilities[sequence] > 0) & ~kept[sequence]]
    if contenders.size == 0:
        return kept
    if design == "pivotal":
        winners = pivotal_sample(probabilities[contenders], rng)
    else:
        winners = balanced_sample(probabilities[contenders], variables[contenders], rng)
    kept[contenders[winners]] = True
    return kept


def _permutation(order: ArrayLike | None, n: int) -> Index:
    if order is None:
        return np.arange(n)
    sequence = np.asarray(order)
    if not np.array_equal(np.sort(sequence, axis=None), np.arange(n)) or sequence.ndim != 1:
        raise ValueError(f"order must be a permutation of range({n}), got shape {sequence.shape}")
    return sequence.astype(np.int64)


def _balancing_variables(balance: ArrayLike | None, n: int) -> Array:
    if balance is None:
        return np.zeros((n, 0))
    variables = np.asarray(balance, dtype=np.float64)
    if variables.ndim != 2 or variables.shape[0] != n:
        raise ValueError(f"balance has shape {variables.shape}, expected ({n}, k)")
    if not np.isfinite(variables).all():
        raise ValueError(f"balance must be finite, got {variables[~np.isfinite(variables)][:3]}")
    return variables
