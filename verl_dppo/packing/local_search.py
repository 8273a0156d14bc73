"""Local search for the makespan: descents through ever larger neighbourhoods, and detours out of where they end."""

import numpy as np
from numpy.typing import NDArray

from verl_dppo.packing.exchange import Move, Parts, subset_columns

Array = NDArray[np.float64]
Index = NDArray[np.int64]

LARGEST_SUBSET = 4
MOST_SUMS = 32768
"""Sums looked at in one pass over all pairs, some milliseconds."""
WORK = 300_000
WORK_PER_ROW = 100
WORK_OF_A_PASS = 2000
"""The end is counted in sums, so that it comes at the same place on every machine. A pass has a cost of its own."""
SIDEWAYS = (0.2, 0.9, 0.1, 0.7, 0.3, 0.8)


def lower_makespan(rows: Index, values: Array, keep_counts: bool, target: float) -> Index:
    """Exchange rows until the costliest part costs at most `target`, or a fixed amount of work is done.

    A descent tries exchanges of one row first, between all parts above the target and those below, then from the
    costliest part alone to every other one; then of two rows, and so on. Where none is left, a detour changes parts
    at the cost of others, and another descent follows.

    Args:
        rows: (parts, width) as for `Parts`; changed in place.
        values: (n + 1,) as for `Parts`, the largest 1.
        keep_counts: as for `Parts`.
        target: makespan that is good enough.

    Returns:
        (parts, width) the best rows met.
    """
    parts, width = Parts(rows, values, keep_counts), rows.shape[1]
    passes = [(k, alone) for k in range(1, LARGEST_SUBSET + 1) if k <= max(1, width // 2) for alone in (False, True)]
    work, best, best_rows = WORK + WORK_PER_ROW * values.size, np.inf, rows
    stage = detours = 0
    frozen = -1
    while True:
        load = parts.load()
        if load.max() < best:
            best, best_rows = float(load.max()), parts.rows.copy()
        if best <= target or work <= 0:
            return best_rows
        order = np.argsort(-load, kind="stable")
        searched = order[order != frozen]
        if stage < len(passes) and load[searched[0]] > target:
            move = _descent(load, searched, *passes[stage], target, width)
            stage += 1
        else:
            size = 1 + detours % passes[-1][0]
            move = (_overshoot if detours % 2 else _sideways)(load, order, size, detours, target, width)
            frozen = int(order[0]) if detours % 2 else -1
            stage, detours = 0, detours + 1
        work -= WORK_OF_A_PASS + move.high.size * len(subset_columns(width, move.size))
        if parts.exchange(move):
            stage = 0


def _descent(load: Array, order: Index, size: int, alone: bool, target: float, width: int) -> Move:
    """Make pairs of parts above the target with others more even."""
    above = int((load[order] > target).sum())
    high, low = _pairs(order, 1 if alone else above, size, width)
    gap = load[high] - load[low]
    return Move(high, low, size, gap / 2, np.zeros_like(gap), gap)


def _sideways(load: Array, order: Index, size: int, turn: int, target: float, width: int) -> Move:
    """Let pairs of parts come out about as uneven as they are, of other rows."""
    high, low = _pairs(order, order.size // 2, size, width)
    low = np.roll(low, turn)
    gap = np.maximum(load[high] - load[low], 0)
    return Move(high, low, size, gap * SIDEWAYS[turn // 2 % len(SIDEWAYS)], np.zeros_like(gap), gap)


def _overshoot(load: Array, order: Index, size: int, turn: int, target: float, width: int) -> Move:
    """Bring the costliest part under the target, whatever the part that takes its rows costs then.

    Until the next detour it is left as it is, so that the others share what it gave. This is the way out where the
    rows beside a very large one can only be much too cheap or a little too costly.
    """
    high, low = _pairs(order, 1, size, width)
    low = np.roll(low, -(turn // 2))[: -(-low.size // 2)]
    high = high[: low.size]
    excess = np.maximum(load[high] - target, 0)
    return Move(high, low, size, excess, excess, np.full(low.size, np.inf))


def _pairs(order: Index, fuller: int, size: int, width: int) -> tuple[Index, Index]:
    """Pair the given number of fuller parts with the others, the fullest with the emptiest, each other part once.

    Where there are more pairs than one pass is to look at, the last are left out.
    """
    fuller = max(1, min(fuller, order.size // 2))
    low = order[fuller:][::-1][: max(1, MOST_SUMS // len(subset_columns(width, size)))]
    return order[np.arange(low.size) % fuller], low
