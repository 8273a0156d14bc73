"""The DPPO trainer: verl's synchronous v1 trainer, with prompts pruned before rollout and completions after it, by
hooks only."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.utils import Role, create_rl_sampler
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.utils.losses import ppo_loss

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
from verl_dppo.settings import AUTO
from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, WEIGHT, dppo_loss
from verl_dppo.training.metrics import (
    over_drawn_prompts,
    plan_metrics,
    rank_seconds,
    rename_metrics_of_kept_rows,
    saved_time,
    update_seconds,
)
from verl_dppo.training.micro_batches import COLUMNS, FOLLOWED
from verl_dppo.training.passes import LOG_PROB, REFERENCE_LOG_PROB, UPDATE, rows_multiple
from verl_dppo.training.probe import MEASURED, NORM
from verl_dppo.training.prompt_level import PromptLevel, PromptsOfRows
from verl_dppo.training.refusals import check_run
from verl_dppo.training.state import Stateful, load_state, save_state
from verl_dppo.training.step_order import StepOrder
from verl_dppo.training.transform import (
    FullBatch,
    in_submission_order,
    keep_rows,
    order_for_ranks,
    prune,
    put_columns,
    read_full_batch,
    usual_where_not_finite,
)
from verl_dppo.training.worker import BUSY_SECONDS, WALL_SECONDS, DPPOWorker

# Where KL or entropy terms are on, every completion has a gradient, of a size that |A| does not tell: none is taken for
# smaller than this share of the mean magnitude.
SMALLEST_RELATIVE_MAGNITUDE = 0.05
# Completions whose gradient norm is measured in a step with a probe, each in a micro-batch of its own.
PROBED_COMPLETIONS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """What later hooks of the step need to know of its pruning.

    Attributes:
        full: all n completions of the prompts that were sampled.
        plan: of the completions, with the weights of both levels.
        magnitude: (n,) estimated gradient norms, prompt weights left out.
        prompts: what the prompt level decided.
        tokens: (mini-batches,) response tokens to divide by.
        size: (mini-batches,) completions to divide by.
        row_of_key: place of each completion in `full`.
        dropped: completions that are not trained on.
        metrics: of the draw.
    """

    full: FullBatch
    plan: CompletionPlan
    magnitude: NDArray[np.float64]
    prompts: PromptsOfRows
    tokens: NDArray[np.float64]
    size: NDArray[np.float64]
    row_of_key: dict[str, int]
    dropped: KVBatchMeta
    metrics: dict[str, float]


@register_trainer("dppo")
class DPPOTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=dppo`.

    Each step: prompts drawn and those that are kept sampled; advantages of full groups, mini-batches dealt, completions
    drawn, dropped ones removed from the batch and the transfer queue; then verl's own log-probs and update, on what is
    left, with weights 1/pi and un-pruned denominators.
    """

    def __init__(self, config: DictConfig) -> None:
        """Check the run and build verl's trainer; see `PPOTrainer` for the arguments.

        Raises:
            RefusedSettingError: something that DPPO would train wrongly, before any worker starts.
        """
        self.dppo = check_run(config)
        # verl compares the mode's name to decide what is synchronous.
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
        self._submitted: dict[str, int] = {}
        self._step: _Step | None = None
        self._weighted = False
        self._budget = KeepController()
        self._norms = NormRecord()
        self._remembered: dict[str, Stateful] = {"budget": self._budget, "norms": self._norms}
        self._warm = False
        self._prompts: PromptLevel | None = None
        self._order: StepOrder | None = None
        super().__init__(config)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.dppo.orders:
            self._order = StepOrder(self.dppo, self.config)

    def _init_dataloader(self) -> None:
        """Let verl load its data, and name the prompts where they are pruned.

        Its training loader makes way for one that yields what each step draws; the order is that of verl's sampler,
        pass after pass.
        """
        super()._init_dataloader()
        if not self.dppo.prunes_prompts:
            return
        sampler = create_rl_sampler(self.config.data, self.train_dataset)
        self._prompts = PromptLevel(
            self.dppo, self.config, self.train_dataset, lambda: np.fromiter(sampler, dtype=np.int64)
        )
        self._remembered["prompts"] = self._prompts
        self.train_dataloader = _DrawnPrompts(self._draw_prompts)
        self._plan_steps(done=0)
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def _plan_steps(self, done: int) -> None:
        """Plan the steps that all passes over the data set take, or fewer, if the user gave a number."""
        if self._prompts is None:
            return
        planned, given = self._prompts.planned_steps(done), self.config.trainer.total_training_steps
        self.total_training_steps = planned if given is None else min(planned, int(given))
        # verl ends a run after so many epochs of this length, too, and does not take that step for the last one.
        self.steps_per_epoch = -(-self.total_training_steps // self._prompts.epochs)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.dppo.orders or (self.dppo.prunes_completions and self.dppo.completion.probe_every):
            for role in (Role.ActorRollout, Role.ActorRolloutRef):
                if role in self.role_worker_mapping:
                    self.role_worker_mapping[role] = ray.remote(DPPOWorker)

    def _use_weighted_loss(self, weighted: bool) -> None:
        """Give the workers the weighted loss, or verl's own, where they do not have it yet."""
        if weighted != self._weighted:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(partial(dppo_loss if weighted else ppo_loss, config=actor))
            self._weighted = weighted

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        """Add what the next step depends on to verl's checkpoint, before verl marks it as complete."""
        if self.dppo.prunes:
            folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            if self._prompts is not None:
                self._prompts.save(folder)
            save_state(folder, self._remembered)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.dppo.prunes or not self.global_steps:
            return
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        if self.config.trainer.resume_mode == "resume_path":
            folder = self.config.trainer.resume_from_path
        found = load_state(folder, self._remembered, optional=frozenset({"prompts"}))
        if not found:
            logger.warning("%s holds no state of DPPO: its budget and norm model start afresh", folder)
        if self._prompts is not None:
            if "prompts" in found:
                logger.warning("%s: %s", folder, self._prompts.load(folder))
            else:
                self._prompts.follow(self.global_steps)
                logger.warning("%s holds no prompt history: nothing is known of any prompt yet", folder)
            self._plan_steps(self.global_steps)

    # ---- submission -------------------------------------------------------------------------------------------------

    def prepare_step(self) -> dict:
        """Forget the prompts of the step before, then draw and submit new ones."""
        self._submitted.clear()
        return super().prepare_step()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """Run verl's step, then learn for the next ones what it cost."""
        batch = super().step(metrics, timing_raw)
        if self._step is not None:
            self._learn(self._step, timing_raw)
        self._plan_steps(self.global_steps)
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        """Wait for exactly what was submitted: the replay buffer would wait for more for ever."""
        if self._prompts is not None:
            sample_batch_size = len(self._submitted)
        return super()._step_once(metrics, timing_raw, sample_batch_size)

    def _draw_prompts(self) -> dict[str, Any]:
        assert self._prompts is not None
        return self._prompts.next_batch(self._annealed(), self._generator(3), self._generator(4))

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        for uid in batch["uid"]:
            self._submitted.setdefault(str(getattr(uid, "data", uid)), len(self._submitted))
        return batch

    # ---- between reward and log-probs -------------------------------------------------------------------------------

    def _annealed(self) -> bool:
        return self.dppo.anneals(self.global_steps, self.total_training_steps)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        self._step = None
        made = self._prompts.submission if self._prompts is not None else None
        prunes_completions = self.dppo.prunes_completions and not self._annealed()
        pruned = prunes_completions or (made is not None and made.plan.pruned)
        self._use_weighted_loss(pruned)
        if made is None and not pruned:
            return self._arrange_whole(super()._balance_batch(batch, metrics, *args, **kwargs), metrics)
        with marked_timer("dppo_prune", self.timing_raw):
            batch = in_submission_order(batch, self._submitted)
            full = read_full_batch(batch, self.config)
            prompts, part = PromptsOfRows.all_of(full.group), np.zeros(len(batch), dtype=np.int64)
            if made is not None and self._prompts is not None:
                prompt = np.array([self._submitted[key.rsplit("_", 2)[0]] for key in batch.keys])
                if made.plan.pruned:
                    part = made.mini_batch[prompt]
                magnitude = self._magnitude(full, part)
                prompts, figures = self._prompts.observe(self.global_steps, full, prompt, magnitude)
                metrics.update(figures)
            else:
                magnitude = self._magnitude(full, part)
            if pruned:
                return self._prune(batch, metrics, full, magnitude, prompts, prunes_completions)
        return self._arrange_whole(super()._balance_batch(batch, metrics, *args, **kwargs), metrics)

    def _arrange_whole(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Order a batch that is not pruned; its mini-batches are those that verl would cut."""
        rows = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        # In steps without an update (trainer.critic_warmup) verl does not fill the last mini-batch up.
        mini_batches = 1 if len(batch) % rows else len(batch) // rows
        return self._arrange(batch, metrics, self._mini_batch_of_rows(len(batch), mini_batches))

    def _arrange(self, batch: KVBatchMeta, metrics: dict, mini_batch: NDArray[np.int64]) -> KVBatchMeta:
        """Order the rows of a batch, of which these are the mini-batches, for ranks and micro-batches."""
        if self._order is None:
            return batch
        with marked_timer("dppo_order", self.timing_raw):
            ranks, eos = self._data_parallel_size(), self.tokenizer.eos_token_id
            batch, figures = self._order.arrange(batch, mini_batch, ranks, eos)
        metrics.update(figures)
        return batch

    def _follow_plan(self, batch: KVBatchMeta, name: str) -> None:
        """Tell the workers which column to take the micro-batches of the next pass from, or none."""
        batch.extra_info.pop(FOLLOWED, None)
        if self._order is not None and name in self._order.passes:
            batch.extra_info[FOLLOWED] = COLUMNS[name]

    def _prune(
        self,
        batch: KVBatchMeta,
        metrics: dict,
        full: FullBatch,
        magnitude: NDArray[np.float64],
        prompts: PromptsOfRows,
        prunes_completions: bool,
    ) -> KVBatchMeta:
        keep = self._budget.keep if self.dppo.completion.keep == AUTO else float(self.dppo.completion.keep)
        # A completion's term enters with its prompt's weight, which its own probability has to answer for.
        plan, tokens, size = self._plan(full, magnitude * prompts.weight, keep, prompts, prunes_completions)
        kept, mini_batch = prune(batch, plan, self.tokenizer.eos_token_id)
        trained = np.zeros(len(batch), dtype=bool)
        trained[plan.kept] = True
        dropped = keep_rows(batch, np.flatnonzero(~trained))
        if not self.config.trainer.get("rollout_data_dir", None):
            _clear(dropped)
        plan = replace(plan, weight=plan.weight * prompts.weight)
        figures = plan_metrics(full, plan, magnitude, prompts)
        row_of_key = {key: row for row, key in enumerate(batch.keys)}
        self._step = _Step(full, plan, magnitude, prompts, tokens, size, row_of_key, dropped, figures)
        metrics.update(figures)
        if not (self.dppo.orders and self.dppo.balance.enable):
            metrics.update(order_for_ranks(kept, mini_batch, self._data_parallel_size()))
            mini_batch = self._mini_batch_of_rows(len(kept), len(plan.rows))
        kept = self._arrange(kept, metrics, mini_batch)
        if prunes_completions and self.dppo.completion.rule == "neyman":
            metrics["dppo/keep"] = keep
        return kept

    def _magnitude(self, full: FullBatch, part: NDArray[np.int64]) -> NDArray[np.float64]:
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
                self._norms.model(),
                full.prompt_length[rows],
            )
            norms = np.where(full.has_advantage[rows], norms, 0.0)
            if actor.use_kl_loss or actor.entropy_coeff:
                least = SMALLEST_RELATIVE_MAGNITUDE * norms.mean() if norms.any() else 1.0
                norms = np.where(full.length[rows] > 0, np.maximum(norms, least), 0.0)
            magnitude[rows] = norms
        return magnitude

    def _plan(
        self,
        full: FullBatch,
        magnitude: NDArray[np.float64],
        keep: float,
        prompts: PromptsOfRows,
        prunes_completions: bool,
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
            mini_batch = deal_mini_batches(magnitude > 0, full.group, mini_batches, self._generator(0))
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
            rng=self._generator(1),
            own_rows=prompts.mini_batch is not None,
        )
        return plan, tokens, size

    def _generator(self, stage: int) -> np.random.Generator:
        """Return the generator of one decision of this step, a function of seed and step: a resumed run repeats it."""
        return np.random.default_rng([self.dppo.seed, self.global_steps, self.local_trigger_step, stage])

    def _data_parallel_size(self) -> int:
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return max(group._dispatch_info["actor"]) + 1

    # ---- on what was kept -------------------------------------------------------------------------------------------

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._follow_plan(batch, LOG_PROB)
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._step is not None:
            rename_metrics_of_kept_rows(metrics)
        return batch

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self._follow_plan(batch, LOG_PROB if self.ref_in_actor else REFERENCE_LOG_PROB)
        return super()._compute_ref_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Let verl do what else it does here, then put back the advantages of the full groups, and the weights."""
        batch = super()._compute_advantage(batch, metrics)
        if self._step is None:
            return batch
        full, plan = self._step.full, self._step.plan
        rows = [self._step.row_of_key.get(key) for key in batch.keys]
        mini_batch = self._mini_batch_of_rows(len(batch), len(plan.rows))
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        advantage = [
            mask.float() * (0.0 if row is None else full.advantage[row])
            for mask, row in zip(data["response_mask"].unbind(), rows, strict=True)
        ]
        nested = torch.nested.as_nested_tensor(advantage, layout=torch.jagged)
        columns = {
            "advantages": nested,
            "returns": nested.clone(),
            WEIGHT: torch.tensor([0.0 if r is None else plan.weight[r] for r in rows], dtype=torch.float64),
            BATCH_NUM_TOKENS: torch.tensor(self._step.tokens[mini_batch], dtype=torch.float64),
            GLOBAL_BATCH_SIZE: torch.tensor(self._step.size[mini_batch], dtype=torch.float64),
        }
        return put_columns(batch, columns)

    def _mini_batch_of_rows(self, rows: int, mini_batches: int) -> NDArray[np.int64]:
        """Return the mini-batch of each row, from its place: each rank has its part of all of them in turn."""
        ranks = self._data_parallel_size()
        return np.tile(np.repeat(np.arange(mini_batches), rows // (ranks * mini_batches)), ranks)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        rows = None
        if self._step is not None:
            rows = len(batch) // len(self._step.plan.rows)
            every = self.dppo.completion.probe_every if self.dppo.prunes_completions else None
            if every and self.global_steps % every == 0:
                with marked_timer("dppo_probe", self.timing_raw):
                    metrics.update(self._probe(batch))
        self._follow_plan(batch, UPDATE)
        with _around_update(self.actor_rollout_wg, rows, metrics if self._order is not None else {}):
            return super()._update_actor(batch, metrics)

    def _probe(self, batch: KVBatchMeta) -> dict[str, float]:
        """Measure the gradient norms of a few drawn completions, remember them for later steps, and compare."""
        assert self._step is not None
        full, plan, actor = self._step.full, self._step.plan, self.config.actor_rollout_ref.actor
        row = np.array([self._step.row_of_key.get(key, -1) for key in batch.keys])
        drawn = (row >= 0) & (plan.weight[row] > 0)
        order = np.lexsort((self._generator(2).random(len(batch)), ~drawn))
        ranks = self._data_parallel_size()
        measured = min(PROBED_COMPLETIONS, int(drawn.sum()))
        per_rank = -(-max(measured, 1) // ranks)
        # The first of every rank is measured first: turn i is row i // ranks of rank i % ranks.
        turns = order[: per_rank * ranks].reshape(per_rank, ranks)
        sample = keep_rows(batch, turns.T.ravel())
        sample.extra_info = {
            "calculate_entropy": bool(actor.calculate_entropy or actor.entropy_coeff),
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            MEASURED: measured,
        }
        written = self.actor_rollout_wg.probe_gradient_norms(sample)
        data = tq.kv_batch_get(keys=written.keys, partition_id=batch.partition_id, select_fields=[NORM])
        rows = np.array([self._step.row_of_key.get(key, -1) for key in written.keys])
        norm = data[NORM].double().numpy()
        found = np.isfinite(norm)
        rows, norm = rows[found], norm[found]
        # With a KL or entropy term the norm is not that of a score function, and no model of it can be fitted.
        surprise = full.sum_sq_one_minus_p
        if surprise is not None:
            surprise = None if actor.use_kl_loss or actor.entropy_coeff else usual_where_not_finite(surprise)
        self._norms.observe(
            self.global_steps,
            sum_sq_one_minus_p=np.zeros(rows.size) if surprise is None else surprise[rows],
            length=full.length[rows],
            prompt_length=full.prompt_length[rows],
            scale=np.abs(full.advantage[rows]) * token_factor(full.length[rows], _agg_mode_of_policy_loss(actor)),
            magnitude=self._step.magnitude[rows],
            norm=norm,
            weight=plan.weight[rows],
        )
        return {f"dppo/probe/{name}": value for name, value in self._norms.figures().items()}

    def _learn(self, step: _Step, timing: dict[str, float]) -> None:
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
            self._budget.observe(timing["gen"], seconds, tokens, keep, curve)
        else:
            self._budget.update_time.observe(tokens, seconds)

    # ---- reporting --------------------------------------------------------------------------------------------------

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        """Let verl compute its metrics, then put those of the full batch in place of those of the survivors."""
        if self._prompts is not None and self._prompts.submission is not None:
            epoch = self._prompts.submission.epoch
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        if self._step is None:
            return
        full, prompts = self._step.full, self._step.prompts
        metrics.update(full.verl_metrics)
        if prompts.mini_batch is not None:
            metrics.update(over_drawn_prompts(full, prompts.weight))
        lengths = TensorDict(
            {
                "prompt_length": torch.tensor(full.prompt_length),
                "response_length": torch.tensor(full.sequence_length - full.prompt_length),
            },
            batch_size=full.length.size,
        )
        proto = DataProto(batch=lengths, meta_info={"global_token_num": full.sequence_length.tolist()})
        metrics.update(compute_timing_metrics(proto, timing_raw))
        metrics.update(compute_throughout_metrics(proto, timing_raw, self._get_n_gpus_for_throughput()))
        whole = float((prompts.weight * full.sequence_length).sum())
        trained = float(full.sequence_length[self._step.plan.kept].sum())
        rollout_ratio = whole / max(float(full.sequence_length.sum()), 1.0)
        per_token = self._budget.update_time.line[1] if self._budget.update_time.sums[0] else None
        rho = self._step.metrics["dppo/variance_inflation"]
        metrics.update(saved_time(timing_raw, rollout_ratio, whole - trained, trained, per_token, rho))

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict, rollout_data_dir: str) -> None:
        """Dump the full batch: dropped completions stayed in the queue for it."""
        if self._step is None:
            super()._log_rollout_data(batch, timing_raw, rollout_data_dir)
            return
        dropped = self._step.dropped
        real = [i for i, key in enumerate(batch.keys) if key in self._step.row_of_key]
        everything = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=[batch.keys[i] for i in real] + dropped.keys,
            tags=[batch.tags[i] for i in real] + dropped.tags,
        )
        super()._log_rollout_data(everything, timing_raw, rollout_data_dir)
        _clear(dropped)


class _DrawnPrompts:
    """What verl takes for its training loader where prompts are pruned: each fetch is what one step keeps."""

    def __init__(self, draw: Callable[[], dict[str, Any]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.draw, None)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is saved with the history. verl's own loader takes it for a new pass."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Pass over the state of verl's own loader, which a run without prompt pruning left."""


def _agg_mode_of_policy_loss(actor: DictConfig) -> str:
    """Return how the policy term is aggregated; verl's sapo does so in its own way, whatever the setting says."""
    return "seq-mean-token-mean" if actor.policy_loss.get("loss_mode") == "sapo" else str(actor.loss_agg_mode)


def _order(full: FullBatch, mini_batch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (n,) a permutation that puts completions with similar gradients side by side in their mini-batch."""
    if full.signature is None:
        return np.lexsort((full.length, np.sign(full.advantage), full.group))
    members = [np.flatnonzero(mini_batch == k) for k in range(int(mini_batch.max()) + 1)]
    return np.concatenate([m[chain_order(full.signature[m], full.advantage[m], full.group[m])] for m in members])


def _clear(batch: KVBatchMeta) -> None:
    if len(batch):
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


@contextmanager
def _around_update(worker_group: Any, rows: int | None, metrics: dict) -> Iterator[None]:
    """Correct what the update of one step is asked for, and take our own figures from its answer.

    `_update_actor` sets the size of mini-batches itself right before it calls the worker group, and reads the answer
    right after, so both can only be had in between. What it sets as `global_batch_size` is not used where rows are
    pruned: the denominators come as columns.

    Args:
        worker_group: of the actor.
        rows: rows of a mini-batch, where verl counts un-pruned ones; None: verl is right.
        metrics: where the figures go.
    """
    of_verl = worker_group.update_actor

    def update_actor(batch: KVBatchMeta) -> Any:
        if rows is not None:
            batch.extra_info["mini_batch_size"] = rows
        output = of_verl(batch)
        of_workers = output["metrics"]
        if BUSY_SECONDS in of_workers:
            metrics.update(rank_seconds(of_workers.pop(BUSY_SECONDS), of_workers.pop(WALL_SECONDS, None)))
        return output

    worker_group.update_actor = update_actor
    try:
        yield
    finally:
        worker_group.update_actor = of_verl
