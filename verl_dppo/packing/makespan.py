"""How close to even a partition can be at best: lower bounds of the makespan, the cost of the costliest part.

Each bound holds on its own, so that the largest of them does. With equal counts a part has at least
m = floor(n / parts) rows, and whatever rows are known to share a part have the cheapest rows for company at best.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

LARGEST_EXACT_INTEGER = 2.0**53
ROUNDING = 1e-12


def makespan_lower_bound(cost: ArrayLike, parts: int, equal_count: bool = True) -> float:
    """Return a cost that the costliest part has at least, however the rows are dealt.

    The largest of: the mean over parts; what rows must share a part by the pigeonhole principle (alone, the largest
    row with the m - 1 cheapest; two, the parts-th and the next largest with the m - 2 cheapest; and so on); with equal
    counts also the mean of the i parts that hold the i largest rows, which is what counts where several rows dwarf the
    others. Of costs that are integers it is rounded up to a multiple of their greatest common divisor.

    Args:
        cost: (n,) cost of each row, finite and not negative, in any unit.
        parts: number of parts.
        equal_count: whether counts of rows differ by at most 1 between parts; free counts have weaker bounds.

    Returns:
        The bound, in the unit of `cost`.

    Raises:
        ValueError: as for `balance`.
    """
    values = -np.sort(-check_cost(cost, parts))
    return float(values[0]) * relative_lower_bound(values, parts, equal_count)


def check_cost(cost: ArrayLike, parts: int) -> Array:
    """Return the costs as an array if they can be dealt to that many parts."""
    values = np.asarray(cost, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"cost must have the shape (n,) with n >= 1, got {values.shape}")
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        raise ValueError(f"cost must be finite and >= 0, got {values[bad][:3]}")
    if isinstance(parts, bool) or not isinstance(parts, int | np.integer) or parts < 1:
        raise ValueError(f"parts must be an integer >= 1, got {parts!r}")
    return values


def relative_lower_bound(descending: Array, parts: int, equal_count: bool) -> float:
    """Return the bound over the largest cost, for costs in descending order."""
    scale = float(descending[0])
    if scale == 0:
        return 0.0
    values = descending / scale
    least = values.size // parts if equal_count else 0
    cheapest = np.concatenate([[0.0], np.cumsum(values[::-1])])
    bound = max(float(cheapest[-1]) / parts, _shared(values, parts, least, cheapest))
    if least:
        bound = max(bound, _apart(values, parts, least, cheapest))
    step = _common_divisor(descending) / scale
    return float(np.ceil(bound / step * (1 - ROUNDING))) * step if step else bound


def _shared(values: Array, parts: int, least: int, cheapest: Array) -> float:
    """Of the j * parts + 1 largest rows j + 1 share a part, whose cost is at least that of the last j + 1 of them."""
    j = np.arange((values.size - 1) // parts + 1)
    largest = np.concatenate([[0.0], np.cumsum(values)])
    together = largest[j * parts + 1] - largest[j * parts - j]
    return float((together + cheapest[np.maximum(least - j - 1, 0)]).max())


def _apart(values: Array, parts: int, least: int, cheapest: Array) -> float:
    """The i largest rows lie in i parts, with the cheapest for company, and so cost their mean at least.

    Fewer parts can hold them and cost less only where the rows that fill up the others cost more than that; then the
    mean over all parts is the larger bound.
    """
    i = np.arange(1, parts + 1)
    return float(((np.cumsum(values[:parts]) + cheapest[i * (least - 1)]) / i).max())


def _common_divisor(values: Array) -> float:
    """Return the greatest common divisor of integers, 0 where some cost is none or too large to be told from one."""
    if values[0] > LARGEST_EXACT_INTEGER or (values != np.floor(values)).any():
        return 0.0
    return float(np.gcd.reduce(values.astype(np.int64)))
