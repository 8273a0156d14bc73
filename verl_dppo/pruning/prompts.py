"""One step's decision at the prompt level, before rollout: which candidates are sampled, with what weight.

The candidates of a step are fixed first, then dealt to mini-batches, then each gets its probability from what earlier
steps left, and then a sample of fixed size is drawn in every mini-batch. Nothing that this step will observe enters,
so that each optimiser step's estimate is unbiased for the full batch of its candidates (Horvitz and Thompson 1952).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.pruning.inclusion import proportional_inclusion
from verl_dppo.pruning.plan import deal_mini_batches
from verl_dppo.pruning.sampling import draw

Array = NDArray[np.float64]
Index = NDArray[np.int64]

PROMPT_RULES = ("beta", "threshold")
SCHEDULES = ("refill", "shrink")
TIE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class PromptPlan:
    """What happens to the N candidates of one step.

    Attributes:
        pi: (N,) inclusion probability, > 0.
        kept: (N,) bool, whether it is sampled.
        mini_batch: (N,) mini-batch of each candidate, kept or not.
    """

    pi: Array
    kept: NDArray[np.bool_]
    mini_batch: Index

    @property
    def weight(self) -> Array:
        """(N,) Horvitz-Thompson weight, 1/pi where kept, else 0."""
        return self.kept / self.pi

    @property
    def pruned(self) -> bool:
        """Whether a candidate could have been skipped."""
        return bool((self.pi < 1).any())

    @property
    def drawn(self) -> Index:
        """(mini-batches,) candidates of each, kept or not: what its estimate is divided by."""
        return np.bincount(self.mini_batch)


def candidates(batch_size: int, keep: float, known_share: float, mini_batches: int, floor: float) -> int:
    """Return N, how many prompts a `refill` step draws to keep `batch_size` of them.

    All of it is known before the step: `known_share` is that of the prompts still to come, not of those that will be
    drawn. Where all are known it is round(batch_size / keep), where none is it is batch_size, and in between what makes
    the expected sum of probabilities right, with 1 for prompts that are not known.

    Args:
        batch_size: K, prompts that are kept.
        keep: in (0, 1], the mean probability of known prompts.
        known_share: in [0, 1].
        mini_batches: candidates are dealt evenly to so many.
        floor: no mini-batch gets so many candidates that they cannot all have this probability.
    """
    wanted = round(batch_size / (1 - known_share * (1 - keep)))
    of_mini_batch = batch_size // mini_batches
    return min(wanted, mini_batches * int(of_mini_batch / floor + 1e-9))


def prompt_inclusion(
    spread: ArrayLike, known: ArrayLike, size: float, floor: float, rule: str = "beta"
) -> NDArray[np.float64]:
    """Return inclusion probabilities with a given sum, from what is known of the prompts.

    Prompts that are not known get 1, or where that leaves less than the floor for the others, the largest probability
    that does not. The others share what is left by the rule:

    beta: proportional to the spread, held in [floor, 1].
    threshold: after the paper's rule, prompts below the mean spread share one probability, and the others get 1. Where
        the sum then leaves less than the floor for those below, they get the floor, and the others share the rest.

    Args:
        spread: (n,) expected standard deviation of the rewards, > 0; of unknown prompts it is not read.
        known: (n,) bool.
        size: the sum, in [floor * n, n].
        floor: smallest probability, in (0, 1].
        rule: one of PROMPT_RULES.

    Returns:
        (n,) float64 in [floor, 1]; their sum is `size` up to rounding.

    Raises:
        ValueError: an unknown rule, a sum that is out of reach, or a spread that is not finite and > 0.
    """
    if rule not in PROMPT_RULES:
        raise ValueError(f"rule={rule!r} is unknown; use one of {PROMPT_RULES}")
    spreads, seen = np.asarray(spread, dtype=np.float64), np.asarray(known, dtype=bool)
    n, seen_count = spreads.size, int(seen.sum())
    if seen.shape != spreads.shape or spreads.ndim != 1:
        raise ValueError(f"spread has shape {spreads.shape}, known {seen.shape}: both must be (n,)")
    if not 0 < floor <= 1 or not floor * n - 1e-9 <= size <= n + 1e-9:
        raise ValueError(f"{n} prompts cannot have probabilities in [floor={floor}, 1] that sum to {size}")
    if not (np.isfinite(spreads[seen]) & (spreads[seen] > 0)).all():
        raise ValueError(f"spread must be finite and > 0, got {spreads[seen].min()}")
    pi = np.ones(n)
    left = size - (n - seen_count)
    if seen_count < n and left < floor * seen_count:
        pi[~seen] = (size - floor * seen_count) / (n - seen_count)
        left = floor * seen_count
    share = proportional_inclusion if rule == "beta" else _two_classes
    if seen_count:
        pi[seen] = share(spreads[seen], left, floor)
    return np.clip(pi, floor, 1.0)  # a quotient may miss the bounds by its rounding, which no draw would take


def _two_classes(spread: Array, total: float, floor: float) -> Array:
    below = spread < spread.mean() * (1 - TIE_TOLERANCE)
    low, high = int(below.sum()), int((~below).sum())
    if low == 0:
        return np.full(spread.size, total / spread.size)
    of_low = max((total - high) / low, floor)
    return np.where(below, of_low, (total - of_low * low) / high)


def plan_prompts(
    spread: Array,
    known: NDArray[np.bool_],
    order: Index,
    mini_batches: int,
    kept_per_mini_batch: int,
    floor: float,
    rule: str,
    deal: np.random.Generator,
    sample: np.random.Generator,
) -> PromptPlan:
    """Deal the candidates of one step to mini-batches, and draw the same number in each.

    Args:
        spread: (N,) from `PromptHistory.spread`.
        known: (N,) bool, whether the candidate was visited often enough for its spread to count.
        order: (N,) permutation that puts alike candidates side by side: neighbours compete for a place.
        mini_batches: their number.
        kept_per_mini_batch: at most the candidates of the smallest one, and at least the floor times those of the
            largest.
        floor: smallest probability.
        rule: see `prompt_inclusion`.
        deal: decides which candidates share a mini-batch; known ones are spread evenly.
        sample: decides the draw.
    """
    mini_batch = deal_mini_batches(known, np.arange(spread.size), mini_batches, deal)
    pi, kept = np.ones(spread.size), np.zeros(spread.size, dtype=bool)
    for k in range(mini_batches):
        mine = order[mini_batch[order] == k]
        pi[mine] = prompt_inclusion(spread[mine], known[mine], kept_per_mini_batch, floor, rule)
        kept[mine] = draw(pi[mine], sample)
    return PromptPlan(pi, kept, mini_batch)


def shrunk_size(known: NDArray[np.bool_], keep: float, mini_batches: int, floor: float) -> int:
    """Return how many of its candidates each mini-batch of a `shrink` step keeps.

    Args:
        known: (N,) bool; N is a multiple of `mini_batches`. Prompts that are not known are all kept, on average.
        keep: in (0, 1], the share of the others.
        mini_batches: their number.
        floor: smallest probability.
    """
    of_mini_batch = known.size // mini_batches
    wanted = round(float(np.where(known, keep, 1.0).sum()) / mini_batches)
    return max(wanted, int(np.ceil(floor * of_mini_batch - 1e-9)), 1)
