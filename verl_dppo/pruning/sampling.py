"""From inclusion probabilities to a sample: who is kept this time."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

DESIGNS = ("pivotal", "poisson")
# What rounding may leave of a sum of probabilities that is an integer: it must not cost a completion its place.
ROUNDING = 1e-9


def draw(
    pi: ArrayLike, rng: np.random.Generator, design: str = "pivotal", order: ArrayLike | None = None
) -> NDArray[np.bool_]:
    """Draw a sample in which completion i is kept with probability pi_i exactly.

    Args:
        pi: (n,) inclusion probabilities in [0, 1].
        rng: the generator that decides.
        design: `pivotal` (Deville and Tille 1998, ordered): neighbours in `order` compete for a place, so that the
            sample spreads over the order and its size is sum(pi) where that is an integer. `poisson`: independent.
        order: (n,) permutation of the completions; neighbours should be alike. None means as given.

    Returns:
        (n,) bool with E[kept] = pi.

    Raises:
        ValueError: a probability outside [0, 1], an unknown design, or an order that is not a permutation.
    """
    probabilities = np.asarray(pi, dtype=np.float64)
    if probabilities.ndim != 1 or not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise ValueError(f"pi must be a vector in [0, 1], got shape {probabilities.shape}")
    if design == "poisson":
        return rng.random(probabilities.size) < probabilities
    if design != "pivotal":
        raise ValueError(f"design={design!r} is unknown; use one of {DESIGNS}")
    sequence = np.arange(probabilities.size) if order is None else np.asarray(order)
    if not np.array_equal(np.sort(sequence), np.arange(probabilities.size)):
        raise ValueError(f"order must be a permutation of range({probabilities.size})")
    kept = np.zeros(probabilities.size, dtype=bool)
    kept[sequence] = _ordered_pivotal(probabilities[sequence], rng)
    return kept


def _ordered_pivotal(pi: Array, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Let each element fight the survivor of those before it, for a place in the sample or for what is left of one."""
    kept = pi >= 1
    contenders = np.flatnonzero((pi > 0) & ~kept)
    if contenders.size == 0:
        return kept
    chance = rng.random(contenders.size)
    champion, a = contenders[0], pi[contenders[0]]
    for challenger, luck in zip(contenders[1:], chance[1:], strict=True):
        b = pi[challenger]
        total = a + b
        if total < 1 - ROUNDING:  # one of the two is excluded, the other carries the sum
            if luck * total >= a:
                champion = challenger
            a = total
        elif total <= 1 + ROUNDING:  # one is kept and the other excluded: the fight starts anew
            kept[champion if luck * total < a else challenger] = True
            champion, a = challenger, 0.0
        else:  # one is kept, the other carries what exceeds 1
            if luck * (2 - total) < 1 - b:
                kept[champion] = True
                champion = challenger
            else:
                kept[challenger] = True
            a = total - 1
    if a > ROUNDING:
        kept[champion] = a >= 1 - ROUNDING or chance[0] < a
    return kept
