"""What a step reports under `dppo/*`, and what it makes good among verl's own metrics."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from verl_dppo.pruning import CompletionPlan, variance_inflation
from verl_dppo.training.transform import FullBatch

# Over trained-on rows only, and not to be had for the rest, whose log-probs were never computed.
OF_KEPT_ROWS = ("actor/entropy",)
# What pruning shortens, as verl times it.
SHORTENED_PHASES = ("old_log_prob", "ref", "update_actor")


def plan_metrics(full: FullBatch, plan: CompletionPlan, magnitude: NDArray[np.float64]) -> dict[str, float]:
    """Describe a step's draw.

    Args:
        full: the n completions before pruning.
        plan: what was drawn.
        magnitude: (n,) estimated gradient norms, for the variance inflation.
    """
    n = full.length.size
    drawn, live = plan.weight > 0, plan.pi > 0
    trained = np.zeros(n, dtype=bool)
    trained[plan.kept] = True
    weight = plan.weight[drawn]
    metrics = {
        "prompts_drawn": float(full.group.max() + 1),
        "completions": float(n),
        "informative_fraction": float(live.mean()),
        "kept_completions": float(trained.sum()),
        "kept_fraction": float(trained.mean()),
        "kept_token_fraction": _share(full.length[trained], full.length),
        "kept_informative_token_fraction": _share(full.length[drawn], full.length[live]),
        "trained_sequence_token_fraction": _share(full.sequence_length[trained], full.sequence_length),
        "tokens_saved": float(full.length[~trained].sum()),
        "filler_rows": float(trained.sum() - drawn.sum()),
        "padding_rows": float(sum(plan.padding)),
        "rows_per_mini_batch": float(plan.rows_per_mini_batch),
        "weight_max": float(weight.max(initial=0.0)),
        "weight_mean": float(weight.mean()) if weight.size else 0.0,
        # Its expectation is 1; a drift over many steps would be a fault in the draw.
        "weight_sum_ratio": float(weight.sum() / live.sum()) if live.any() else 1.0,
        "variance_inflation": variance_inflation(plan.pi, magnitude),
    }
    if full.mean_negative_log_prob is not None:
        metrics["full/mean_negative_log_prob"] = full.mean_negative_log_prob
    return {f"dppo/{name}": value for name, value in metrics.items()}


def _share(part: NDArray, whole: NDArray) -> float:
    total = float(whole.sum())
    return float(part.sum()) / total if total else 1.0


def update_seconds(timing: Mapping[str, float]) -> float:
    """Return the seconds of the phases that pruning shortens, from those of each phase as verl names them.

    A probe runs inside verl's timer of the update, and is none of it.
    """
    return sum(timing.get(phase, 0.0) for phase in SHORTENED_PHASES) - timing.get("dppo_probe", 0.0)


def saved_time(
    timing: Mapping[str, float], saved_tokens: float, trained_tokens: float, per_token: float | None, rho: float
) -> dict[str, float]:
    """Tell what pruning saved in this step, in plain time and with the added noise paid for.

    Args:
        timing: seconds of each phase of this step, as verl names them.
        saved_tokens: tokens that log-probs and update did not process.
        trained_tokens: tokens that they did.
        per_token: seconds for each of them as the steps up to this one show, or None where they do not yet.
        rho: the variance inflation.

    Returns:
        `seconds_saved`; `time_ratio`, full step over this one; `noise_equivalent_speedup`, the same when the noise is
        averaged away by more prompts: 1 / ((s + t keep)(1 + rho) + f0) with the shares of rollout, update and the rest.
        No token is taken to cost more than the mean of those that were processed.
    """
    update = update_seconds(timing)
    mean = update / trained_tokens if trained_tokens else 0.0
    saved = saved_tokens * (mean if per_token is None else min(per_token, mean))
    step, rollout = timing["step"], timing.get("gen", 0.0)
    rest = max(step - rollout - update, 0.0)
    return {
        "dppo/seconds_saved": saved,
        "dppo/time_ratio": (step + saved) / step,
        "dppo/noise_equivalent_speedup": (step + saved) / ((rollout + update) * (1 + rho) + rest),
    }


def rename_metrics_of_kept_rows(metrics: dict[str, float]) -> None:
    """Move verl metrics that describe the trained-on rows only to `dppo/kept/*`, in place."""
    for name in OF_KEPT_ROWS:
        if name in metrics:
            metrics[f"dppo/kept/{name}"] = metrics.pop(name)
