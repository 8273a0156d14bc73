"""One step's decision at the completion level: who stays, with what weight, in which mini-batch.

Everything here is decided in an order that keeps each optimiser step unbiased on its own: completions are dealt to
mini-batches first; inside a mini-batch each gets its probability; then the sample is drawn.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl_dppo.pruning.inclusion import fixed_size_inclusion
from verl_dppo.pruning.sampling import draw

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class CompletionPlan:
    """What happens to the n completions of one step.

    Attributes:
        pi: (n,) inclusion probability; 0 for a completion without a gradient.
        weight: (n,) Horvitz-Thompson weight, 1/pi where kept by the draw, else 0.
        mini_batch: (n,) mini-batch of each completion, kept or not.
        rows: for each mini-batch, the completions it trains on, in the order of the batch: those drawn, and fillers,
            which weigh 0.
        padding: for each mini-batch, the rows it still lacks; every mini-batch has the same size with them.
    """

    pi: Array
    weight: Array
    mini_batch: Index
    rows: tuple[Index, ...]
    padding: tuple[int, ...]

    @property
    def kept(self) -> Index:
        """All completions that are trained on, mini-batch after mini-batch, fillers included."""
        return np.concatenate(self.rows) if self.rows else np.zeros(0, dtype=np.int64)

    @property
    def rows_per_mini_batch(self) -> int:
        """Rows of every mini-batch, padding included."""
        return self.rows[0].size + self.padding[0] if self.rows else 0


def deal_mini_batches(
    informative: NDArray[np.bool_], group: Index, mini_batches: int, rng: np.random.Generator
) -> Index:
    """Deal completions to mini-batches at random, each group and the informative ones evenly.

    Args:
        informative: (n,) whether the completion has a gradient.
        group: (n,) integer label of its prompt.
        mini_batches: number of mini-batches, >= 1.
        rng: decides the order in which groups, and completions inside them, are dealt.

    Returns:
        (n,) mini-batch of each completion. Totals, and totals of informative completions, differ by at most 1.
    """
    n = informative.size
    _, label = np.unique(group, return_inverse=True)
    rank_of_group = rng.permutation(label.max(initial=-1) + 1)
    order = np.lexsort((rng.random(n), rank_of_group[label], ~informative))
    dealt = np.empty(n, dtype=np.int64)
    dealt[order] = rng.permutation(mini_batches)[np.arange(n) % mini_batches]
    return dealt


def _common_rows(expected: Array, available: Index, multiple: int) -> int:
    """Return the common row count: the multiple nearest to the mean budget, or enough for all where all are wanted."""
    everything = bool((expected >= available - 1e-6).all())
    multiples = -(-int(available.max()) // multiple) if everything else round(float(expected.mean()) / multiple)
    return max(1, multiples) * multiple


def _own_rows(expected: Array, available: Index) -> Index:
    """Return (mini-batches,) how many rows each draws, by its own budget alone."""
    return np.clip(np.round(expected).astype(np.int64), np.minimum(available, 1), available)


def _balance(pi: Array, length: Array, advantage: Array) -> Array:
    """Return what the cube holds still besides the row count: tokens, weighted advantages, and their sizes."""
    return np.column_stack([pi * length, advantage, np.abs(advantage)])


def plan_completions(
    slope: Array,
    target_pi: Array,
    mini_batch: Index,
    order: Index,
    length: Array,
    advantage: Array,
    mini_batches: int,
    multiple: int,
    floor: float,
    design: str,
    rng: np.random.Generator,
    own_rows: bool = False,
) -> CompletionPlan:
    """Draw the completions of one step, with the same number of rows in every mini-batch.

    Args:
        slope: (n,) what pi should be proportional to, > 0 where `target_pi` is.
        target_pi: (n,) the rule's own pi under its budget; its sums set the row count. 0 for a completion without a
            gradient, which can only fill up.
        mini_batch: (n,) from `deal_mini_batches`, fixed before the draw.
        order: (n,) permutation that puts alike completions side by side, for the pivotal draw.
        length: (n,) response tokens; fillers are the shortest.
        advantage: (n,) advantage of each completion, which `cube` balances.
        mini_batches: their number.
        multiple: the row count of a mini-batch is a multiple of this (data-parallel ranks, times the micro-batch size
            where that is fixed).
        floor: smallest pi of a completion with a gradient.
        design: `pivotal` and `cube` keep exactly that many rows, `cube` nearly the same number of tokens and the same
            weighted sums of advantages besides; `poisson` keeps a random number, filled up to the largest.
        rng: decides the draw.
        own_rows: how many rows a mini-batch draws follows from its own completions alone, and all are filled up to the
            largest. This is needed where it was drawn, too, which completions a mini-batch has: with a common number
            the rows of the first would tell which prompts were kept in the second, whose step would then be exact over
            all draws but not given that of the first, which has moved the parameters.

    Returns:
        The plan. Its padding is 0 while fillers last, and stays below `mini_batches * multiple` where rows are common.
    """
    members = [order[mini_batch[order] == k] for k in range(mini_batches)]
    live = [m[target_pi[m] > 0] for m in members]
    available = np.array([m.size for m in live], dtype=np.int64)
    expected = np.array([target_pi[m].sum() for m in live])
    if own_rows:
        sizes = _own_rows(expected, available)
    else:
        rows = _common_rows(expected, available, multiple)
        sizes = np.minimum(rows, available)

    pi, drawn = np.zeros_like(slope), []
    for m, size in zip(live, sizes.tolist(), strict=True):
        pi[m] = target_pi[m] if design == "poisson" else fixed_size_inclusion(slope[m], size, floor)
        balance = _balance(pi[m], length[m], advantage[m]) if design == "cube" else None
        drawn.append(m[draw(pi[m], rng, design, balance=balance)])
    if design == "poisson" or own_rows:
        rows = max(1, -(-max(d.size for d in drawn) // multiple)) * multiple

    weight = np.zeros_like(slope)
    chosen, padding = [], []
    for m, d in zip(members, drawn, strict=True):
        weight[d] = 1 / pi[d]
        idle = m[target_pi[m] == 0]
        if d.size == 0 and idle.size == 0:  # independent draws may leave nothing, and padding copies a row
            idle = m
        fillers = idle[np.argsort(length[idle], kind="stable")][: rows - d.size]
        chosen.append(np.sort(np.concatenate([d, fillers])))
        padding.append(rows - d.size - fillers.size)
    return CompletionPlan(pi, weight, mini_batch, tuple(chosen), tuple(padding))
