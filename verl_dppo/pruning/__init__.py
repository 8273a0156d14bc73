"""Which completions to keep, with what probability, and the weight that makes up for it. numpy only."""

from verl_dppo.pruning.budget import KeepController, inflation_curve, variance_inflation
from verl_dppo.pruning.history import PromptHistory
from verl_dppo.pruning.history_file import load_history, save_history
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
from verl_dppo.pruning.progress import planned_steps
from verl_dppo.pruning.prompt_budget import (
    PromptKeepController,
    prompt_inflation,
    rank_correlation,
    skipped_energy,
)
from verl_dppo.pruning.prompts import PromptPlan, candidates, plan_prompts, prompt_inclusion, shrunk_size
from verl_dppo.pruning.sampling import draw
from verl_dppo.pruning.stream import PromptStream

__all__ = [
    "CompletionPlan",
    "KeepController",
    "NormModel",
    "NormRecord",
    "PromptHistory",
    "PromptKeepController",
    "PromptPlan",
    "PromptStream",
    "candidates",
    "chain_order",
    "deal_mini_batches",
    "draw",
    "fit_norm_model",
    "fixed_size_inclusion",
    "inflation_curve",
    "load_history",
    "neyman_inclusion",
    "plan_completions",
    "plan_prompts",
    "planned_steps",
    "prompt_inclusion",
    "prompt_inflation",
    "rank_correlation",
    "save_history",
    "score_magnitude",
    "shrunk_size",
    "skipped_energy",
    "snake_order",
    "surprise_signature",
    "threshold_inclusion",
    "token_factor",
    "variance_inflation",
]
