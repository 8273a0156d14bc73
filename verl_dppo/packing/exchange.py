"""Local search for the makespan: exchange rows between a fuller and an emptier part, many pairs of parts at a time.

Parts are the lines of a matrix of row numbers, filled up with a row that costs nothing: exchanging it is a move.
"""

from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

ROUNDING = 1e-12


@cache
def _subsets(width: int, size: int) -> Index:
    """Return (subsets, size) columns."""
    return np.array(list(combinations(range(width), size)), dtype=np.int64).reshape(-1, size)


def exchange(rows: Index, values: Array, high: Index, low: Index, size: int, keep_counts: bool) -> int:
    subsets = _subsets(rows.shape[1], size)
    gap = values[rows[high]].sum(axis=1) - values[rows[low]].sum(axis=1)
    give, take = values[rows[high]][:, subsets].sum(axis=2), values[rows[low]][:, subsets].sum(axis=2)
    if keep_counts:
        empty = values.size - 1
        both = (rows[high, -1] == empty) & (rows[low, -1] == empty)
        if both.any():
            last = (subsets == rows.shape[1] - 1).any(axis=1)
            pad = both[:, None] & last
            give[pad] = -1
            take[pad] = size + 0.5
    order = np.argsort(take, axis=1, kind="stable")
    take = np.take_along_axis(take, order, axis=1)
    line = np.arange(high.size)[:, None]
    stride = 2 * size + 1
    wanted = np.maximum(give - gap[:, None] / 2, -0.25)
    at = np.searchsorted((take + line * stride).ravel(), (wanted + line * stride).ravel()).reshape(give.shape)
    at -= line * take.shape[1]
    best_score = np.full(high.size, np.inf)
    best = np.zeros((2, high.size), dtype=np.int64)
    for near in (at - 1, at):
        near = np.clip(near, 0, take.shape[1] - 1)
        delta = give - np.take_along_axis(take, near, axis=1)
        score = np.abs(delta - gap[:, None] / 2)
        a = score.argmin(axis=1)
        s = score[line[:, 0], a]
        better = s < best_score
        best_score[better] = s[better]
        best[0, better] = a[better]
        best[1, better] = order[line[:, 0], near[line[:, 0], a]][better]
    found = np.flatnonzero(best_score < gap / 2 - ROUNDING)
    if found.size:
        h, l = high[found][:, None], low[found][:, None]
        a, b = subsets[best[0, found]], subsets[best[1, found]]
        rows[h, a], rows[l, b] = rows[l, b], rows[h, a]
        touched = np.concatenate([high[found], low[found]])
        rows[touched] = np.sort(rows[touched], axis=1)
    return found.size


def level(rows: Index, values: Array, target: float, keep_counts: bool, limit: int, trace=None) -> Index:
    parts, width = rows.shape
    half = parts // 2
    sizes = [s for s in (1, 2, 3, 4) if s <= max(1, width // 2) and _count(width, s) <= 600]
    size = idle = turn = 0
    best, best_rows = np.inf, rows.copy()
    for k in range(limit):
        load = values[rows].sum(axis=1)
        if load.max() < best:
            best, best_rows = load.max(), rows.copy()
        if trace is not None:
            trace.append((best, sizes[size]))
        if best <= target or half == 0:
            break
        order = np.argsort(-load, kind="stable")
        high, low = order[:half], np.roll(order[parts - half :][::-1], turn)
        if exchange(rows, values, high, low, sizes[size], keep_counts):
            idle = turn = size = 0
        else:
            idle += 1
            turn += 1
            if idle >= half:
                size, idle, turn = size + 1, 0, 0
                if size == len(sizes):
                    break
    return best_rows


def _count(n, k):
    from math import comb

    return comb(n, k)
