"""What a step reports under `dppo/*`, and what it makes good among verl's own metrics."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from verl_dppo.pruning import CompletionPlan, variance_inflation
from verl_dppo.training.full_batch import FullBatch
from verl_dppo.training.prompt_level import PromptsOfRows

# Over trained-on rows only, and not to be had for the rest, whose log-probs were never computed.
OF_KEPT_ROWS = ("actor/entropy",)
# What pruning shortens, as verl times it.
SHORTENED_PHASES = ("old_log_prob", "ref", "update_actor")


def plan_metrics(
    full: FullBatch, plan: CompletionPlan, magnitude: NDArray[np.float64], prompts: PromptsOfRows
) -> dict[str, float]:
    """Describe a step's draw.

    Args:
        full: the n completions that were sampled.
        plan: what was drawn of them, with the weights of both levels.
        magnitude: (n,) estimated gradient norms, for the variance inflation.
        prompts: what the prompt level decided.
    """
    n = full.length.size
    drawn, live, informative = plan.weight > 0, plan.pi > 0, magnitude > 0
    trained = np.zeros(n, dtype=bool)
    trained[plan.kept] = True
    weight = plan.weight[drawn]
    # Of both levels: sum_q (1/pi_q - 1) e_q + sum_q V_q / pi_q over sum_q e_q, each estimated from the kept prompts.
    of_completions = variance_inflation(plan.pi, magnitude * prompts.weight)
    metrics = {
        "prompts_drawn": float(prompts.drawn.sum()),
        "completions": float(n),
        "informative_fraction": float(informative.mean()),
        "kept_completions": float(trained.sum()),
        "kept_fraction": float(trained.mean()),
        "kept_token_fraction": _share(full.length[trained], full.length),
        "kept_informative_token_fraction": _share(full.length[drawn & informative], full.length[informative]),
        "trained_sequence_token_fraction": _share(full.sequence_length[trained], full.sequence_length),
        "tokens_saved": float(full.length[~trained].sum()),
        "filler_rows": float(trained.sum() - drawn.sum()),
        "padding_rows": float(sum(plan.padding)),
        "rows_per_mini_batch": float(plan.rows_per_mini_batch),
        "weight_max": float(weight.max(initial=0.0)),
        "weight_mean": float(weight.mean()) if weight.size else 0.0,
        # Its expectation is 1; a drift over many steps would be a fault in the draw.
        "weight_sum_ratio": float(weight.sum() / prompts.weight[live].sum()) if live.any() else 1.0,
        "variance_inflation": (1 + prompts.inflation) * (1 + of_completions) - 1,
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


def over_drawn_prompts(full: FullBatch, prompt_weight: NDArray[np.float64]) -> dict[str, float]:
    """Estimate verl's means over all drawn prompts from those that were sampled, each counted by its weight.

    The weights are divided by their sum, so that an estimate stays among the values it is made of; its bias is of the
    order of one over the number of prompts.
    """

    def mean(values: NDArray) -> float:
        return float((prompt_weight * values).sum() / prompt_weight.sum())

    reward, advantage = mean(full.reward), float((prompt_weight * full.length * full.advantage).sum())
    advantage /= max(float((prompt_weight * full.length).sum()), 1.0)
    return {
        "critic/score/mean": reward,
        "critic/rewards/mean": reward,
        "critic/advantages/mean": advantage,
        "critic/returns/mean": advantage,
        "response_length/mean": mean(full.sequence_length - full.prompt_length),
        "prompt_length/mean": mean(full.prompt_length),
    }


def saved_time(
    timing: Mapping[str, float],
    rollout_ratio: float,
    saved_tokens: float,
    trained_tokens: float,
    per_token: float | None,
    rho: float,
) -> dict[str, float]:
    """Tell what pruning saved in this step, in plain time and with the added noise paid for.

    Args:
        timing: seconds of each phase of this step, as verl names them.
        rollout_ratio: tokens that the rollout of all drawn prompts would have had, over those that it had.
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
    saved += (rollout_ratio - 1) * rollout
    rest = max(step - rollout - update, 0.0)
    return {
        "dppo/seconds_saved": saved,
        "dppo/time_ratio": (step + saved) / step,
        "dppo/noise_equivalent_speedup": (step + saved) / ((rollout + update) * (1 + rho) + rest),
    }


def rank_seconds(busy: Sequence[Sequence[float]], wall: Sequence[Sequence[float]] | None) -> dict[str, float]:
    """Describe how evenly the ranks worked in an update.

    Args:
        busy: [rank][mini-batch], seconds of work.
        wall: [rank][mini-batch], seconds, waiting for other ranks included; None where work is not counted in them.

    Returns:
        `measured`: makespan over mean of the work, what `dppo/balance/mini_batch_cost` predicts. `waited`, with `wall`:
        the mean share of its time that a rank waited.
    """
    worked = np.array(busy)
    figures = {"dppo/balance/measured": float(worked.max(axis=0).sum() / worked.mean(axis=0).sum())}
    if wall is not None:
        figures["dppo/balance/waited"] = float(1 - worked.sum() / np.sum(wall))
    return figures


def rename_metrics_of_kept_rows(metrics: dict[str, float]) -> None:
    """Move verl metrics that describe the trained-on rows only to `dppo/kept/*`, in place."""
    for name in OF_KEPT_ROWS:
        if name in metrics:
            metrics[f"dppo/kept/{name}"] = metrics.pop(name)
