"""Exchange rows between pairs of parts: subsets of equal size, chosen so that the fuller part gives the wanted cost.

Parts are the lines of a matrix of row numbers in ascending order, filled up with the number of a row that costs
nothing, so that giving a row for it is a move. Many pairs are treated in one pass of numpy.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

ROUNDING = 1e-12
MOST_SUBSETS = 1024


@lru_cache(maxsize=64)
def subset_columns(width: int, size: int) -> Index:
    """Return (subsets, size) column numbers: all, or if too many those of evenly spaced columns."""
    count = width if size == 1 else min(width, _most_columns(size))
    columns = np.linspace(width - 1, 0, count).round().astype(np.int64)
    return np.array(list(combinations(columns.tolist(), size)), dtype=np.int64).reshape(-1, size)


@cache
def _most_columns(size: int) -> int:
    """Return how many columns have no more than MOST_SUBSETS subsets of that size."""
    return next(count for count in range(size, MOST_SUBSETS + size) if comb(count + 1, size) > MOST_SUBSETS)


@dataclass(frozen=True)
class Move:
    """What to exchange between pairs of parts.

    Attributes:
        high: (pairs,) the fuller parts.
        low: (pairs,) the emptier ones, each once.
        size: rows that each gives.
        wanted: (pairs,) cost to move from the fuller to the emptier one, not negative.
        least: (pairs,) what is moved must be more than this.
        most: (pairs,) what is moved must be less than this.
    """

    high: Index
    low: Index
    size: int
    wanted: Array
    least: Array
    most: Array


class Parts:
    """Rows dealt to parts.

    Attributes:
        rows: (parts, width) row numbers, ascending in each line; values.size - 1 is the row that is none.
        values: (n + 1,) cost of each row in descending order, the last one 0 for none.
        keep_counts: no line may get a second empty place.
    """

    def __init__(self, rows: Index, values: Array, keep_counts: bool) -> None:
        """Take over the rows, which `exchange` changes."""
        self.rows, self.values, self.keep_counts = rows, values, keep_counts
        self.cells = values[rows]

    def load(self) -> Array:
        """Return (parts,) the cost of each part."""
        return self.cells.sum(axis=1)

    def exchange(self, move: Move) -> bool:
        """Make in each pair the exchange that moves the cost closest to the wanted one, where it is in the limits.

        Of pairs with the same fuller part the one that comes out best is taken. Returns whether any was made.
        """
        high, low, wanted = move.high, move.low, move.wanted[:, None]
        subsets = subset_columns(self.rows.shape[1], move.size)
        load, line = self.load(), np.arange(high.size)
        give, take = self._sums(high, low, subsets)
        moved, given, taken = _nearest(give, take, wanted, float(move.size))
        miss = np.abs(moved - wanted)
        miss[(moved <= move.least[:, None] + ROUNDING) | (moved >= move.most[:, None] - ROUNDING)] = np.inf
        best = miss.argmin(axis=1)
        moved = moved[line, best]
        after = np.where(np.isfinite(miss[line, best]), np.maximum(load[high] - moved, load[low] + moved), np.inf)
        pairs = _one_for_each(high, after)
        self._swap(high[pairs], low[pairs], subsets[given[line, best]][pairs], subsets[taken[line, best]][pairs])
        return pairs.size > 0

    def _sums(self, high: Index, low: Index, subsets: Index) -> tuple[Array, Array]:
        """Return (pairs, subsets) the cost of what the fuller and what the emptier part of each pair may give."""
        give, take = (self.cells[part][:, subsets].sum(axis=2) for part in (high, low))
        if self.keep_counts:
            none = self.values.size - 1
            both = (self.rows[high, -1] == none) & (self.rows[low, -1] == none)
            fixed = both[:, None] & (subsets == self.rows.shape[1] - 1).any(axis=1)
            give, take = np.where(fixed, -1.0, give), np.where(fixed, subsets.shape[1] + 0.5, take)
        return give, take

    def _swap(self, high: Index, low: Index, given: Index, taken: Index) -> None:
        one, other = (high[:, None], given), (low[:, None], taken)
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        touched = np.concatenate([high, low])
        self.rows[touched] = np.sort(self.rows[touched], axis=1)
        self.cells[touched] = self.values[self.rows[touched]]


def _nearest(give: Array, take: Array, wanted: Array, most: float) -> tuple[Array, Index, Index]:
    """For each sum to give find the sums to take whose differences enclose the wanted one.

    Args:
        give: (pairs, sums), at most `most`.
        take: (pairs, sums), at most `most` + 0.5.
        wanted: (pairs, 1) difference, not negative.
        most: largest sum.

    Returns:
        (pairs, 2 * sums) differences, and the places in `give` and `take` of what they are between.
    """
    pairs, sums = take.shape
    order = np.argsort(take, axis=1, kind="stable")
    take = np.take_along_axis(take, order, axis=1)
    # One search over all pairs: each has a range of its own on the line of numbers.
    start = np.arange(pairs)[:, None] * (most + 1)
    found = np.searchsorted((take + start).ravel(), (np.maximum(give - wanted, -0.25) + start).ravel())
    above = found.reshape(pairs, sums) - np.arange(pairs)[:, None] * sums
    place = np.concatenate([np.maximum(above - 1, 0), np.minimum(above, sums - 1)], axis=1)
    moved = np.tile(give, 2) - np.take_along_axis(take, place, axis=1)
    given = np.broadcast_to(np.tile(np.arange(sums), 2), place.shape)
    return moved, given, np.take_along_axis(order, place, axis=1)


def _one_for_each(high: Index, after: Array) -> Index:
    """Return for each fuller part the pair that comes out best, where any comes out better."""
    by_part = np.lexsort((after, high))
    first = by_part[np.flatnonzero(np.diff(high[by_part], prepend=-1))]
    return first[np.isfinite(after[first])]
