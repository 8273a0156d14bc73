"""Dense Prompt Packing: whole sequences into as few bins as they go, no bin above the token cap.

Each bin takes a first sequence and then, again and again, the largest that still fits. Only the oldest sequences, a
window of them, wait at any time, and the oldest of all opens the next bin: none starves.

The largest that fits may leave room that nothing can use. Where that is more than SPARE of the cap, the last two places
of a bin go to a pair that fills it better, if one of a few is found: a pair of like sizes, which leaves the small rows
to those that have room for nothing else. Among log-normal lengths this saves most of what a plain greedy loses.

Where the whole step is at hand there is nothing to wait for, and the largest may open each bin, which is first-fit
decreasing. It is best where many rows are above half the cap; where it misses the lower bound, the oldest are tried
first too, and the fewer bins win.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Index = NDArray[np.int64]

SPARE = 0.01
"""Share of the cap that may stay empty before another pair is looked for."""
PAIRS = 4
"""How many are looked at."""
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
            numbers >= 1; a capacity or a window below 1.
    """
    length = check_lengths(length, capacity, ids)
    if window is not None and _at_least_one("window", window) < length.size:
        return _bins(_oldest_first(length, capacity, window))
    bin_of, bound = _largest_first(length, capacity), bins_lower_bound(length, capacity)
    if max(bin_of) >= bound + max(1, bound // CLOSE):
        bin_of = min(bin_of, _oldest_first(length, capacity, length.size), key=max)
    return _bins(bin_of)


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
    smallest = np.concatenate([size[halves:], [0]])
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


def _sorted(length: Index) -> tuple[list[int], list[int]]:
    """Return the sizes in rising order, and the row of each: among equals the oldest stands last."""
    rows = np.lexsort((-np.arange(length.size), length))
    return length[rows].tolist(), rows.tolist()


def _largest_first(length: Index, capacity: int) -> list[int]:
    """Return the bin of each row: all rows are looked at, and the largest opens each bin."""
    waiting, rows = _sorted(length)
    bin_of, number = [0] * len(rows), 0
    while waiting:
        room, end = capacity, len(waiting)
        while end:
            room -= waiting.pop(end - 1)
            bin_of[rows.pop(end - 1)] = number
            end = bisect_right(waiting, room, 0, end - 1)
        number += 1
    return bin_of


def _oldest_first(length: Index, capacity: int, window: int) -> list[int]:
    """Return the bin of each row: the `window` oldest are looked at, and the oldest opens each bin."""
    sizes, came, spare = length.tolist(), window, int(SPARE * capacity)
    waiting, rows = _sorted(length[:window])
    bin_of, number, oldest = [-1] * len(sizes), 0, 0
    while waiting:
        while bin_of[oldest] >= 0:
            oldest += 1
        room = capacity
        places: tuple[int, ...] = (bisect_right(waiting, sizes[oldest]) - 1,)
        while places:
            for place in places:
                room -= waiting.pop(place)
                bin_of[rows.pop(place)] = number
            for row in range(came, min(came + len(places), len(sizes))):
                place = bisect_left(waiting, sizes[row])
                waiting.insert(place, sizes[row])
                rows.insert(place, row)
            came += len(places)
            places = _next(waiting, room, spare) if waiting and waiting[0] <= room else ()
        number += 1
    return bin_of


def _next(waiting: list[int], room: int, spare: int) -> tuple[int, ...]:
    """Return the place of the largest that fits, or, falling, of a pair that leaves less room that is of no use."""
    place = bisect_right(waiting, room) - 1
    left = room - waiting[place]
    if left <= spare or left >= 2 * waiting[0]:
        return (place,)
    partner = bisect_right(waiting, left, 0, place)
    least = left - waiting[partner - 1] if partner else left
    best: tuple[int, ...] = (place,)
    if least > spare:
        half = bisect_left(waiting, room // 2, 0, place)
        for larger in range(half, min(half + PAIRS, place)):
            smaller = bisect_right(waiting, room - waiting[larger], 0, larger) - 1
            if smaller >= 0 and room - waiting[larger] - waiting[smaller] < least:
                least, best = room - waiting[larger] - waiting[smaller], (larger, smaller)
    return best


def _bins(bin_of: list[int]) -> list[Index]:
    """Return the rows of each bin, in order; bins are ordered by their first row."""
    number = np.array(bin_of)
    rows = np.argsort(number, kind="stable")
    end = np.cumsum(np.bincount(number))
    start = np.concatenate([[0], end[:-1]])
    return [rows[start[k] : end[k]] for k in np.argsort(rows[start]).tolist()]
