"""Local search for the makespan: exchanges in ever larger neighbourhoods, then detours, until a target or an end."""

import numpy as np
from numpy.typing import NDArray

from verl_dppo.packing.exchange import MOST_SUMS, Parts, subset_columns

Array = NDArray[np.float64]
Index = NDArray[np.int64]

LARGEST_SUBSET = 4
DETOURS = (0.8, 0.2, 0.9, 0.1, 0.7, 0.3)
"""Shares of the gap that a detour moves: parts come out as uneven as before, and made of other rows."""
WORK = 400_000
WORK_PER_ROW = 100
WORK_OF_A_PASS = 1000


def lower_makespan(rows: Index, values: Array, keep_counts: bool, target: float) -> Index:
    """Exchange rows until the costliest part costs at most `target`, or until a fixed amount of work is done.

    Args:
        rows: (parts, width), as for `Parts`; changed in place.
        values: (n + 1,), as for `Parts`.
        keep_counts: as for `Parts`.
        target: makespan that is good enough.

    Returns:
        (parts, width) the best rows found.
    """
    parts = Parts(rows, values, keep_counts)
    passes = [(size, alone) for size in range(1, LARGEST_SUBSET + 1) for alone in (False, True)]
    passes = passes[: 2 * max(1, rows.shape[1] // 2)]
    best, best_rows = np.inf, rows
    work = WORK + WORK_PER_ROW * values.size
    stage = detours = 0
    while True:
        load = parts.load()
        if load.max() < best:
            best, best_rows = float(load.max()), parts.rows.copy()
        if best <= target or work <= 0:
            return best_rows
        order = np.argsort(-load, kind="stable")
        if stage < len(passes):
            size, alone = passes[stage]
            high, low = _pairs(order, 1 if alone else int((load > target).sum()))
            share = 0.5
        else:
            size, share = 1 + detours % passes[-1][0], DETOURS[detours % len(DETOURS)]
            high, low = _pairs(order, order.size // 2)
            low = np.roll(low, detours)
            detours += 1
        subsets = len(subset_columns(rows.shape[1], size))
        fit = max(1, MOST_SUMS // subsets)
        work -= WORK_OF_A_PASS + min(fit, high.size) * subsets
        changed = parts.exchange(high[:fit], low[:fit], size, share)
        stage = 0 if changed or stage == len(passes) else stage + 1


def _pairs(order: Index, fuller: int) -> tuple[Index, Index]:
    """Pair the given number of fuller parts with the others, the fullest with the emptiest, each other part once."""
    fuller = min(fuller, order.size // 2)
    low = order[fuller:][::-1]
    return order[np.arange(low.size) % fuller], low
