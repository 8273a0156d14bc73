"""How well history predicts what a step's prompts are worth, and the share of prompts to keep that follows from it.

Skipping prompts to a share `keep` multiplies all that a full-batch-equivalent step costs by keep, and the noise of its
gradient by 1 + rho(keep). With both levels together 1 + rho = (1 + rho_prompts)(1 + rho_completions), so that the best
noise-equivalent speed-up is had where each level is at its own best: the prompts where keep * (1 + rho_prompts(keep))
is least, whatever the phases of a step cost. That is 1 for keep = 1, and never less where history predicts nothing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_dppo.pruning.prompts import prompt_inclusion

Array = NDArray[np.float64]

LOWEST_PROMPT_KEEP = 0.5
PROMPT_GRID = np.linspace(LOWEST_PROMPT_KEEP, 1.0, 26)
LARGEST_CHANGE = 0.02
FORGETTING = 0.97
"""A step counts this much less with every later one: some thirty steps are remembered. Gradient energies scatter."""
STEPS_BEFORE_MOVING = 5
CAUTION = 1.1
"""What rho is taken times when a share is chosen: skipping at random, which is worth nothing, must not look free."""


def prompt_inflation(pi: Array, energy: Array) -> float:
    """Estimate rho of the prompt level, the variance added by its draw over that of the rollouts.

    That is sum_q (1/pi_q - 1) e_q / sum_q e_q over all candidates, each sum estimated from the kept by 1/pi_q.

    Args:
        pi: (k,) probability with which each kept prompt was drawn.
        energy: (k,) squared gradient norm of its group, up to a common factor.
    """
    whole = float((energy / pi).sum())
    return float((energy / pi * (1 / pi - 1)).sum()) / whole if whole else 0.0


def skipped_energy(pi: Array, energy: Array) -> float:
    """Estimate the share of the candidates' gradient energy that was skipped, from the kept: see `prompt_inflation`."""
    whole = float((energy / pi).sum())
    return float((energy * (1 / pi - 1)).sum()) / whole if whole else 0.0


def rank_correlation(one: Array, other: Array) -> float:
    """Return Spearman's correlation, ties sharing their mean rank; 0 where one of them does not vary."""

    def ranks(values: Array) -> Array:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        upper = np.cumsum(counts)
        return (upper - (counts - 1) / 2)[inverse]

    a, b = ranks(one), ranks(other)
    if a.size < 2 or a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


class PromptKeepController:
    """Moves the share of prompts that are kept, a little after each step, from past steps alone.

    It starts at 1: history has to prove first that it predicts.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.keep = 1.0
        self.steps = 0
        self.energy = 0.0
        self.weighted = np.zeros(PROMPT_GRID.size)

    def observe(
        self, spread: Array, floor: float, rule: str, kept: NDArray[np.bool_], pi: Array, energy: Array
    ) -> None:
        """Learn from a step all of whose candidates were known, and choose the share of the next.

        Args:
            spread: (N,) of the candidates, as it was before the step.
            floor: smallest probability.
            rule: see `prompt_inclusion`.
            kept: (N,) bool, those of which an energy was measured.
            pi: (N,) probability with which each was to be kept.
            energy: (kept,) squared gradient norm of each group.
        """
        known = np.ones(spread.size, dtype=bool)
        estimate = energy / pi[kept]
        weighted = [
            float((estimate / prompt_inclusion(spread, known, keep * spread.size, min(floor, keep), rule)[kept]).sum())
            for keep in PROMPT_GRID
        ]
        self.energy = FORGETTING * self.energy + float(estimate.sum())
        self.weighted = FORGETTING * self.weighted + np.array(weighted)
        self.steps += 1
        if self.steps > STEPS_BEFORE_MOVING and self.energy > 0:
            self.keep += float(np.clip(self.best() - self.keep, -LARGEST_CHANGE, LARGEST_CHANGE))

    def cost(self, caution: float = CAUTION) -> Array:
        """Return keep * (1 + caution * rho(keep)) on PROMPT_GRID, as past steps show it."""
        rho = self.weighted / self.energy - 1 if self.energy else 1 / PROMPT_GRID - 1
        return PROMPT_GRID * (1 + caution * rho)

    def best(self) -> float:
        """The share with the least cost."""
        return float(PROMPT_GRID[np.argmin(self.cost())])

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as plain numbers and lists."""
        return {
            "keep": self.keep,
            "steps": self.steps,
            "energy": self.energy,
            "weighted": self.weighted.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            KeyError, ValueError, TypeError: another grid than this version's, or figures that no run could have left.
        """
        weighted = np.array(state["weighted"], dtype=np.float64)
        if weighted.shape != PROMPT_GRID.shape:
            raise ValueError(
                f"the saved prompt budget has {weighted.size} figures, this version reads {PROMPT_GRID.size}"
            )
        keep, steps, energy = float(state["keep"]), int(state["steps"]), float(state["energy"])
        figures = np.array([keep, steps, energy, *weighted])
        if not (np.isfinite(figures) & (figures >= 0)).all() or not LOWEST_PROMPT_KEEP <= keep <= 1:
            raise ValueError(f"the saved prompt budget has a keep of {keep}, or figures that no run leaves")
        self.keep, self.steps, self.energy, self.weighted = keep, steps, energy, weighted
