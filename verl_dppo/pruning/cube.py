"""The cube design (Deville and Tille 2004), in blocks: a sample of fixed size with nearly fixed weighted totals."""

import numpy as np
from numpy.typing import NDArray

from verl_dppo.pruning.pivotal import certain_if_rounded

Array = NDArray[np.float64]
Index = NDArray[np.int64]

# A step that should end at 0 or 1 misses it by a few units in the last place.
LAST_PLACES = 8 * np.finfo(np.float64).eps
# A balancing variable that varies less than this in a block, relative to its size or to the others, says nothing there.
DEPENDENT = 1e-10


def balanced_sample(pi: Array, balance: Array, rng: np.random.Generator) -> Index:
    """Return the indices of a sample: blocks of neighbours, all at once, fly to the border of the cube and along it.

    The flight ends where no direction is left that changes no total; then one variable after another is given up.

    Args:
        pi: (m,) in (0, 1).
        balance: (m, k) balancing variables besides pi.
        rng: decides between the two ends of every block's steps.
    """
    share = _shares_of_totals(pi, balance)
    position, undecided = pi.copy(), np.arange(pi.size)
    while undecided.size > 1:
        # One element more than there are variables, pi among them, leaves a direction to go.
        size = min(share.shape[0] + 2, undecided.size)
        blocks = undecided[: undecided.size // size * size].reshape(-1, size).T
        direction = _directions(share[:, blocks])
        if not direction.any():
            share = share[:-1]
            continue
        position[blocks] = _step(position[blocks], direction, rng)
        undecided = undecided[(position[undecided] > 0) & (position[undecided] < 1)]
    # The sum of all positions has stood still: the last element holds what it exceeds an integer by.
    chance = np.array([certain_if_rounded(p) for p in position[undecided]])
    position[undecided] = rng.random(undecided.size) < chance
    return np.flatnonzero(position == 1)


def _shares_of_totals(pi: Array, balance: Array) -> Array:
    """Return (k, m) what each element adds to each Horvitz-Thompson total when kept, every row within [-1, 1]."""
    return _scaled(_scaled(balance.T) / np.maximum(pi, 1e-100))


def _scaled(rows: Array) -> Array:
    """Scale (k, elements, ...) values to a largest size of 1 over the elements; zeros stay."""
    largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    return rows / np.where(largest > 0, largest, 1.0)


def _directions(share: Array) -> Array:
    """Return (size, blocks) directions along which neither the sum of pi nor the totals of a block change.

    Args:
        share: (k, size, blocks) what each of a block's elements adds to each total. A block of k + 2 always has a
            direction, also where elements are identical or variables depend on each other; a smaller one may have
            none, and gets zeros.
    """
    # The first element gives what the others take, which leaves the sum alone, exactly and whatever they take.
    system = share[:, 1:] - share[:, :1]
    system[np.abs(system) <= DEPENDENT] = 0.0
    reduced, pivot = _row_reduced(_scaled(system))
    _, others, blocks = system.shape
    block = np.arange(blocks)
    taken = (pivot[:, None] == np.arange(others)[:, None]).any(axis=0)
    free = taken.argmin(axis=0)
    direction = np.zeros((1 + others, blocks))
    direction[1 + free, block] = 1.0
    row, at = np.nonzero(pivot >= 0)
    direction[1 + pivot[row, at], at] = -reduced[row, free[at], at]
    direction[1:] *= ~taken.all(axis=0)
    direction[0] = -direction[1:].sum(axis=0)
    return direction


def _row_reduced(system: Array) -> tuple[Array, Index]:
    """Bring every block's (rows, columns) system to reduced form by Gauss-Jordan elimination, pivoting on columns.

    Returns:
        (rows, columns, blocks) reduced system, and (rows, blocks) the pivot's column, -1 where a row depends on others.
    """
    rows, _, blocks = system.shape
    block, pivot = np.arange(blocks), np.full((rows, blocks), -1)
    for i in range(rows):
        column = np.abs(system[i]).argmax(axis=0)
        value = system[i, column, block]
        independent = np.abs(value) > DEPENDENT
        lead = system[i] / np.where(independent, value, np.inf)
        system = system - system[:, column, block][:, None] * lead
        system[i] = lead
        pivot[i] = np.where(independent, column, -1)
    return system, pivot


def _step(position: Array, direction: Array, rng: np.random.Generator) -> Array:
    """Go from each position along its direction, or against it, to the border of the cube; the mean stays.

    Args:
        position: (size, blocks) in (0, 1).
        direction: (size, blocks), none of them all 0.
        rng: decides between the two ends.
    """
    speed = np.abs(direction)
    with np.errstate(divide="ignore", over="ignore"):
        to_one, to_zero = (1 - position) / speed, position / speed
    ahead, behind = np.where(direction > 0, [to_one, to_zero], [to_zero, to_one])
    forth, back = ahead.min(axis=0), behind.min(axis=0)
    forward = rng.random(forth.size) < back / (forth + back)
    moved = position + np.where(forward, forth, -back) * direction
    first = np.where(forward, ahead.argmin(axis=0), behind.argmin(axis=0))
    block = np.arange(forth.size)
    moved[first, block] = (direction[first, block] > 0) == forward
    moved[moved <= LAST_PLACES * position] = 0.0
    moved[moved >= 1 - LAST_PLACES] = 1.0
    return moved
