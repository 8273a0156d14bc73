"""The completion level of a run: which completions of a step are trained on, and what is learnt from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig

from verl_dppo.pruning import (
    CompletionPlan,
    KeepController,
    NormRecord,
    chain_order,
    deal_mini_batches,
    inflation_curve,
    neyman_inclusion,
    plan_completions,
    score_magnitude,
    threshold_inclusion,
    token_factor,
)
from verl_dppo.settings import AUTO, DPPOSettings
from verl_dppo.training.full_batch import FullBatch, usual_where_not_finite
from verl_dppo.training.metrics import plan_metrics, update_seconds
from verl_dppo.training.passes import rows_multiple
from verl_dppo.training.prompt_level import PromptsOfRows

# Where KL or entropy terms are on, every completion has a gradient, of a size that |A| does not tell: none is taken for
# smaller than this share of the mean magnitude.
SMALLEST_RELATIVE_MAGNITUDE = 0.05
# Completions whose gradient norm is measured in a step with a probe, each in a micro-batch of its own.
PROBED_COMPLETIONS = 8


@dataclass(frozen=True)
class PlannedStep:
    """What was decided on the completions of a step.

    Attributes:
        full: all n completions of the prompts that were sampled.
        plan: of the completions, with the weights of both levels.
        magnitude: (n,) estimated gradient norms, prompt weights left out.
        prompts: what the prompt level decided.
        tokens: (mini-batches,) response tokens to divide by.
        size: (mini-batches,) completions to divide by.
        metrics: of the draw.
    """

    full: FullBatch
    plan: CompletionPlan
    magnitude: NDArray[np.float64]
    prompts: PromptsOfRows
    tokens: NDArray[np.float64]
    size: NDArray[np.float64]
    metrics: dict[str, float]


class CompletionLevel:
    """Draws the completions of each step. `budget` and `norms` are what it learns, and have states of their own."""

    def __init__(self, settings: DPPOSettings, config: DictConfig) -> None:
        """Begin a run.

        Args:
            settings: validated.
            config: verl's composed configuration.
        """
        self.dppo, self.config = settings, config
        self.budget, self.norms = KeepController(), NormRecord()
        self._warm = False

    # ---- before the draw --------------------------------------------------------------------------------------------

    def magnitude(self, full: FullBatch, part: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (n,) estimated gradient norms, 0 exactly for completions without a gradient.

        Args:
            full: the completions.
            part: (n,) completions whose norms may depend on each other: all of them, or, where it was drawn which
                prompts are there, those of a mini-batch; see `own_rows` of `plan_completions`.
        """
        actor, surprise = self.config.actor_rollout_ref.actor, full.sum_sq_one_minus_p
        magnitude = np.zeros(part.size)
        for rows in (np.flatnonzero(part == k) for k in np.unique(part)):
            norms = score_magnitude(
                full.advantage[rows],
                full.length[rows],
                None if surprise is None else usual_where_not_finite(surprise[rows]),
                _agg_mode_of_policy_loss(actor),
                self.norms.model(),
                full.prompt_length[rows],
            )
            norms = np.where(full.has_advantage[rows], norms, 0.0)
            if actor.use_kl_loss or actor.entropy_coeff:
                least = SMALLEST_RELATIVE_MAGNITUDE * norms.mean() if norms.any() else 1.0
                norms = np.where(full.length[rows] > 0, np.maximum(norms, least), 0.0)
            magnitude[rows] = norms
        return magnitude

    def draw(
        self,
        full: FullBatch,
        magnitude: NDArray[np.float64],
        prompts: PromptsOfRows,
        prunes_completions: bool,
        generator: Callable[[int], np.random.Generator],
    ) -> PlannedStep:
        """Decide what happens to the completions of a step.

        Args:
            full: the completions.
            magnitude: (n,) from `magnitude`.
            prompts: what the prompt level decided.
            prunes_completions: whether this level is on in this step.
            generator: gives those of this step, by the number of the decision.
        """
        keep = self.budget.keep if self.dppo.completion.keep == AUTO else float(self.dppo.completion.keep)
        # A completion's term enters with its prompt's weight, which its own probability has to answer for.
        plan, tokens, size = self._plan(full, magnitude * prompts.weight, keep, prompts, prunes_completions, generator)
        plan = replace(plan, weight=plan.weight * prompts.weight)
        metrics = plan_metrics(full, plan, magnitude, prompts)
        if prunes_completions and self.dppo.completion.rule == "neyman":
            metrics["dppo/keep"] = keep
        return PlannedStep(full, plan, magnitude, prompts, tokens, size, metrics)

    def _plan(
        self,
        full: FullBatch,
        magnitude: NDArray[np.float64],
        keep: float,
        prompts: PromptsOfRows,
        prunes_completions: bool,
        generator: Callable[[int], np.random.Generator],
    ) -> tuple[CompletionPlan, NDArray[np.float64], NDArray[np.float64]]:
        """Return what happens to the completions, and the tokens and completions that each mini-batch is divided by."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.actor
        settings, n = self.dppo.completion, full.length.size
        rows_of_mini_batch = actor.ppo_mini_batch_size * rollout.n
        if prompts.mini_batch is not None:
            mini_batch, mini_batches = prompts.mini_batch, prompts.drawn.size
            drawn = prompts.drawn.astype(np.float64)
            tokens, size = drawn * prompts.tokens_per_prompt, drawn * prompts.completions_per_prompt
        else:
            mini_batches = -(-n // rows_of_mini_batch)
            mini_batch = deal_mini_batches(magnitude > 0, full.group, mini_batches, generator(0))
            tokens = np.bincount(mini_batch, full.length, minlength=mini_batches).astype(np.float64)
            size = np.full(mini_batches, float(rows_of_mini_batch))
        slope = target = np.ones(n)
        if prunes_completions and settings.rule == "threshold":
            paper = threshold_inclusion(np.abs(full.advantage), full.group, settings.drop_rate)
            slope = target = np.where(magnitude > 0, paper, 0.0)
        elif prunes_completions:
            slope = magnitude / np.sqrt(np.maximum(full.length, 1.0))
            target = np.zeros(n)
            for k in range(mini_batches):
                mine = mini_batch == k
                target[mine] = neyman_inclusion(magnitude[mine], full.length[mine], keep, settings.floor)
        plan = plan_completions(
            slope,
            target,
            mini_batch,
            order=_order(full, mini_batch),
            length=full.length,
            advantage=full.advantage * prompts.weight,
            mini_batches=mini_batches,
            multiple=rows_multiple(self.config),
            floor=settings.lowest_pi(keep) if prunes_completions else 1.0,
            design=settings.design if prunes_completions else "pivotal",
            rng=generator(1),
            own_rows=prompts.mini_batch is not None,
        )
        return plan, tokens, size

    # ---- the probe --------------------------------------------------------------------------------------------------

    def probes(self, step: int) -> bool:
        """Whether gradient norms are measured in a step, if it is pruned."""
        every = self.dppo.completion.probe_every
        return self.dppo.prunes_completions and every is not None and step % every == 0

    def probe_sample(
        self, step: PlannedStep, row: NDArray[np.int64], ranks: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.int64], int]:
        """Choose what is measured.

        Args:
            step: as planned.
            row: (m,) completion that each row of the pruned batch is, -1 for rows that are none.
            ranks: data-parallel ranks.
            rng: decides.

        Returns:
            (r,) rows of the pruned batch, those of each rank together, and how many of them are measured.
        """
        drawn = (row >= 0) & (step.plan.weight[row] > 0)
        order = np.lexsort((rng.random(row.size), ~drawn))
        measured = min(PROBED_COMPLETIONS, int(drawn.sum()))
        per_rank = -(-max(measured, 1) // ranks)
        # The first of every rank is measured first: turn i is row i // ranks of rank i % ranks.
        return order[: per_rank * ranks].reshape(per_rank, ranks).T.ravel(), measured

    def record_probe(
        self, number: int, step: PlannedStep, rows: NDArray[np.int64], norm: NDArray[np.float64]
    ) -> dict[str, float]:
        """Remember measured gradient norms for later steps, and compare them with the magnitudes.

        Args:
            number: of the step.
            step: as planned.
            rows: (r,) completions.
            norm: (r,) of each, not finite where it was not measured.

        Returns:
            `dppo/probe/*`.
        """
        full, actor = step.full, self.config.actor_rollout_ref.actor
        found = np.isfinite(norm)
        rows, norm = rows[found], norm[found]
        # With a KL or entropy term the norm is not that of a score function, and no model of it can be fitted.
        surprise = full.sum_sq_one_minus_p
        if surprise is not None:
            surprise = None if actor.use_kl_loss or actor.entropy_coeff else usual_where_not_finite(surprise)
        self.norms.observe(
            number,
            sum_sq_one_minus_p=np.zeros(rows.size) if surprise is None else surprise[rows],
            length=full.length[rows],
            prompt_length=full.prompt_length[rows],
            scale=np.abs(full.advantage[rows]) * token_factor(full.length[rows], _agg_mode_of_policy_loss(actor)),
            magnitude=step.magnitude[rows],
            norm=norm,
            weight=step.plan.weight[rows],
        )
        return {f"dppo/probe/{name}": value for name, value in self.norms.figures().items()}

    # ---- after the step ---------------------------------------------------------------------------------------------

    def learn(self, step: PlannedStep, timing: Mapping[str, float]) -> None:
        """Hand the measured times and the curve of rho of a finished step to the budget of the next."""
        if "update_actor" not in timing:
            return
        if not self._warm:  # the first step of a process loads and compiles; it says nothing of the others
            self._warm = True
            return
        full, settings, pi = step.full, self.dppo.completion, step.plan.pi
        magnitude = step.magnitude * step.prompts.weight
        tokens, seconds = float(full.sequence_length[step.plan.kept].sum()), update_seconds(timing)
        if self.dppo.prunes_completions and settings.rule == "neyman" and pi.any():
            # With few rows this is not the budget: they come in whole multiples of the ranks.
            keep = float((pi * full.length).sum() / full.length[pi > 0].sum())
            curve = inflation_curve(magnitude, full.length, settings.floor)
            self.budget.observe(timing["gen"], seconds, tokens, keep, curve)
        else:
            self.budget.update_time.observe(tokens, seconds)

    def seconds_per_token(self) -> float | None:
        """Return what a token of the update costs as the steps so far show, or None where they do not yet."""
        return self.budget.update_time.line[1] if self.budget.update_time.sums[0] else None


def _agg_mode_of_policy_loss(actor: DictConfig) -> str:
    """Return how the policy term is aggregated; verl's sapo does so in its own way, whatever the setting says."""
    return "seq-mean-token-mean" if actor.policy_loss.get("loss_mode") == "sapo" else str(actor.loss_agg_mode)


def _order(full: FullBatch, mini_batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (n,) a permutation that puts completions with similar gradients side by side in their mini-batch."""
    if full.signature is None:
        return np.lexsort((full.length, np.sign(full.advantage), full.group))
    members = [np.flatnonzero(mini_batch == k) for k in range(int(mini_batch.max()) + 1)]
    return np.concatenate([m[chain_order(full.signature[m], full.advantage[m], full.group[m])] for m in members])
