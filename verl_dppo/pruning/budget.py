"""The automatic budget: how much to keep, so that time saved and noise added together buy the most.

Pruning to `keep` shortens the update and adds rho(keep) of the rollouts' own gradient noise, which only more prompts
average away again. With s, t, f0 the seconds of rollout, of log-probs and update on the full batch, and of the rest,
a step is worth S = (s + t + f0) / ((s + t * kept share)(1 + rho) + f0) full ones. Everything here looks at earlier
steps alone: the budget of a step does not depend on what that step drew, so its weights stay exact.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FIRST_KEEP = 0.6
LOWEST_KEEP, HIGHEST_KEEP = 0.2, 1.0
LARGEST_CHANGE = 0.02
FORGETTING = 0.9
"""A step counts this much less with every later one: ten steps are remembered, about."""
STEPS_BEFORE_MOVING = 3
CAUTION = 1.4
"""What rho is taken times when a budget is chosen. The driver's rho is right within a factor of two or so, and a budget
that is too small costs more than one that is too large."""
GRID = np.linspace(0.1, 1.0, 19)
FINE_GRID = np.linspace(0.1, 1.0, 181)


def variance_inflation(pi: Array, magnitude: Array) -> float:
    """Estimate rho, the variance added by the draw over that of the rollouts: sum (1/pi - 1) m^2 / sum m^2.

    The formula is that of independent draws, with magnitudes in place of gradient norms. Completions with pi = 0 have
    no gradient and do not count.
    """
    live = (pi > 0) & (magnitude > 0)
    if not live.any():
        return 0.0
    square = (magnitude[live] / magnitude[live].max()) ** 2
    return float(((1 / pi[live] - 1) * square).sum() / square.sum())


def inflation_curve(magnitude: Array, cost: Array, floor: float | None = None) -> Array:
    """Return rho for each keep of GRID under Neyman probabilities; see `neyman_inclusion`.

    All budgets are solved at once: with completions sorted by what pi is proportional to, those at the floor, between
    and at 1 are three ranges, so that spent cost and variance follow from running sums.

    Args:
        magnitude: (n,) estimated gradient norms; 0 for a completion without a gradient.
        cost: (n,) cost of keeping it.
        floor: smallest pi, None for keep / 4. A budget below it is taken to keep everything at the budget's own rate.

    Returns:
        (GRID.size,) float64; zeros where no completion has a gradient.
    """
    live = magnitude > 0
    if not live.any():
        return np.zeros(GRID.size)
    m, c = magnitude[live] / magnitude[live].max(), np.maximum(cost[live], np.finfo(float).tiny)
    slope = np.maximum(m / np.sqrt(c) / (m / np.sqrt(c)).max(), 1e-100)
    order = np.argsort(slope)
    slope, c, square = slope[order], c[order], m[order] ** 2

    def running(values: Array) -> Array:
        return np.concatenate([[0.0], np.cumsum(values)])

    spent, spent_by_slope = running(c), running(slope * c)
    energy, energy_by_slope = running(square), running(square / slope)
    lowest = np.minimum(GRID / 4 if floor is None else floor, GRID)
    low, high = np.zeros(GRID.size), np.full(GRID.size, -np.log(slope[0]))  # log of lambda: the largest at 1, or all
    low += np.log(lowest)
    for _ in range(60):
        factor = np.exp((low + high) / 2)
        at_floor, below_one = np.searchsorted(slope, lowest / factor), np.searchsorted(slope, 1 / factor)
        total = lowest * spent[at_floor] + factor * (spent_by_slope[below_one] - spent_by_slope[at_floor])
        too_little = total + spent[-1] - spent[below_one] < GRID * spent[-1]
        low, high = np.where(too_little, (low + high) / 2, low), np.where(too_little, high, (low + high) / 2)
    between = (energy_by_slope[below_one] - energy_by_slope[at_floor]) / factor
    between -= energy[below_one] - energy[at_floor]
    return np.maximum((1 / lowest - 1) * energy[at_floor] + between, 0.0) / energy[-1]


def _between_knots(curve: Array) -> Array:
    """Return rho on FINE_GRID. It falls by orders of magnitude: its logarithm is smooth, but for the last piece."""
    by_logarithm = np.exp(np.interp(FINE_GRID, GRID, np.log(np.maximum(curve, 1e-12))))
    in_last_piece = GRID[-2] < FINE_GRID
    return np.where(in_last_piece, np.interp(FINE_GRID, GRID, curve), by_logarithm)


class UpdateTime:
    """Seconds of log-probs and update as a straight line over the tokens that are trained on, from past steps.

    The line is drawn towards the origin by as much as the steps do not tell: with token counts that hardly vary, time
    is taken to be proportional to tokens.
    """

    # Half of the slope comes from the steps where token counts scatter by the root of this: 2.2 %.
    ORIGIN_WEIGHT = 0.0005
    # The line holds as long as the model and the hardware do, and it takes many steps to tell its two parts apart.
    FORGETTING = 0.99
    # One step that hangs must not bend the line: a step is taken to last this many times what the line says, at most.
    LONGEST = 2.0
    # A process that resumes may run on other hardware: what was measured before counts as so many steps, at most.
    REMEMBERED_STEPS = 5.0

    def __init__(self) -> None:
        """Know nothing yet."""
        self.sums = np.zeros(5)

    def observe(self, tokens: float, seconds: float) -> None:
        """Add a step: tokens that were trained on, and the seconds it took."""
        if self.sums[0] >= self.REMEMBERED_STEPS - 1:
            fixed, per_token = self.line
            seconds = min(seconds, self.LONGEST * (fixed + per_token * tokens))
        self.sums = self.FORGETTING * self.sums + np.array([1, tokens, seconds, tokens**2, tokens * seconds])

    @property
    def line(self) -> tuple[float, float]:
        """The (fixed seconds, seconds per token), neither below 0; both 0 before the first step."""
        count, tokens, seconds, square, product = self.sums.tolist()
        if count == 0 or tokens == 0:
            return 0.0, 0.0
        mean, usual = tokens / count, seconds / count
        pull = self.ORIGIN_WEIGHT * mean
        slope = (product / count - mean * usual + pull * usual) / (square / count - mean**2 + pull * mean)
        slope = float(np.clip(slope, 0.0, usual / mean))
        return float(usual - slope * mean), slope


class KeepController:
    """Moves `keep` towards the best noise-equivalent speed-up, a little after each step.

    The first step of a run, or after it is resumed, warms up caches and compiles kernels: `observe` is not to be told
    of it.
    """

    def __init__(self) -> None:
        """Start at FIRST_KEEP."""
        self.keep = FIRST_KEEP
        self.update_time = UpdateTime()
        self.rollout_seconds = 0.0
        self.tokens_per_keep = 0.0
        self.inflation = np.zeros(GRID.size)
        self.weight = 0.0
        self.steps = 0

    def observe(
        self, rollout_seconds: float, update_seconds: float, tokens: float, keep: float, inflation: Array
    ) -> None:
        """Learn from a finished step, and choose the keep of the next.

        Args:
            rollout_seconds: time of generation.
            update_seconds: time of old and reference log-probs and update, as it was: on what was kept.
            tokens: tokens that these processed.
            keep: the share of the informative tokens that the draw of that step kept in expectation, in (0, 1].
            inflation: from `inflation_curve`.
        """
        self.update_time.observe(tokens, update_seconds)
        self.rollout_seconds = FORGETTING * self.rollout_seconds + rollout_seconds
        self.tokens_per_keep = FORGETTING * self.tokens_per_keep + tokens / keep
        self.inflation = FORGETTING * self.inflation + inflation
        self.weight = FORGETTING * self.weight + 1
        self.steps += 1
        if self.steps > STEPS_BEFORE_MOVING:
            change = np.clip(self.best() - self.keep, -LARGEST_CHANGE, LARGEST_CHANGE)
            self.keep = float(np.clip(self.keep + change, LOWEST_KEEP, HIGHEST_KEEP))

    def best(self) -> float:
        """The keep with the largest S, by what was observed; f0 moves the value of S, not the best keep."""
        fixed, per_token = self.update_time.line
        update = fixed + per_token * self.tokens_per_keep / self.weight * FINE_GRID
        rho = CAUTION * _between_knots(self.inflation / self.weight)
        return float(FINE_GRID[np.argmin((self.rollout_seconds / self.weight + update) * (1 + rho))])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as plain numbers and lists."""
        return {
            "keep": self.keep,
            "steps": self.steps,
            "weight": self.weight,
            "rollout_seconds": self.rollout_seconds,
            "tokens_per_keep": self.tokens_per_keep,
            "update_time_sums": self.update_time.sums.tolist(),
            "inflation": self.inflation.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            KeyError, ValueError, TypeError: another grid of budgets than this version's, or figures that no run could
                have left.
        """
        inflation = np.array(state["inflation"], dtype=np.float64)
        sums = np.array(state["update_time_sums"], dtype=np.float64)
        if inflation.shape != GRID.shape or sums.shape != self.update_time.sums.shape:
            raise ValueError(
                f"the saved budget has {inflation.size} and {sums.size} figures, this version reads {GRID.size} and 5"
            )
        names = ("keep", "steps", "weight", "rollout_seconds", "tokens_per_keep")
        figures = np.array([*(float(state[name]) for name in names), *sums, *inflation])
        if not (np.isfinite(figures) & (figures >= 0)).all() or not LOWEST_KEEP <= figures[0] <= HIGHEST_KEEP:
            raise ValueError(f"the saved budget has a keep of {figures[0]}, or figures that no run leaves")
        self.keep, self.steps, self.weight = float(state["keep"]), int(state["steps"]), float(state["weight"])
        self.rollout_seconds, self.tokens_per_keep = float(state["rollout_seconds"]), float(state["tokens_per_keep"])
        self.update_time.sums = sums * min(1.0, UpdateTime.REMEMBERED_STEPS / max(sums[0], 1.0))
        self.inflation = inflation
