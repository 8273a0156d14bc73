"""The DPPO trainer: verl's synchronous v1 trainer, with completions pruned between reward and update. Hooks only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer

from verl_dppo.pruning import (
    CompletionPlan,
    deal_mini_batches,
    neyman_inclusion,
    plan_completions,
    score_magnitude,
    threshold_inclusion,
)
from verl_dppo.training.loss import BATCH_NUM_TOKENS, WEIGHT, dppo_loss
from verl_dppo.training.metrics import plan_metrics, rename_metrics_of_kept_rows, saved_time
from verl_dppo.training.refusals import check_run, rows_multiple
from verl_dppo.training.transform import (
    FullBatch,
    in_submission_order,
    keep_rows,
    prune,
    put_columns,
    read_full_batch,
)

# Where KL or entropy terms are on, every completion has a gradient, of a size that |A| does not tell: none is taken for
# smaller than this share of the mean magnitude.
SMALLEST_RELATIVE_MAGNITUDE = 0.05


@dataclass(frozen=True)
class _Step:
    """What later hooks of the step need to know of its pruning."""

    full: FullBatch
    plan: CompletionPlan
    row_of_key: dict[str, int]
    dropped: KVBatchMeta
    metrics: dict[str, float]


@register_trainer("dppo")
class DPPOTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=dppo`.

    Each step: advantages of full groups, mini-batches dealt, completions drawn, dropped ones removed from the batch
    and the transfer queue; then verl's own log-probs and update, on what is left, with weights 1/pi and un-pruned
    denominators.
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
        super().__init__(config)

    def on_init_end(self) -> None:
        """Install the weighted loss on every worker once the models are there."""
        super().on_init_end()
        if self.dppo.prunes_completions:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(partial(dppo_loss, config=actor))

    def prepare_step(self) -> dict:
        """Forget the prompts of the step before, then submit new ones."""
        self._submitted.clear()
        return super().prepare_step()

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        for uid in batch["uid"]:
            self._submitted.setdefault(str(getattr(uid, "data", uid)), len(self._submitted))
        return batch

    # ---- between reward and log-probs -------------------------------------------------------------------------------

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        self._step = None
        if not self.dppo.prunes_completions:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        with marked_timer("dppo_prune", self.timing_raw):
            return self._prune(batch, metrics)

    def _prune(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = in_submission_order(batch, self._submitted)
        full = read_full_batch(batch, self.config)
        magnitude = self._magnitude(full)
        plan = self._plan(full, magnitude)
        kept, balance = prune(batch, plan, self._data_parallel_size(), self.tokenizer.eos_token_id)
        trained = np.zeros(len(batch), dtype=bool)
        trained[plan.kept] = True
        dropped = keep_rows(batch, np.flatnonzero(~trained))
        if not self.config.trainer.get("rollout_data_dir", None):
            _clear(dropped)
        figures = plan_metrics(full, plan, magnitude)
        row_of_key = {key: row for row, key in enumerate(batch.keys)}
        self._step = _Step(full, plan, row_of_key, dropped, figures)
        metrics.update(figures | balance)
        return kept

    def _magnitude(self, full: FullBatch) -> NDArray[np.float64]:
        """Return (n,) estimated gradient norms, 0 exactly for completions without a gradient."""
        actor = self.config.actor_rollout_ref.actor
        magnitude = score_magnitude(full.advantage, full.length, full.sum_sq_one_minus_p, actor.loss_agg_mode)
        magnitude = np.where(full.has_advantage, magnitude, 0.0)
        if not (actor.use_kl_loss or actor.entropy_coeff):
            return magnitude
        least = SMALLEST_RELATIVE_MAGNITUDE * magnitude.mean() if magnitude.any() else 1.0
        return np.where(full.length > 0, np.maximum(magnitude, least), 0.0)

    def _plan(self, full: FullBatch, magnitude: NDArray[np.float64]) -> CompletionPlan:
        rollout, actor = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.actor
        settings = self.dppo.completion
        n, informative = full.length.size, magnitude > 0
        mini_batches = -(-n // (actor.ppo_mini_batch_size * rollout.n))
        deal, draw = (self._generator(stage) for stage in range(2))
        mini_batch = deal_mini_batches(informative, full.group, mini_batches, deal)
        if settings.rule == "threshold":
            paper = threshold_inclusion(np.abs(full.advantage), full.group, settings.drop_rate)
            slope = target = np.where(informative, paper, 0.0)
        else:
            slope = magnitude / np.sqrt(np.maximum(full.length, 1.0))
            target = np.zeros(n)
            for k in range(mini_batches):
                mine = mini_batch == k
                target[mine] = neyman_inclusion(magnitude[mine], full.length[mine], settings.keep, settings.floor)
        return plan_completions(
            slope,
            target,
            mini_batch,
            order=np.lexsort((full.length, np.sign(full.advantage), full.group)),
            length=full.length,
            mini_batches=mini_batches,
            multiple=rows_multiple(self.config),
            floor=settings.lowest_pi,
            design=settings.design,
            rng=draw,
        )

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
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._step is not None:
            rename_metrics_of_kept_rows(metrics)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """Let verl do what else it does here, then put back the advantages of the full groups, and the weights."""
        batch = super()._compute_advantage(batch, metrics)
        if self._step is None:
            return batch
        full, plan = self._step.full, self._step.plan
        rows = [self._step.row_of_key.get(key) for key in batch.keys]
        tokens = np.bincount(plan.mini_batch, full.length)
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
            BATCH_NUM_TOKENS: torch.tensor(tokens[self._mini_batch_of_rows(len(batch))], dtype=torch.float64),
        }
        return put_columns(batch, columns)

    def _mini_batch_of_rows(self, rows: int) -> NDArray[np.int64]:
        """Return the mini-batch of each row of the pruned batch, from the order that `rank_order` gave it."""
        assert self._step is not None
        mini_batches, ranks = len(self._step.plan.rows), self._data_parallel_size()
        return np.tile(np.repeat(np.arange(mini_batches), rows // (ranks * mini_batches)), ranks)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        if self._step is None:
            return super()._update_actor(batch, metrics)
        with _mini_batches_of(self.actor_rollout_wg, self._step.plan.rows_per_mini_batch):
            return super()._update_actor(batch, metrics)

    # ---- reporting --------------------------------------------------------------------------------------------------

    def _compute_metrics(
        self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
    ) -> None:
        """Let verl compute its metrics, then put those of the full batch in place of those of the survivors."""
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        if self._step is None:
            return
        full = self._step.full
        metrics.update(full.verl_metrics)
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
        trained = self._step.metrics["dppo/trained_sequence_token_fraction"]
        metrics.update(saved_time(timing_raw, trained, self._step.metrics["dppo/variance_inflation"]))

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


def _clear(batch: KVBatchMeta) -> None:
    if len(batch):
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


@contextmanager
def _mini_batches_of(worker_group: Any, rows: int) -> Iterator[None]:
    """Let the update of one step cut mini-batches of `rows` rows, where verl counts un-pruned ones.

    `_update_actor` sets the size itself right before it calls the worker group, so it can only be corrected in between.
    `global_batch_size`, the denominator, stays verl's: the un-pruned size.
    """
    of_verl = worker_group.update_actor

    def update_actor(batch: KVBatchMeta) -> Any:
        batch.extra_info["mini_batch_size"] = rows
        return of_verl(batch)

    worker_group.update_actor = update_actor
    try:
        yield
    finally:
        worker_group.update_actor = of_verl
