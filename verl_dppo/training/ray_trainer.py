"""DPPO on verl's `RayPPOTrainer` (`trainer.use_v1=false`), whose batches are DataProtos, by hooks only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer
from verl.utils.seqlen_balancing import log_seqlen_unbalance
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding

from verl_dppo.settings import refuse
from verl_dppo.training.advantage import forget_full_groups, remember_survivors
from verl_dppo.training.completion_level import PlannedStep
from verl_dppo.training.data_proto import (
    MINI_BATCH,
    ROW,
    append_idle_rows,
    lengths,
    prune_data_proto,
    select_rows,
)
from verl_dppo.training.data_proto_rows import images_seqlens
from verl_dppo.training.full_data_proto import read_full_data_proto
from verl_dppo.training.hooks import DPPOHooks, SubmittedRows, around_update
from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE
from verl_dppo.training.metrics import rename_metrics_of_kept_rows
from verl_dppo.training.micro_batches import COLUMNS, FOLLOWED
from verl_dppo.training.passes import LOG_PROB, REFERENCE_LOG_PROB, UPDATE, base_estimator
from verl_dppo.training.probe import MEASURED, NORM
from verl_dppo.training.refusals import check_run
from verl_dppo.training.step_order import StepOrder
from verl_dppo.training.transform import rank_order
from verl_dppo.training.worker import DPPOWorker

PROMPT = "dppo_prompt"
"""Column of the batch: (rows,) int64, place of each row's prompt among those that the step sampled."""


