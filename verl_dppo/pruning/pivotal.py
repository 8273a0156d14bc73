"""The ordered pivotal design (Deville and Tille 1998): a sample of fixed size that spreads over an order."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# What rounding may leave of a sum of probabilities that is an integer: it must not cost a completion its place.
ROUNDING = 1e-9


def certain_if_rounded(probability: float) -> float:
    """Return 0 or 1 in place of what is so but for rounding."""
    nearest = round(probability)
    return nearest if abs(probability - nearest) <= ROUNDING else probability


def _running_sum(pi: Array) -> tuple[Array, Array]:
    """Return whole and fractional part of the running sum, the fraction exact to the last places whatever n is.

    The leading bits of the terms add up without rounding, and what they leave is too small to round visibly.
    """
    leading = np.floor(pi * 2.0**26) / 2.0**26
    exact = np.cumsum(leading)
    whole = np.floor(exact)
    fraction = (exact - whole) + np.cumsum(pi - leading)
    carry = np.floor(fraction)
    return whole + carry, fraction - carry


def pivotal_sample(pi: Array, rng: np.random.Generator) -> Index:
    """Return the indices of a sample of fixed size: each element fights the survivor of those before it for a place.

    In a fight of a and b, a + b < 1 excludes one of the two, and the other carries a + b on; else one is kept, and the
    other carries a + b - 1 on. What is carried is the fraction of the running sum, whoever won: the chances of all
    fights are known beforehand, and the champion at any time is the last element that won the right to carry.

    Args:
        pi: (m,) in (0, 1), at least one; neighbours compete.
        rng: decides the fights.
    """
    whole, fraction = _running_sum(pi)
    carried = np.concatenate([[0.0], fraction[:-1]])
    fills_a_place = np.diff(whole, prepend=0.0) > 0
    total = carried + pi
    champion_gets_it = np.where(fills_a_place, (1 - pi) / (2 - total), carried / total)
    # The first element meets nobody; its random number decides at the end whether the last champion is kept.
    champion_gets_it[0] = certain_if_rounded(fraction[-1])
    got_it = rng.random(pi.size) < champion_gets_it
    carries = got_it == fills_a_place
    carries[0] = True
    element = np.arange(pi.size)
    champion = np.maximum.accumulate(np.where(carries, element, 0))
    places = np.flatnonzero(fills_a_place)
    winners = np.where(carries[places], champion[places - 1], places)
    return np.append(winners, champion[-1]) if got_it[0] else winners
