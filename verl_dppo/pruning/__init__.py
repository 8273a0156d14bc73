"""Which completions to keep, with what probability, and the weight that makes up for it. numpy only."""

from verl_dppo.pruning.inclusion import (
    fixed_size_inclusion,
    neyman_inclusion,
    score_magnitude,
    threshold_inclusion,
)
from verl_dppo.pruning.plan import CompletionPlan, deal_mini_batches, plan_completions
from verl_dppo.pruning.sampling import draw

__all__ = [
    "CompletionPlan",
    "deal_mini_batches",
    "draw",
    "fixed_size_inclusion",
    "neyman_inclusion",
    "plan_completions",
    "score_magnitude",
    "threshold_inclusion",
]
