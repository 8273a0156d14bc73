"""From inclusion probabilities to a sample: who is kept this time.

Every design here includes completion i with probability pi_i; they differ in which completions are kept together. The
fixed-size designs walk pi to a corner of the unit cube by steps that leave its expectation alone: in the pivotal
design two neighbours trade probability, in the cube design a few neighbours do so that balanced totals stand still.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]

DESIGNS = ("pivotal", "poisson", "cube")
# What rounding may leave of a sum of probabilities that is an integer: it must not cost a completion its place.
ROUNDING = 1e-9
# A step that should end at 0 or 1 misses it by a few units in the last place.
LAST_PLACES = 8 * np.finfo(np.float64).eps
# A balancing variable that varies less than this in a block, relative to its size or to the others, says nothing there.
DEPENDENT = 1e-10


def draw(
    pi: ArrayLike,
    rng: np.random.Generator,
    design: str = "pivotal",
    order: ArrayLike | None = None,
    balance: ArrayLike | None = None,
) -> NDArray[np.bool_]:
    """Draw a sample in which completion i is kept with probability pi_i exactly.

    Args:
        pi: (n,) inclusion probabilities in [0, 1]. Completions at 1 are always kept, those at 0 never.
        rng: the generator that decides.
        design: `pivotal` (Deville and Tille 1998, ordered): neighbours in `order` compete for a place, so that the
            sample spreads over the order. `cube` (Deville and Tille 2004): neighbours in `order` trade probability so
            that the Horvitz-Thompson totals of `balance` stay what they are in the population, until a handful is
            left. Both keep floor(sum(pi)) or ceil(sum(pi)) completions; a sum within 1e-9 of an integer is that
            integer. `poisson`: independent, so that the size is random.
        order: (n,) permutation of the completions; neighbours should be alike. None means as given.
        balance: (n, k) balancing variables x of the cube design, the most important first: the sum of x_i / pi_i over
            what is kept comes close to the sum of x_i over all. The last ones are given up first at the end. pi itself
            is always balanced, and None balances nothing else.

    Returns:
        (n,) bool with E[kept] = pi.

    Raises:
        ValueError: a probability outside [0, 1], an unknown design, an order that is not a permutation, or balancing
            variables that are not finite, not of shape (n, k), or given to another design than `cube`.
    """
    probabilities = np.asarray(pi, dtype=np.float64)
    if probabilities.ndim != 1:
        raise ValueError(f"pi has shape {probabilities.shape}, expected (n,)")
    outside = ~((probabilities >= 0) & (probabilities <= 1))
    if outside.any():
        raise ValueError(f"pi must be in [0, 1], got {probabilities[outside][:3]}")
    if design not in DESIGNS:
        raise ValueError(f"design={design!r} is unknown; use one of {DESIGNS}")
    if balance is not None and design != "cube":
        raise ValueError(f"balance needs design='cube', got design={design!r}, which would ignore it")
    sequence = _permutation(order, probabilities.size)
    variables = _balancing_variables(balance, probabilities.size)
    if design == "poisson":
        return rng.random(probabilities.size) < probabilities
    kept = probabilities >= 1
    contenders = sequence[(probabilities[sequence] > 0) & ~kept[sequence]]
    if contenders.size == 0:
        return kept
    if design == "pivotal":
        winners = _ordered_pivotal(probabilities[contenders], rng)
    else:
        winners = _cube(probabilities[contenders], variables[contenders], rng)
    kept[contenders[winners]] = True
    return kept


def _permutation(order: ArrayLike | None, n: int) -> Index:
    if order is None:
        return np.arange(n)
    sequence = np.asarray(order)
    if not np.array_equal(np.sort(sequence, axis=None), np.arange(n)) or sequence.ndim != 1:
        raise ValueError(f"order must be a permutation of range({n}), got shape {sequence.shape}")
    return sequence.astype(np.int64)


def _balancing_variables(balance: ArrayLike | None, n: int) -> Array:
    if balance is None:
        return np.zeros((n, 0))
    variables = np.asarray(balance, dtype=np.float64)
    if variables.ndim != 2 or variables.shape[0] != n:
        raise ValueError(f"balance has shape {variables.shape}, expected ({n}, k)")
    if not np.isfinite(variables).all():
        raise ValueError(f"balance must be finite, got {variables[~np.isfinite(variables)][:3]}")
    return variables


def _certain_if_rounded(probability: float) -> float:
    """Return 0 or 1 in place of what is so but for rounding."""
    nearest = round(probability)
    return nearest if abs(probability - nearest) <= ROUNDING else probability


def _running_sum(pi: Array) -> tuple[Array, Array]:
    """Return whole and fractional part of the running sum, the fraction exact to the last places whatever n is.

    The leading bits of the terms add up without rounding, and what they leave is too small to round visibly.
    """
    leading = np.floor(pi * 2.0**26) / 2.0**26
    exact = np.cumsum(leading)
    whole = np.floor(exact)
    fraction = (exact - whole) + np.cumsum(pi - leading)
    carry = np.floor(fraction)
    return whole + carry, fraction - carry


def _ordered_pivotal(pi: Array, rng: np.random.Generator) -> Index:
    """Let each element, all in (0, 1), fight the survivor of those before it: for a place, or for what is left of one.

    In a fight of a and b, a + b < 1 excludes one of the two, and the other carries a + b on; else one is kept, and the
    other carries a + b - 1 on. What is carried is the fraction of the running sum, whoever won: the chances of all
    fights are known beforehand, and the champion at any time is the last element that won the right to carry.
    """
    whole, fraction = _running_sum(pi)
    carried = np.concatenate([[0.0], fraction[:-1]])
    fills_a_place = np.diff(whole, prepend=0.0) > 0
    total = carried + pi
    champion_gets_it = np.where(fills_a_place, (1 - pi) / (2 - total), carried / total)
    # The first element meets nobody; its random number decides at the end whether the last champion is kept.
    champion_gets_it[0] = _certain_if_rounded(fraction[-1])
    got_it = rng.random(pi.size) < champion_gets_it
    carries = got_it == fills_a_place
    carries[0] = True
    element = np.arange(pi.size)
    champion = np.maximum.accumulate(np.where(carries, element, 0))
    places = np.flatnonzero(fills_a_place)
    winners = np.where(carries[places], champion[places - 1], places)
    return np.append(winners, champion[-1]) if got_it[0] else winners


def _cube(pi: Array, balance: Array, rng: np.random.Generator) -> Index:
    """Fly over the cube in blocks of neighbours, all blocks at once, and land by giving up one variable after another.

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
    chance = np.array([_certain_if_rounded(p) for p in position[undecided]])
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
