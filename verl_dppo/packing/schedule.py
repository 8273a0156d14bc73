"""The order of one step: which rank trains on which row, in which micro-batch of which mini-batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.packing.balance import balance
from verl_dppo.packing.bins import LARGEST, check_count, check_lengths
from verl_dppo.packing.levelling import common_micro_batches, micro_batches_needed, packed_micro_batches

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Cost = Callable[[Index], Array]

PADDING = -1
"""Stands for a padding row where others are given by their position."""


@dataclass(frozen=True)
class Schedule:
    """The places of one step, rank after rank, of each rank mini-batch after mini-batch, then micro-batch after
    micro-batch: an order that a contiguous split into ranks and then into mini-batches takes apart again.

    Attributes:
        row: (places,) the row at each place, PADDING where it is none.
        rank: (places,) data-parallel rank.
        mini_batch: (places,) mini-batch.
        micro_batch: (places,) micro-batch, from 0 in each mini-batch; every rank has the same number of them there.
        length: (places,) tokens.
        cost: (places,) cost, in the unit of the cost function.
        capacity: largest number of tokens of a micro-batch, or None where micro-batches are not planned: all is one.
    """

    row: Index
    rank: Index
    mini_batch: Index
    micro_batch: Index
    length: Index
    cost: Array
    capacity: int | None

    @property
    def padding_rows(self) -> int:
        """Places that hold no row."""
        return int((self.row == PADDING).sum())

    @property
    def micro_batches(self) -> Index:
        """(mini-batches,) micro-batches of each rank."""
        count = np.zeros(int(self.mini_batch.max()) + 1, dtype=np.int64)
        np.maximum.at(count, self.mini_batch, self.micro_batch + 1)
        return count

    def density(self, valid_tokens: float) -> float:
        """Return valid tokens over what all micro-batches of all ranks could hold.

        Raises:
            ValueError: micro-batches were not planned.
        """
        if self.capacity is None:
            raise ValueError("micro-batches without a capacity have no density")
        ranks = int(self.rank.max()) + 1
        return float(valid_tokens) / (float(self.micro_batches.sum()) * ranks * self.capacity)


def schedule(
    length: ArrayLike,
    ranks: int,
    mini_batch: ArrayLike,
    micro_batch_tokens: int | None,
    cost: Cost | None = None,
    multiple: int = 1,
    window: int | None = None,
    padding_length: int = 2,
    ids: Sequence[object] | None = None,
) -> Schedule:
    """Order the rows of one step for ranks and micro-batches; mini-batches stay what they are.

    Each mini-batch is balanced over ranks by cost at equal counts. Each rank's part of it is cut into the same number
    of micro-batches, none above the token cap, alike in cost at each micro-step.

    Args:
        length: (n,) int, tokens of each row, prompt and response.
        ranks: data-parallel ranks, >= 1.
        mini_batch: (n,) int, mini-batch of each row, numbered from 0 without a gap.
        micro_batch_tokens: token cap of a micro-batch; None: a mini-batch of a rank is one.
        cost: from lengths to costs, e.g. a `SequenceCost`; None: the tokens.
        multiple: the number of micro-batches is a multiple of this, e.g. what a virtual pipeline works in.
        window: of `pack`.
        padding_length: tokens of a padding row. Where all mini-batches have the same number of rows, and `multiple` is
            1, there are at most `mini-batches * (ranks - 1)` of them. Others are filled up to the
            largest, because verl cuts mini-batches of one size.
        ids: (n,) names of the rows, for the error message.

    Raises:
        ValueError: a row above the cap, with its length, name and the cap; or arguments that do not fit together.
    """
    length = check_lengths(length, _cap(micro_batch_tokens), ids)
    _check_counts(ranks, multiple, padding_length, micro_batch_tokens)
    members = _members(length, np.asarray(mini_batch))
    price = _price(cost)
    per_rank = -(-max(m.size for m in members) // ranks)
    while True:
        padded = [np.pad(m, (0, per_rank * ranks - m.size), constant_values=PADDING) for m in members]
        tokens = [np.where(m == PADDING, padding_length, length[m]) for m in padded]
        parts = _to_lighter_ranks([balance(price(rows), ranks, equal_count=True) for rows in tokens], tokens, price)
        dealt = [[rows[part] for part in of_rank] for rows, of_rank in zip(tokens, parts, strict=True)]
        if multiple == 1:  # nobody needs more micro-batches than rows
            break
        needed = max(micro_batches_needed(rows, micro_batch_tokens, multiple, window) for rows in dealt)
        if needed <= per_rank:
            break
        per_rank = needed  # every micro-batch must hold a row
    places = []
    for k, (rows, of_rank, lengths) in enumerate(zip(padded, parts, dealt, strict=True)):
        costs = [price(part) for part in lengths]
        cells = common_micro_batches(lengths, costs, micro_batch_tokens, multiple, window)
        for rank, (part, of_micro) in enumerate(zip(of_rank, cells, strict=True)):
            places += [(rank, k, micro, rows[part[chosen]]) for micro, chosen in enumerate(of_micro)]
    places.sort(key=lambda place: place[:3])
    return _schedule(places, length, padding_length, price, micro_batch_tokens)


def _to_lighter_ranks(parts: list[list[Index]], tokens: list[Index], price: Cost) -> list[list[Index]]:
    """Give the costlier parts of each mini-batch to the ranks with less work so far.

    For passes over all mini-batches at once: what is left of the imbalance of each then does not add up on one rank.
    """
    work, dealt = np.zeros(len(parts[0])), []
    for of_rank, rows in zip(parts, tokens, strict=True):
        cost = np.array([price(rows[part]).sum() for part in of_rank])
        lightest, costliest = np.argsort(work, kind="stable"), np.argsort(-cost, kind="stable")
        work[lightest] += cost[costliest]
        place = np.empty_like(lightest)
        place[lightest] = costliest
        dealt.append([of_rank[k] for k in place])
    return dealt


def _schedule(
    places: list[tuple[int, int, int, Index]], length: Index, padding_length: int, price: Cost, capacity: int | None
) -> Schedule:
    sizes = [rows.size for *_, rows in places]
    row = np.concatenate([rows for *_, rows in places])
    rank, mini_batch, micro_batch = (
        np.repeat(np.array([place[axis] for place in places], dtype=np.int64), sizes) for axis in range(3)
    )
    tokens = np.where(row == PADDING, padding_length, length[row])
    return Schedule(row, rank, mini_batch, micro_batch, tokens, price(tokens), capacity)


def plan_in_order(
    length: ArrayLike,
    ranks: int,
    mini_batches: int,
    micro_batch_tokens: int | None,
    cost: Cost | None = None,
    multiple: int = 1,
    window: int | None = None,
    level: bool = True,
    ids: Sequence[object] | None = None,
) -> Schedule:
    """Cut rows whose order is given into micro-batches, without moving any to another rank or mini-batch.

    For a pass over what `schedule` has ordered for another cap or over all mini-batches at once, and for an order that
    is not ours.

    Args:
        length: (n,) int, tokens of each row; the ranks take equal contiguous parts, and so do mini-batches of a rank.
        ranks: data-parallel ranks.
        mini_batches: how many parts the rows of a rank have.
        micro_batch_tokens: as for `schedule`, as are `cost`, `multiple`, `window` and `ids`.
        level: make micro-batches alike in cost; else they are the bins of `pack`.

    Returns:
        The schedule, the places being the rows in their order.

    Raises:
        ValueError: a row above the cap, rows that do not divide, or fewer rows in a part than it needs micro-batches.
    """
    length = check_lengths(length, _cap(micro_batch_tokens), ids)
    for name, value in (("ranks", ranks), ("mini_batches", mini_batches), ("multiple", multiple)):
        check_count(name, value)
    if length.size % (ranks * mini_batches):
        raise ValueError(f"{length.size} rows do not divide over {ranks} ranks and {mini_batches} mini-batches")
    price, cells = _price(cost), length.reshape(ranks, mini_batches, -1)
    micro_batch = np.empty(cells.shape, dtype=np.int64)
    for k in range(mini_batches):
        rows = list(cells[:, k])
        if level:
            bins = common_micro_batches(rows, [price(r) for r in rows], micro_batch_tokens, multiple, window)
        else:
            bins = packed_micro_batches(rows, micro_batch_tokens, multiple, window)
        for rank, of_rank in enumerate(bins):
            for micro, members in enumerate(of_rank):
                micro_batch[rank, k, members] = micro
    rank, mini_batch, _ = (axis.ravel() for axis in np.indices(cells.shape))
    row, flat = np.arange(length.size), micro_batch.ravel()
    return Schedule(row, rank, mini_batch, flat, length, price(length), micro_batch_tokens)


def imbalance(plan: Schedule, value: ArrayLike, of_micro_steps: bool) -> float:
    """Return makespan over mean: how much longer a step takes than with the same work spread evenly over ranks.

    Args:
        plan: the order of the step.
        value: (places,) what is to be balanced: `plan.cost` or `plan.length`.
        of_micro_steps: whether ranks wait for each other at every micro-batch, or at the end of a mini-batch only.
    """
    ranks, mini_batches = int(plan.rank.max()) + 1, int(plan.mini_batch.max()) + 1
    steps = int(plan.micro_batch.max()) + 1 if of_micro_steps else 1
    load = np.zeros((ranks, mini_batches, steps))
    step = plan.micro_batch if of_micro_steps else np.zeros_like(plan.micro_batch)
    np.add.at(load, (plan.rank, plan.mini_batch, step), np.asarray(value))
    mean = load.mean(axis=0).sum()
    return float(load.max(axis=0).sum() / mean) if mean else 1.0


def _cap(micro_batch_tokens: int | None) -> int:
    return LARGEST if micro_batch_tokens is None else micro_batch_tokens


def _price(cost: Cost | None) -> Cost:
    """Return the cost function, which is held to one cost for each row."""

    def price(length: Index) -> Array:
        costs = np.asarray(length if cost is None else cost(length), dtype=np.float64)
        if costs.shape != length.shape:
            raise ValueError(f"cost must return {length.shape} costs for as many lengths, got {costs.shape}")
        return costs

    return price


def _members(length: Index, mini_batch: Index) -> list[Index]:
    """Return the rows of each mini-batch."""
    if mini_batch.shape != length.shape or mini_batch.dtype.kind not in "iu":
        raise ValueError(f"mini_batch must be ({length.size},) integers, got {mini_batch.shape} of {mini_batch.dtype}")
    numbers = np.unique(mini_batch)
    if numbers[0] != 0 or numbers[-1] != numbers.size - 1:
        raise ValueError(f"mini_batch must be numbered from 0 without a gap, got {numbers.tolist()}")
    return [np.flatnonzero(mini_batch == k) for k in numbers]


def _check_counts(ranks: int, multiple: int, padding_length: int, capacity: int | None) -> None:
    for name, value in (("ranks", ranks), ("multiple", multiple), ("padding_length", padding_length)):
        check_count(name, value)
    if capacity is not None and padding_length > capacity:
        raise ValueError(f"padding_length must not exceed micro_batch_tokens={capacity}, got {padding_length}")
