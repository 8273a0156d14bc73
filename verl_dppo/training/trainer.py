"""The DPPO trainer: verl's synchronous v1 trainer, with prompts pruned before rollout and completions after it, by
hooks only."""

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
from verl.utils.debug import marked_timer

from verl_dppo.training.completion_level import PlannedStep
from verl_dppo.training.hooks import DPPOHooks, SubmittedRows, around_update
from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, WEIGHT
from verl_dppo.training.metrics import rename_metrics_of_kept_rows
from verl_dppo.training.micro_batches import COLUMNS, FOLLOWED
from verl_dppo.training.passes import LOG_PROB, REFERENCE_LOG_PROB, UPDATE
from verl_dppo.training.probe import MEASURED, NORM
from verl_dppo.training.refusals import check_run
from verl_dppo.training.step_order import StepOrder
from verl_dppo.training.transform import (
    in_submission_order,
    keep_rows,
    order_for_ranks,
    prune,
    put_columns,
    read_full_batch,
)
from verl_dppo.training.worker import DPPOWorker


@register_trainer("dppo")
class DPPOTrainer(DPPOHooks, PPOTrainerSync):
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
        settings = check_run(config)
        # verl compares the mode's name to decide what is synchronous.
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
        self.config = config
        self.begin_run(settings)
        self._submitted: dict[str, int] = {}
        self._row_of_key: dict[str, int] = {}
        self._dropped: KVBatchMeta | None = None
        super().__init__(config)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.dppo.orders:
            self._order = StepOrder(self.dppo, self.config)

    def _init_dataloader(self) -> None:
        """Let verl load its data, and name the prompts where they are pruned.

        The order of rows is that of verl's sampler, pass after pass.
        """
        super()._init_dataloader()
        if not self.dppo.prunes_prompts:
            return
        sampler = create_rl_sampler(self.config.data, self.train_dataset)
        self.remember_prompts(lambda: np.fromiter(sampler, dtype=np.int64))
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def plan_steps(self, done: int) -> None:
        """Tell verl the length of an epoch, too: it ends a run after so many of them."""
        super().plan_steps(done)
        if self._prompts is not None:
            self.steps_per_epoch = self.drawn_steps_per_epoch

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.dppo.needs_own_worker:
            for role in (Role.ActorRollout, Role.ActorRolloutRef):
                if role in self.role_worker_mapping:
                    self.role_worker_mapping[role] = ray.remote(DPPOWorker)

    # ---- submission -------------------------------------------------------------------------------------------------

    def prepare_step(self) -> dict:
        """Forget the prompts of the step before, then draw and submit new ones."""
        self._submitted.clear()
        return super().prepare_step()

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        """Run verl's step, then learn for the next ones what it cost."""
        batch = super().step(metrics, timing_raw)
        if self._step is not None:
            self._completions.learn(self._step, timing_raw)
        self.plan_steps(self.global_steps)
        return batch

    def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        """Wait for exactly what was submitted: the replay buffer would wait for more for ever."""
        if self._prompts is not None:
            sample_batch_size = len(self._submitted)
        return super()._step_once(metrics, timing_raw, sample_batch_size)

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        batch = super()._next_train_batch(num_prompts)
        for uid in batch["uid"]:
            self._submitted.setdefault(str(getattr(uid, "data", uid)), len(self._submitted))
        return batch

    # ---- between reward and log-probs -------------------------------------------------------------------------------

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict, *args: Any, **kwargs: Any) -> KVBatchMeta:
        def read() -> SubmittedRows:
            in_submission_order(batch, self._submitted)
            prompt = np.array([self._submitted[key.rsplit("_", 2)[0]] for key in batch.keys])
            return read_full_batch(batch, self.config), prompt

        step = self.decide(read, metrics)
        if step is not None:
            return self._prune(batch, metrics, step)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)
        return self._arrange(batch, metrics, self.whole_mini_batches(len(batch)))

    def _arrange(self, batch: KVBatchMeta, metrics: dict, mini_batch: NDArray[np.int64]) -> KVBatchMeta:
        """Order the rows of a batch, of which these are the mini-batches, for ranks and micro-batches."""
        if self._order is None:
            return batch
        with marked_timer("dppo_order", self.timing_raw):
            ranks, eos = self.data_parallel_size(), self.tokenizer.eos_token_id
            batch, figures = self._order.arrange(batch, mini_batch, ranks, eos)
        metrics.update(figures)
        return batch

    def _follow_plan(self, batch: KVBatchMeta, name: str) -> None:
        """Tell the workers which column to take the micro-batches of the next pass from, or none."""
        batch.extra_info.pop(FOLLOWED, None)
        if self._order is not None and name in self._order.passes:
            batch.extra_info[FOLLOWED] = COLUMNS[name]

    def _prune(self, batch: KVBatchMeta, metrics: dict, step: PlannedStep) -> KVBatchMeta:
        with marked_timer("dppo_prune", self.timing_raw):
            kept, mini_batch = prune(batch, step.plan, self.tokenizer.eos_token_id)
            trained = np.zeros(len(batch), dtype=bool)
            trained[step.plan.kept] = True
            self._dropped = keep_rows(batch, np.flatnonzero(~trained))
            if not self.config.trainer.get("rollout_data_dir", None):
                _clear(self._dropped)
            self._row_of_key = {key: row for row, key in enumerate(batch.keys)}
            if not (self.dppo.orders and self.dppo.balance.enable):
                metrics.update(order_for_ranks(kept, mini_batch, self.data_parallel_size()))
                mini_batch = self.mini_batch_of_rows(len(kept), len(step.plan.rows))
        return self._arrange(kept, metrics, mini_batch)

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
        rows = [self._row_of_key.get(key) for key in batch.keys]
        mini_batch = self.mini_batch_of_rows(len(batch), len(plan.rows))
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

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        rows = None
        if self._step is not None:
            rows = len(batch) // len(self._step.plan.rows)
            if self._completions.probes(self.global_steps):
                with marked_timer("dppo_probe", self.timing_raw):
                    metrics.update(self._probe(batch, self._step))
        self._follow_plan(batch, UPDATE)
        with around_update(self.actor_rollout_wg, rows, metrics if self._order is not None else {}):
            return super()._update_actor(batch, metrics)

    def _probe(self, batch: KVBatchMeta, step: PlannedStep) -> dict[str, float]:
        """Measure the gradient norms of a few drawn completions, remember them for later steps, and compare."""
        row = np.array([self._row_of_key.get(key, -1) for key in batch.keys])
        ranks = self.data_parallel_size()
        sampled, measured = self._completions.probe_sample(step, row, ranks, self._generator(2))
        sample = keep_rows(batch, sampled)
        sample.extra_info = {
            **self.probe_settings(),
            MEASURED: measured,
        }
        written = self.actor_rollout_wg.probe_gradient_norms(sample)
        data = tq.kv_batch_get(keys=written.keys, partition_id=batch.partition_id, select_fields=[NORM])
        rows = np.array([self._row_of_key.get(key, -1) for key in written.keys])
        return self._completions.record_probe(self.global_steps, step, rows, data[NORM].double().numpy())

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
        self.report(metrics, timing_raw)

    def _log_rollout_data(self, batch: KVBatchMeta, timing_raw: dict, rollout_data_dir: str) -> None:
        """Dump the full batch: dropped completions stayed in the queue for it."""
        if self._step is None or self._dropped is None:
            super()._log_rollout_data(batch, timing_raw, rollout_data_dir)
            return
        dropped = self._dropped
        real = [i for i, key in enumerate(batch.keys) if key in self._row_of_key]
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
