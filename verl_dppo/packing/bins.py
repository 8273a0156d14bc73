"""Dense Prompt Packing: whole sequences into as few bins as they go, no bin above the token cap.

Each bin takes a first sequence and then, again and again, the largest that still fits. With a window only the oldest
sequences wait at any time, and the oldest of all opens the next bin: none starves. Where the whole step is at hand
there is nothing to wait for, the largest opens the next bin, and what comes out is first-fit decreasing.
"""

from bisect import bisect_right, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Index = NDArray[np.int64]


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
            numbers >= 1; a capacity or a window below 1.
    """
    length = check_lengths(length, capacity, ids)
    if window is None:
        return _in_order(_largest_first(length, capacity))
    window = _at_least_one("window", window)
    return _in_order(
        _largest_first(length, capacity) if window >= length.size else _oldest_first(length, capacity, window)
    )


def bins_lower_bound(length: ArrayLike, capacity: int) -> int:
    """Return L2 of Martello and Toth: no packing has fewer bins.

    Rows above half the cap need a bin each. Beside one of C - a or less there is room for rows of a or more, and what
    of these exceeds that room needs bins of its own; rows above C - a count as full. L2 is the best over all a.

    Args and errors are those of `pack`.
    """
    length = check_lengths(length, capacity)
    size = np.sort(length)[::-1]
    total = np.concatenate([[0], np.cumsum(size)])
    halves = int(np.count_nonzero(2 * size > capacity))
    smallest = np.concatenate([[0], np.unique(size[halves:])])
    full = np.minimum(np.searchsorted(-size, smallest - capacity, "left"), halves)
    end = np.searchsorted(-size, -smallest, "right")
    room = (halves - full) * capacity - (total[halves] - total[full])
    overflow = total[np.maximum(end, halves)] - total[halves] - room
    return halves + int(np.maximum(0, -(-overflow // capacity)).max())


def check_lengths(length: ArrayLike, capacity: int, ids: Sequence[object] | None = None) -> Index:
    """Return the lengths as (n,) int64 if they are >= 1 and fit under the cap; errors as in `pack`."""
    capacity, given = _at_least_one("capacity", capacity), np.asarray(length)
    if given.ndim != 1 or given.size == 0 or given.dtype.kind not in "iuf":
        raise ValueError(f"length must be (n,) whole numbers, n >= 1, got shape {given.shape} of {given.dtype}")
    if ids is not None and len(ids) != given.size:
        raise ValueError(f"ids must name each of the {given.size} rows, got {len(ids)}")
    bad = ~(given >= 1) | (given % 1 != 0)
    if bad.any():
        raise ValueError(f"length must be whole numbers >= 1, got {given[bad][0]} for {_name(int(bad.argmax()), ids)}")
    worst = int(given.argmax())
    if given[worst] > capacity:
        raise ValueError(
            f"{_name(worst, ids)} has {int(given[worst])} tokens, which is above the cap of {capacity} tokens"
        )
    return given.astype(np.int64)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    return int(value)


def _name(row: int, ids: Sequence[object] | None) -> str:
    return f"row {row}" if ids is None else f"row {row}, id {ids[row]!r},"


def _largest_first(length: Index, capacity: int) -> list[list[int]]:
    """Fill bin after bin from all rows, each from the largest that is left."""
    order = np.lexsort((-np.arange(length.size), length))
    waiting, rows = length[order].tolist(), order.tolist()
    bins = []
    while waiting:
        room, members, end = capacity, [], len(waiting)
        while end:
            room -= waiting.pop(end - 1)
            members.append(rows.pop(end - 1))
            end = bisect_right(waiting, room, 0, end - 1)
        bins.append(members)
    return bins


def _oldest_first(length: Index, capacity: int, window: int) -> list[list[int]]:
    """Fill bin after bin from the `window` oldest rows, each from the oldest."""
    n = length.size
    # One integer sorts by size and, among equals, the older behind: size = ceil(key / n), row = size * n - key.
    arrivals = [size * n - row for row, size in enumerate(length.tolist())]
    waiting, came, oldest = sorted(arrivals[:window]), window, 0
    taken = bytearray(n)
    bins = []
    while waiting:
        oldest = taken.find(0, oldest)
        room, members, place = capacity * n, [], bisect_right(waiting, arrivals[oldest])
        while place:
            key = waiting.pop(place - 1)
            row = -key % n
            room -= key + row
            members.append(row)
            taken[row] = 1
            if came < n:
                insort(waiting, arrivals[came])
                came += 1
            place = bisect_right(waiting, room)
        bins.append(members)
    return bins


def _in_order(bins: list[list[int]]) -> list[Index]:
    return [np.array(members, dtype=np.int64) for members in sorted(sorted(members) for members in bins)]
