"""What is enumerated: six completions of two prompts, the algorithms that train on them, and how they are laid out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos

from verl_dppo.training.loss import EXACT_AGG_MODES

PROMPT = [3, 4, 5, 3, 4, 5]
RESPONSE = [2, 7, 4, 6, 3, 5]
GROUP = [0, 0, 0, 1, 1, 1]
SCORE = [1.0, 0.0, 0.3, 0.1, 1.0, 0.2]
PI = [0.2, 0.6, 0.5, 0.9, 0.3, 0.5]
ROWS = len(PI)
MEMBERS = {1: [[0, 1, 2, 3, 4, 5]], 2: [[0, 2, 4], [1, 3, 5]]}
"""Rows of each mini-batch, by number of mini-batches. PI sums to 3, and to 1 and 2: draws of a fixed size exist."""
PROMPTS = [[0, 1, 2], [3, 4, 5]]
"""Rows of each prompt, where prompts are drawn, too."""
PROMPT_PI = [0.4, 0.6]
DEALT_PROMPTS = {1: [[0, 1]], 2: [[0], [1]]}
"""Prompts of each mini-batch, by number of mini-batches. PROMPT_PI sums to 1: one of the two can be kept for sure."""
TOKENS_PER_PROMPT = 11.0
"""What a candidate counts for with token-mean: a figure of earlier steps, not that of these two."""


def _group_relative(normalized: bool) -> torch.Tensor:
    return core_algos.compute_grpo_outcome_advantage(
        torch.tensor(SCORE, dtype=torch.float64)[:, None],
        torch.ones(ROWS, 1),
        np.array(GROUP),
        norm_adv_by_std_in_grpo=normalized,
    )[0][:, 0]


def _leave_one_out() -> torch.Tensor:
    return core_algos.compute_rloo_outcome_advantage(
        torch.tensor(SCORE, dtype=torch.float64)[:, None], torch.ones(ROWS, 1), np.array(GROUP)
    )[0][:, 0]


@dataclass(frozen=True)
class Algorithm:
    """A base algorithm as verl is told of it: settings of the actor, and advantages of the full groups."""

    advantages: Callable[[], torch.Tensor]
    agg_mode: str
    loss_mode: str = "vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2


ALGORITHMS = {
    "grpo": Algorithm(lambda: _group_relative(True), "token-mean"),
    "dr_grpo": Algorithm(lambda: _group_relative(False), "seq-mean-token-sum-norm"),
    "dapo": Algorithm(lambda: _group_relative(True), "token-mean", clip_high=0.28),
    "gspo": Algorithm(lambda: _group_relative(True), "seq-mean-token-mean", "gspo", 0.03, 0.04),
    "rloo": Algorithm(_leave_one_out, "seq-mean-token-sum"),
}


@dataclass(frozen=True)
class Case:
    """One enumeration. `fault` names what is done wrong on purpose.

    Attributes:
        agg_mode: the algorithm's own where empty.
        micro: rows of a micro-batch; 0 lets verl make micro-batches by tokens.
        two_levels: prompts are drawn by `design`, then completions of those that are kept, independently.
    """

    algorithm: str = "grpo"
    agg_mode: str = ""
    kl: bool = True
    entropy: bool = True
    design: str = "fixed_size"
    mini_batches: int = 1
    micro: int = 1
    dtype: str = "float64"
    two_levels: bool = False
    fault: str = ""

    @property
    def name(self) -> str:
        """A readable key."""
        terms = "".join(("+kl" if self.kl else "", "+entropy" if self.entropy else ""))
        parts = (
            f"{self.algorithm}{terms}",
            self.aggregation,
            self.design,
            f"{self.mini_batches}x",
            f"micro{self.micro or 'tokens'}",
            self.dtype,
            "two levels" if self.two_levels else "",
            self.fault,
        )
        return " ".join(part for part in parts if part)

    @property
    def members(self) -> list[list[int]]:
        """Rows of each mini-batch: a completion is in that of its prompt, where prompts are drawn."""
        if not self.two_levels:
            return MEMBERS[self.mini_batches]
        return [[row for q in prompts for row in PROMPTS[q]] for prompts in DEALT_PROMPTS[self.mini_batches]]

    @property
    def tokens(self) -> list[float]:
        """Response tokens that each mini-batch is divided by: its own, or a constant for each of its prompts."""
        if not self.two_levels:
            return [float(sum(RESPONSE[row] for row in rows)) for rows in self.members]
        return [len(prompts) * TOKENS_PER_PROMPT for prompts in DEALT_PROMPTS[self.mini_batches]]

    @property
    def aggregation(self) -> str:
        """The aggregation mode of policy, KL and entropy terms."""
        return self.agg_mode or ALGORITHMS[self.algorithm].agg_mode

    def actor_settings(self) -> dict[str, Any]:
        """Return what verl's ActorConfig is built from, whatever the engine."""
        algorithm = ALGORITHMS[self.algorithm]
        return {
            "rollout_n": 3,
            "ppo_micro_batch_size_per_gpu": max(1, self.micro),
            "loss_agg_mode": self.aggregation,
            "loss_scale_factor": 7 if self.aggregation == "seq-mean-token-sum-norm" else None,
            "clip_ratio_low": algorithm.clip_low,
            "clip_ratio_high": algorithm.clip_high,
            "use_kl_loss": self.kl,
            "kl_loss_coef": 0.3,
            "entropy_coeff": 0.2 if self.entropy else 0.0,
        }


TERMS = [(False, False), (True, False), (False, True), (True, True)]
EVERY_AGGREGATION = [Case(agg_mode=mode, kl=kl, entropy=h) for mode in EXACT_AGG_MODES for kl, h in TERMS]
# Terms alone are in the list above.
EVERY_ALGORITHM = [Case(name, kl=terms, entropy=terms) for name in ALGORITHMS for terms in (False, True)]
EVERY_LAYOUT = [Case("dapo", mini_batches=k, micro=micro) for k in (1, 2) for micro in (1, 2, 0)]
EVERY_SUBSET = [Case("dapo", design="poisson", mini_batches=k, micro=micro) for k, micro in ((1, 0), (2, 2))]
MINI_BATCHES = [Case(name, mini_batches=2, micro=0) for name in ALGORITHMS]
TWO_LEVELS = [
    Case(agg_mode=mode, two_levels=True, design=design, mini_batches=k, micro=micro)
    for mode in ("token-mean", "seq-mean-token-mean")
    for design, k, micro in (("fixed_size", 1, 1), ("poisson", 2, 0))
]
SINGLE = [replace(case, dtype="float32") for case in MINI_BATCHES]
HALF = [replace(case, dtype="bfloat16") for case in MINI_BATCHES]
FAULTS = [
    Case(fault="weights dropped"),
    Case(fault="tokens of the kept rows"),
    Case("rloo", fault="rows of the kept rows"),
    Case("dapo", mini_batches=2, fault="tokens of the whole batch"),
    Case(two_levels=True, fault="prompt weights left out"),
    Case(two_levels=True, fault="tokens of the kept rows"),
    Case("rloo", two_levels=True, fault="rows of the kept rows"),
]


def unique(*lists: list[Case]) -> list[Case]:
    """Return the cases of all lists, each once."""
    return list(dict.fromkeys(case for cases in lists for case in cases))
