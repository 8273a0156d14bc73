"""Dense Prompt Packing: whole sequences into as few bins as they go, no bin above the token cap.

Only the oldest sequences, a window of them, are looked at, and the oldest of all opens the next bin: none starves.
Where the whole step is at hand there is nothing to wait for, and the largest may open each bin, which is first-fit
decreasing: best where many rows are above half the cap. Where it misses the lower bound, bins that start from the
oldest are tried as well, and the fewer win.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.packing.filling import largest_first, oldest_first

Index = NDArray[np.int64]

LARGEST = 2**40
"""Largest cap: sums over a step stay exact."""
SPARE = 0.02
"""Share of the cap that may stay empty before a window is searched for a tighter pair."""
SPARE_OF_ALL = 0.01
"""The same for the whole step, where first-fit decreasing stands by if small rows were used up too soon."""
CLOSE = 1000
"""One bin over the lower bound, or one in so many, is close enough not to try again."""


def pack(
    length: ArrayLike, capacity: int, window: int | None = None, ids: Sequence[object] | None = None
) -> list[Index]:
    """Return the rows of each bin, in arrival order; bins are ordered by their oldest row, and none is empty.

    Equal lengths are taken oldest first. The answer depends on nothing but the arguments.

    Args:
        length: (n,) int >= 1, tokens of each row in order of arrival.
        capacity: largest number of tokens of a bin, never exceeded.
        window: how many rows, the oldest, are looked at together; as one is taken, the next comes in. None, or n and
            more: the whole step.
        ids: (n,) names of the rows, for the error message.

    Raises:
        ValueError: a row above the cap, with its length, its name and the cap; no rows; lengths that are not whole
            numbers >= 1; a capacity or a window that is not an integer >= 1.
    """
    length, capacity = check_lengths(length, capacity, ids), check_count("capacity", capacity)
    window = length.size if window is None else check_count("window", window)
    if window < length.size:
        return _bins(oldest_first(length, capacity, window, SPARE * capacity))
    bin_of, bound = largest_first(length, capacity), bins_lower_bound(length, capacity)
    if max(bin_of) >= bound + max(1, bound // CLOSE):
        bin_of = min(bin_of, oldest_first(length, capacity, length.size, SPARE_OF_ALL * capacity), key=max)
    return _bins(bin_of)


def bins_lower_bound(length: ArrayLike, capacity: int) -> int:
    """Return L2 of Martello and Toth: no packing has fewer bins.

    Rows above half the cap need a bin each. Beside one of C - a or less there is room for rows of a or more, and what
    of these exceeds that room needs bins of its own; rows above C - a count as full. L2 is the best over all a.

    Args and errors are those of `pack`.
    """
    length, capacity = check_lengths(length, capacity), check_count("capacity", capacity)
    size = np.sort(length)[::-1]
    total = np.concatenate([[0], np.cumsum(size)])
    halves = int(np.count_nonzero(2 * size > capacity))
    smallest = np.concatenate([size[halves:], [0]])
    full = np.minimum(np.searchsorted(-size, smallest - capacity, "left"), halves)
    end = np.searchsorted(-size, -smallest, "right")
    room = (halves - full) * capacity - (total[halves] - total[full])
    overflow = total[np.maximum(end, halves)] - total[halves] - room
    return halves + int(np.maximum(0, -(-overflow // capacity)).max())


def check_lengths(length: ArrayLike, capacity: int, ids: Sequence[object] | None = None) -> Index:
    """Return the lengths as (n,) int64 if they are >= 1 and fit under the cap; errors as in `pack`."""
    capacity, given = check_count("capacity", capacity), np.asarray(length)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iuf":
        raise ValueError(f"length must be (n,) whole numbers, n >= 1, got shape {given.shape} of {given.dtype}")
    if ids is not None and len(ids) != given.size:
        raise ValueError(f"ids must name each of the {given.size} rows, got {len(ids)}")
    bad = ~np.isfinite(given) | (given < 1) | (given != np.floor(given))
    if bad.any():
        raise ValueError(f"length must be whole numbers >= 1, got {given[bad][0]} for {_name(int(bad.argmax()), ids)}")
    worst = int(given.argmax())
    if given[worst] > capacity:
        raise ValueError(
            f"{_name(worst, ids)} has {int(given[worst])} tokens, which is above the cap of {capacity} tokens"
        )
    return given.astype(np.int64)


def check_count(name: str, value: int) -> int:
    """Return the value if it is an integer from 1 to LARGEST.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= LARGEST:
        raise ValueError(f"{name} must be an integer from 1 to {LARGEST}, got {value!r}")
    return int(value)


def _name(row: int, ids: Sequence[object] | None) -> str:
    return f"row {row}" if ids is None else f"row {row}, id {ids[row]!r},"


def _bins(bin_of: list[int]) -> list[Index]:
    """Return the rows of each bin, in order; bins are ordered by their first row."""
    number = np.array(bin_of)
    rows = np.argsort(number, kind="stable")
    end = np.cumsum(np.bincount(number))
    start = np.concatenate([[0], end[:-1]])
    return [rows[start[k] : end[k]] for k in np.argsort(rows[start]).tolist()]
