"""Micro-batches of alike cost at a given number of them: what one rank runs, and what all ranks run side by side.

Ranks that work on one gradient meet at every micro-step (FSDP gathers parameters there), so that a step takes the sum
over micro-steps of the costliest micro-batch among the ranks. Bins are therefore filled towards a profile that all
ranks share: level where rows allow it, higher at the micro-steps where some rank has a row that no other can match.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verl_dppo.packing.bins import pack

Array = NDArray[np.float64]
Index = NDArray[np.int64]

ROUNDS = 3
"""How often the shared profile is taken anew from the bins that it led to."""


def common_micro_batches(
    length: Sequence[Index], cost: Sequence[Array], capacity: int | None, multiple: int = 1, window: int | None = None
) -> list[list[Index]]:
    """Cut the rows of every rank into the same number of micro-batches, alike in cost at each micro-step.

    Args:
        length: for each rank (rows,) tokens, none above `capacity`; every rank has enough rows for the number that
            `micro_batches_needed` tells.
        cost: for each rank (rows,) cost of each row, in any unit.
        capacity: largest number of tokens of a micro-batch, never exceeded; None: all rows of a rank are one.
        multiple: their number is a multiple of this.
        window: of `pack`, which decides how many are needed.

    Returns:
        For each rank its micro-batches in the order in which they run, each an array of positions, none of them empty.
        Small micro-batches stand at both ends, where a pipeline fills and drains.
    """
    if capacity is None:
        return [[np.arange(rows.size)] for rows in length]
    packed = [pack(rows, capacity, window) for rows in length]
    count = _rounded_up(max(map(len, packed)), multiple)
    bins = [_split(fallback, c, count) for fallback, c in zip(packed, cost, strict=True)]
    best = _by_cost(bins, cost)
    target = np.full(count, max(float(c.sum()) for c in cost) / count)
    for _ in range(ROUNDS):
        bins = [
            _filled(rows, c, capacity, target) or given
            for rows, c, given in zip(length, cost, _by_cost(bins, cost), strict=True)
        ]
        found = _by_cost(bins, cost)
        if _makespan(found, cost) < _makespan(best, cost):
            best = found
        profile = _profile(found, cost)
        if np.allclose(profile, target, rtol=1e-6):
            break
        target = profile
    order = _ends_small(count)
    return [[rank[step] for step in order] for rank in best]


def micro_batches_needed(
    length: Sequence[Index], capacity: int | None, multiple: int = 1, window: int | None = None
) -> int:
    """Return how many micro-batches the rank that needs most of them has, rounded up to the multiple."""
    if capacity is None:
        return 1
    return _rounded_up(max(len(pack(rows, capacity, window)) for rows in length), multiple)


def packed_micro_batches(
    length: Sequence[Index], capacity: int | None, multiple: int = 1, window: int | None = None
) -> list[list[Index]]:
    """Return the bins of `pack` for every rank, split where other ranks have more: no cost is looked at."""
    if capacity is None:
        return [[np.arange(rows.size)] for rows in length]
    packed = [pack(rows, capacity, window) for rows in length]
    count = _rounded_up(max(map(len, packed)), multiple)
    return [_split(bins, rows.astype(np.float64), count) for bins, rows in zip(packed, length, strict=True)]


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _split(bins: list[Index], cost: Array, count: int) -> list[Index]:
    """Split the costliest bins that hold several rows until there are `count`."""
    if len(bins) < count > cost.size:
        raise ValueError(f"{cost.size} rows cannot fill {count} micro-batches")
    bins = list(bins)
    divisible = [(-float(cost[rows].sum()), k) for k, rows in enumerate(bins) if rows.size > 1]
    heapq.heapify(divisible)
    while len(bins) < count:
        _, k = heapq.heappop(divisible)
        rows = bins[k][np.argsort(-cost[bins[k]], kind="stable")]
        cut = 1 + int(np.searchsorted(np.cumsum(cost[rows])[:-1], cost[rows].sum() / 2))
        cut = min(cut, rows.size - 1)
        bins[k], rest = np.sort(rows[:cut]), np.sort(rows[cut:])
        bins.append(rest)
        for place in (k, len(bins) - 1):
            if bins[place].size > 1:
                heapq.heappush(divisible, (-float(cost[bins[place]].sum()), place))
    return bins


def _filled(length: Index, cost: Array, capacity: int, target: Array) -> list[Index] | None:
    """Place rows, costliest first, where most of the target is open and the tokens fit; None where a row fits nowhere.

    Bin k of the answer is the one for `target[k]`. No bin is left empty: the last rows go where none is yet.
    """
    open_bins = [(-float(t), k) for k, t in enumerate(target)]
    heapq.heapify(open_bins)
    tokens = [0] * target.size
    rows: list[list[int]] = [[] for _ in target]
    order = np.lexsort((-length, -cost)).tolist()
    lengths, costs = length.tolist(), cost.tolist()
    empty, fullest = target.size, capacity - min(lengths)
    for turn, row in enumerate(order):
        passed_over = []
        must_open = len(order) - turn == empty
        while open_bins:
            load, k = heapq.heappop(open_bins)
            if tokens[k] + lengths[row] <= capacity and not (must_open and rows[k]):
                break
            if tokens[k] <= fullest:  # no row fits into the others
                passed_over.append((load, k))
        else:
            return None
        empty -= not rows[k]
        tokens[k] += lengths[row]
        rows[k].append(row)
        heapq.heappush(open_bins, (load + costs[row], k))
        for bin_ in passed_over:
            heapq.heappush(open_bins, bin_)
    return [np.array(sorted(members), dtype=np.int64) for members in rows]


def _by_cost(bins: list[list[Index]], cost: Sequence[Array]) -> list[list[Index]]:
    """Order each rank's bins by cost, costliest first."""
    ordered = []
    for rank, c in zip(bins, cost, strict=True):
        loads = np.array([c[rows].sum() for rows in rank])
        ordered.append([rank[k] for k in np.argsort(-loads, kind="stable")])
    return ordered


def _profile(bins: list[list[Index]], cost: Sequence[Array]) -> Array:
    """Return (micro-steps,) the cost of the costliest rank at each."""
    loads = [[float(c[rows].sum()) for rows in rank] for rank, c in zip(bins, cost, strict=True)]
    return np.max(loads, axis=0)


def _makespan(bins: list[list[Index]], cost: Sequence[Array]) -> float:
    return float(_profile(bins, cost).sum())


def _ends_small(count: int) -> list[int]:
    """Return an order of bins sorted by falling cost that puts the small ones at both ends."""
    steps = list(range(count))
    return steps[::2][::-1] + steps[1::2]
