"""Which completions to keep, with what probability, and the weight that makes up for it. numpy only."""

from verl_dppo.pruning.budget import KeepController, inflation_curve, variance_inflation
from verl_dppo.pruning.inclusion import (
    fixed_size_inclusion,
    neyman_inclusion,
    score_magnitude,
    threshold_inclusion,
    token_factor,
)
from verl_dppo.pruning.norm_model import NormModel, fit_norm_model
from verl_dppo.pruning.norm_record import NormRecord
from verl_dppo.pruning.order import chain_order, snake_order, surprise_signature
from verl_dppo.pruning.plan import CompletionPlan, deal_mini_batches, plan_completions
from verl_dppo.pruning.sampling import draw

__all__ = [
    "CompletionPlan",
    "KeepController",
    "NormModel",
    "NormRecord",
    "chain_order",
    "deal_mini_batches",
    "draw",
    "fit_norm_model",
    "fixed_size_inclusion",
    "inflation_curve",
    "neyman_inclusion",
    "plan_completions",
    "score_magnitude",
    "snake_order",
    "surprise_signature",
    "threshold_inclusion",
    "token_factor",
    "variance_inflation",
]
