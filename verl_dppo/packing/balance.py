"""Deal rows to parts so that the costliest part costs as little as possible: makespan, at equal or free counts.

Rows are dealt longest processing time first, then exchanged between fuller and emptier parts until the makespan is
near a lower bound, or a fixed amount of work is done.
"""

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.packing.local_search import lower_makespan
from verl_dppo.packing.makespan import check_cost, makespan_lower_bound, relative_lower_bound

__all__ = ["balance", "makespan_lower_bound"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

CLOSE_ENOUGH = 2e-5
"""A makespan this much above the bound is not worth another exchange."""


def balance(cost: ArrayLike, parts: int, equal_count: bool = True) -> list[Index]:
    """Partition rows into parts of alike cost.

    The same costs give the same parts. In another order they give the same makespan, and in another unit too, up to
    rounding: where costs are equal but for rounding, other rows may be exchanged.

    Args:
        cost: (n,) cost of each row, finite and not negative, in any unit.
        parts: number of parts, which may be more than rows.
        equal_count: counts of rows differ by at most 1 between parts; else they are free, and may be 0.

    Returns:
        For each part the int64 indices of its rows, ascending. Each row is in one part.

    Raises:
        ValueError: costs of another shape, none at all, NaN, infinite or negative ones; parts that are no integer >= 1.
    """
    values = check_cost(cost, parts)
    order = np.argsort(-values, kind="stable")
    descending = values[order]
    target = relative_lower_bound(descending, parts, equal_count) * (1 + CLOSE_ENOUGH)
    descending = descending / (descending[0] or 1.0)
    dealt = _longest_first(descending.tolist(), int(parts), equal_count)
    rows = _matrix(dealt, descending.size, 0 if equal_count else 2)
    rows = lower_makespan(rows, np.append(descending, 0.0), equal_count, target)
    return [np.sort(order[line[line < values.size]]) for line in rows]


def _longest_first(values: list[float], parts: int, equal_count: bool) -> list[list[int]]:
    """Give each row, in descending order, to the emptiest part that has room for one."""
    least, longer = divmod(len(values), parts) if equal_count else (len(values), 0)
    dealt: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0.0, 0, part) for part in range(parts)]
    for row, value in enumerate(values):
        while heap[0][1] == least and not longer:
            heapq.heappop(heap)
        load, count, part = heap[0]
        dealt[part].append(row)
        if count < least:
            heapq.heapreplace(heap, (load + value, count + 1, part))
        else:
            longer -= 1
            heapq.heappop(heap)
    return dealt


def _matrix(dealt: list[list[int]], empty: int, spare: int) -> Index:
    """Return (parts, width) the rows of each part in ascending order, filled up with `empty`."""
    width = max(map(len, dealt)) + spare
    return np.array([rows + [empty] * (width - len(rows)) for rows in dealt], dtype=np.int64)