class DPPORayPPOTrainer(DPPOHooks, RayPPOTrainer):
    """`RayPPOTrainer` that prunes; takes its arguments, and stands in for it as a base class.

    `fit` keeps the batch to itself, so it is pruned in place where verl balances it, before reward extraction,
    log-probs and update, and is the full batch again after the update: verl's metrics, the dump of rollouts and a data
    set's `on_batch_end` see every completion. A subclass with a `fit` of its own calls `finish_step` before it logs.
    """

    reads_rollout_n = False

    def __init__(
        self, config: DictConfig, tokenizer: Any, role_worker_mapping: dict[Role, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Check the run and build verl's trainer; see `RayPPOTrainer` for the arguments.

        Raises:
            RefusedSettingError: something that DPPO would train wrongly, before any worker starts.
        """
        settings = check_run(config, uses_v1=False)
        self.config, self.global_steps, self.timing_raw = config, 0, {}
        self.begin_run(settings)
        self._metrics: dict | None = None
        self._full: DataProto | None = None
        self._base_estimator = base_estimator(config)
        if settings.prunes or config.algorithm.adv_estimator == "dppo":
            self._use_estimator(pruned=settings.prunes)
        forget_full_groups()
        if settings.needs_own_worker:
            role_worker_mapping = _with_own_worker(role_worker_mapping)
        super().__init__(config, tokenizer, role_worker_mapping, *args, **kwargs)
        self.remember_actor_config()
        if settings.orders:
            self._order = StepOrder(settings, config)

    def _use_estimator(self, pruned: bool) -> None:
        """Let verl compute advantages through `dppo`, or, of a full batch, by the estimator itself.

        The first also makes a trainer fail whose `_balance_batch` never ran.
        """
        with open_dict(self.config):
            self.config.algorithm.dppo.base_estimator = self._base_estimator
            self.config.algorithm.adv_estimator = "dppo" if pruned else self._base_estimator

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        """Let verl load its data, and name the prompts where they are pruned.

        The order of rows is that of the given or verl's own sampler, pass after pass.
        """
        super()._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        if not self.dppo.prunes_prompts:
            return
        sampler = self.train_dataloader.sampler
        self.remember_prompts(lambda: np.fromiter(sampler, dtype=np.int64), collate_fn)
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = self.total_training_steps

    def draw_prompts(self) -> dict[str, Any]:
        """Number the prompts, so that each row tells its own however many groups come back."""
        columns = super().draw_prompts()
        first = next(iter(columns.values()))
        return {**columns, PROMPT: torch.arange(len(first))}

    def has_steps_left(self) -> bool:
        """Whether verl may fetch prompts for another step: its loop takes whatever the loader yields."""
        return self.global_steps <= self.total_training_steps

    def fit(self) -> None:
        """Let verl train, and finish each step before it is logged."""
        with _before_logging(self.resource_pool_manager, self._finish_open_step):
            super().fit()

    # ---- between reward and log-probs -------------------------------------------------------------------------------

    def _balance_batch(
        self, batch: DataProto, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> None:
        """Prune and order the batch in place, or let verl balance a full one."""
        if self._metrics is not None:
            raise RuntimeError(
                f"step {self.global_steps - 1} was not finished: `fit` of a subclass must call `finish_step(metrics)` "
                "before it logs the metrics of a step"
            )
        self._metrics, self.timing_raw = metrics, {}

        def read() -> SubmittedRows:
            full = read_full_data_proto(batch, self.config)
            return full, full.group if self._prompts is None else _prompt_of_rows(batch)

        step = self.decide(read, metrics)
        if self.dppo.prunes:
            self._use_estimator(pruned=step is not None)
        if step is None:
            super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
            _replace(batch, self._arrange(batch, metrics, self.whole_mini_batches(len(batch))))
            return
        self._full = DataProto(batch.batch, batch.non_tensor_batch, batch.meta_info)
        kept = self._prune(batch, metrics, step)
        row = kept.batch[ROW].numpy()
        reward, advantage = (
            np.where(row >= 0, of_full[row], 0.0) for of_full in (step.full.reward, step.full.advantage)
        )
        self._advantage = torch.tensor(advantage, dtype=torch.float32)[:, None] * kept.batch["response_mask"].float()
        remember_survivors(self._advantage, torch.tensor(reward), kept.non_tensor_batch["uid"])
        _replace(batch, kept)

    def _prune(self, batch: DataProto, metrics: dict, step: PlannedStep) -> DataProto:
        """Return the rows that are trained on, in their order, with the denominators of their mini-batches."""
        with marked_timer("dppo_prune", self.timing_raw):
            kept = prune_data_proto(batch, step.plan)
            mini_batch, mini_batches = kept.batch[MINI_BATCH].numpy(), len(step.plan.rows)
            if not (self.dppo.orders and self.dppo.balance.enable):
                tokens = lengths(kept).tolist()
                order, of_rank = rank_order(tokens, mini_batch, self.data_parallel_size())
                kept = select_rows(kept, np.array(order))
                metrics.update(log_seqlen_unbalance(tokens, of_rank, prefix="global_seqlen"))
                mini_batch = self.mini_batch_of_rows(len(kept), mini_batches)
        kept = self._arrange(kept, metrics, mini_batch)
        mini_batch = self.mini_batch_of_rows(len(kept), mini_batches)
        kept.batch[MINI_BATCH] = torch.from_numpy(mini_batch)
        kept.batch[BATCH_NUM_TOKENS] = torch.tensor(step.tokens[mini_batch], dtype=torch.float64)
        kept.batch[GLOBAL_BATCH_SIZE] = torch.tensor(step.size[mini_batch], dtype=torch.float64)
        return kept

    def _arrange(self, batch: DataProto, metrics: dict, mini_batch: NDArray[np.int64]) -> DataProto:
        """Return the rows of a batch, of which these are the mini-batches, ordered for ranks and micro-batches."""
        if self._order is None:
            return batch
        with marked_timer("dppo_order", self.timing_raw):
            idle = batch.batch[ROW].numpy() < 0 if ROW in batch.batch else np.zeros(len(batch), dtype=bool)
            uid = batch.non_tensor_batch["uid"]
            made = self._order.plan(lengths(batch), idle, uid, mini_batch, self.data_parallel_size())
            batch = select_rows(append_idle_rows(batch, made.padding_rows), made.row)
            batch.batch.update(made.columns)
        metrics.update(made.metrics)
        return batch

    @contextmanager
    def _follow_plan(self, batch: DataProto, name: str) -> Iterator[None]:
        """Tell the workers which column to take the micro-batches of the next pass from, or none."""
        if self._order is not None and name in self._order.passes:
            batch.meta_info[FOLLOWED] = COLUMNS[name]
        try:
            yield
        finally:
            batch.meta_info.pop(FOLLOWED, None)

    # ---- on what was kept -------------------------------------------------------------------------------------------

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        with self._follow_plan(batch, LOG_PROB):
            return super()._compute_old_log_prob(batch)

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        with self._follow_plan(batch, LOG_PROB if self.ref_in_actor else REFERENCE_LOG_PROB):
            return super()._compute_ref_log_prob(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        rows, metrics = None, {} if self._metrics is None else self._metrics
        if self._step is not None:
            self._check_advantages(batch)
            rename_metrics_of_kept_rows(metrics)
            rows = len(batch) // len(self._step.plan.rows)
            if self._completions.probes(self.global_steps):
                with marked_timer("dppo_probe", self.timing_raw):
                    metrics.update(self._probe(batch, self._step))
        with (
            self._follow_plan(batch, UPDATE),
            around_update(self.actor_rollout_wg, rows, metrics if self._order is not None else {}),
        ):
            output = super()._update_actor(batch)
        if self._step is not None and self._full is not None:
            _replace(batch, _rewarded(self._full, self._step, batch.meta_info))
        return output

    def _check_advantages(self, batch: DataProto) -> None:
        """Stop where rows were moved, or their advantages computed from what is left of the groups."""
        found, expected = batch.batch["advantages"], self._advantage
        if found.shape != expected.shape or not torch.allclose(found.float(), expected, rtol=1e-2, atol=1e-3):
            raise RuntimeError(
                "the advantages at the update are not those of the full groups: compute them with "
                "adv_estimator=config.algorithm.adv_estimator, which is dppo in this step, on the rows as they are"
            )

    def _probe(self, batch: DataProto, step: PlannedStep) -> dict[str, float]:
        """Measure the gradient norms of a few drawn completions, remember them for later steps, and compare."""
        ranks, rng = self.data_parallel_size(), self._generator(2)
        sampled, measured = self._completions.probe_sample(step, batch.batch[ROW].numpy(), ranks, rng)
        sample = select_rows(batch, sampled)
        data = left_right_2_no_padding(sample.to_tensordict())
        tu.assign_non_tensor(data, **self.probe_settings(), **{MEASURED: measured})
        norm = self.actor_rollout_wg.probe_gradient_norms(data)[NORM]
        rows = sample.batch[ROW].numpy()
        return self._completions.record_probe(self.global_steps, step, rows, norm.double().numpy())

    # ---- reporting --------------------------------------------------------------------------------------------------

    def _log_rollout_data(
        self, batch: DataProto, reward_extra_infos_dict: dict, timing_raw: dict, rollout_data_dir: str
    ) -> None:
        """Dump the batch, which is the full one again, with what the reward said of every completion."""
        if self._step is not None:
            reward_extra_infos_dict = extract_reward(batch)[1]
        super()._log_rollout_data(batch, reward_extra_infos_dict, timing_raw, rollout_data_dir)

    def _finish_open_step(self) -> None:
        if self._metrics is not None:
            self.finish_step(self._metrics)

    def finish_step(self, metrics: dict) -> None:
        """Add what DPPO reports of a step to its metrics, and learn for the next ones what it cost.

        Args:
            metrics: of the step, with verl's own, `timing_s/*` among them.

        Raises:
            ValueError: metrics without the seconds of the step.
        """
        if "timing_s/step" not in metrics:
            raise ValueError(
                f"the metrics of step {self.global_steps} lack timing_s/step; add verl's compute_timing_metrics"
            )
        metrics.update({f"timing_s/{phase}": seconds for phase, seconds in self.timing_raw.items()})
        timing = {name.removeprefix("timing_s/"): s for name, s in metrics.items() if name.startswith("timing_s/")}
        if self._step is not None:
            self.report(metrics, timing)
            self._completions.learn(self._step, timing)
        if self._prompts is not None and self._prompts.submission is not None:
            metrics["training/epoch"] = self._prompts.submission.epoch
        self.plan_steps(self.global_steps)
        self._metrics = self._full = None


def _with_own_worker(role_worker_mapping: dict[Role, Any]) -> dict[Role, Any]:
    """Return the mapping with our worker in place of verl's, and the same options.

    Raises:
        RefusedSettingError: another worker, which would ignore what is planned.
    """
    mapping = dict(role_worker_mapping)
    for role in {Role.ActorRollout, Role.ActorRolloutRef} & mapping.keys():
        remote = mapping[role]
        _, worker, *_ = remote.__ray_metadata__.modified_class.__mro__  # Ray derives a class of its own
        if issubclass(worker, DPPOWorker):
            continue
        if worker is not ActorRolloutRefWorker:
            way_out = (
                "derive it from verl_dppo.training.worker.DPPOWorker, or switch packing, balance and "
                "completion.probe_every off"
            )
            raise refuse(f"worker of {role}", worker.__name__, "it would not follow planned micro-batches", way_out)
        options = remote._default_options
        mapping[role] = ray.remote(**options)(DPPOWorker) if options else ray.remote(DPPOWorker)
    return mapping


def _prompt_of_rows(batch: DataProto) -> NDArray[np.int64]:
    if PROMPT not in batch.batch:
        raise RuntimeError(
            f"the batch has lost its column {PROMPT!r}, which tells the drawn prompt of each row: keep it, or set "
            "algorithm.dppo.prompt.enable=false"
        )
    return batch.batch[PROMPT].numpy()


def _replace(batch: DataProto, other: DataProto) -> None:
    """Make a batch another one, in place."""
    batch.batch, batch.non_tensor_batch, batch.meta_info = other.batch, other.non_tensor_batch, other.meta_info


def _rewarded(full: DataProto, step: PlannedStep, meta_info: dict[str, Any]) -> DataProto:
    """Return the full batch with what verl knows of a batch after the update, but for log-probs."""
    columns = full.batch.clone(recurse=False)
    columns["token_level_scores"] = columns["token_level_rewards"] = columns["rm_scores"]
    advantage = torch.tensor(step.full.advantage, dtype=torch.float32)
    columns["advantages"] = columns["returns"] = advantage[:, None] * columns["response_mask"].float()
    known = {**meta_info, "global_token_num": step.full.sequence_length.tolist()}
    rewarded = DataProto(columns, full.non_tensor_batch, known)
    if known.get("images_seqlens") is not None:
        known["images_seqlens"] = images_seqlens(rewarded)
    return rewarded


@contextmanager
def _before_logging(resource_pool_manager: Any, finish: Callable[[], None]) -> Iterator[None]:
    """Call `finish` in each step when verl has computed its metrics of the batch and of times, and not logged them.

    `fit` has no hook there, but asks for the number of devices, to compute its throughput.
    """
    of_verl = resource_pool_manager.get_n_gpus

    def get_n_gpus() -> int:
        finish()
        return of_verl()

    resource_pool_manager.get_n_gpus = get_n_gpus
    try:
        yield
    finally:
        resource_pool_manager.get_n_gpus = of_verl
