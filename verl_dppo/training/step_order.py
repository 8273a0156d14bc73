"""The order in which a step's rows are trained on, and the micro-batches that every worker runs, planned on the
driver."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import log_seqlen_unbalance

from verl_dppo.packing import PADDING, Schedule, SequenceCost, imbalance, plan_in_order, schedule
from verl_dppo.settings import AUTO, DPPOSettings, refuse
from verl_dppo.training.micro_batches import COLUMNS, encode
from verl_dppo.training.passes import UPDATE, passes
from verl_dppo.training.transform import PADDING_TOKENS, append_padding, put_columns

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrangement:
    """The order of a step's m rows.

    Attributes:
        row: (m,) int64 the rows in their order; numbers past the last row stand for padding rows that are still to be
            appended.
        padding_rows: how many these are.
        columns: for workers to follow, each (m,) int64 in the new order.
        metrics: `dppo/balance/*`, `dppo/packing/*`, and verl's own of the order.
    """

    row: NDArray[np.int64]
    padding_rows: int
    columns: dict[str, torch.Tensor]
    metrics: dict[str, float]


class StepOrder:
    """Orders and packs the rows of every step of a run, as its settings say."""

    def __init__(self, settings: DPPOSettings, config: DictConfig) -> None:
        """Read how the run's passes over a batch are cut, and what a sequence costs its model.

        Args:
            settings: those of DPPO.
            config: verl's composed configuration.

        Raises:
            RefusedSettingError: `balance.cost=flops` for a model whose configuration does not tell them.
        """
        self.balance, self.packing = settings.balance, settings.packing
        self.passes = passes(config, settings.packing) if settings.packing.enable else {}
        self.cost = _cost(config, self.balance.cost)
        longest = int(config.data.max_prompt_length) + int(config.data.max_response_length)
        for one in self.passes.values():
            if longest > one.capacity:
                logger.warning(
                    "data.max_prompt_length + data.max_response_length = %d: a sequence so long would not fit into a "
                    "micro-batch of %d tokens, and end the run; see %s",
                    longest,
                    one.capacity,
                    one.setting,
                )
        if self.packing.enable and UPDATE not in self.passes:
            logger.warning(
                "micro-batches have a fixed number of rows, so there is nothing to pack: set "
                "actor_rollout_ref.actor.use_dynamic_bsz=true to have them packed by tokens"
            )

    def arrange(
        self, batch: KVBatchMeta, mini_batch: NDArray[np.int64], ranks: int, eos_token_id: int
    ) -> tuple[KVBatchMeta, dict[str, float]]:
        """Order the rows of a step of verl's v1 trainer, and write down which micro-batches they run in.

        Args:
            batch: rows; see `plan`.
            mini_batch: (rows,) mini-batch of each row.
            ranks: data-parallel ranks of the actor.
            eos_token_id: token of padding rows.

        Returns:
            The batch, which lists the columns that workers follow, and the figures of its order.

        Raises:
            RefusedSettingError: a row with more tokens than a micro-batch may have.
        """
        length = np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64)
        idle = np.array([tag.get("is_padding", False) for tag in batch.tags])
        made = self.plan(length, idle, batch.keys, mini_batch, ranks)
        batch = append_padding(batch, made.padding_rows, eos_token_id)
        batch.reorder(made.row.tolist())
        return (put_columns(batch, made.columns) if made.columns else batch), made.metrics

    def plan(
        self,
        length: NDArray[np.int64],
        idle: NDArray[np.bool_],
        names: Sequence[Any],
        mini_batch: NDArray[np.int64],
        ranks: int,
    ) -> Arrangement:
        """Decide the order of the rows of a step, and which micro-batches they run in.

        Args:
            length: (rows,) tokens. Rows, idle ones included, are the same number in every mini-batch; where rows are
                not balanced, they come in an order whose contiguous split gives each rank, and in it each mini-batch,
                its rows.
            idle: (rows,) bool, whether a row is there only to fill up.
            names: (rows,) by which an error names them.
            mini_batch: (rows,) mini-batch of each row.
            ranks: data-parallel ranks of the actor.

        Raises:
            RefusedSettingError: a row with more tokens than a micro-batch may have.
        """
        self._check_longest(length, names)
        plan = self._plan(length, mini_batch, ranks)
        row = plan.row.copy()
        row[row == PADDING] = length.size + np.arange(plan.padding_rows)
        idle = np.concatenate([idle, np.ones(plan.padding_rows, dtype=bool)])[row]
        metrics = self._figures(plan, idle)
        if self.balance.enable:
            of_rank = [part.tolist() for part in np.array_split(np.arange(row.size), ranks)]
            metrics.update(log_seqlen_unbalance(plan.length.tolist(), of_rank, prefix="global_seqlen"))
        return Arrangement(row, plan.padding_rows, self._columns(plan), metrics)

    def _check_longest(self, length: NDArray[np.int64], names: Sequence[Any]) -> None:
        longest = int(length.argmax())
        for one in self.passes.values():
            if length[longest] > one.capacity:
                reason = (
                    f"the sequence {names[longest]} has {length[longest]} tokens, and a micro-batch "
                    f"{one.capacity} at most"
                )
                way_out = "raise it, shorten data.max_prompt_length or data.max_response_length"
                raise refuse(one.setting, one.limit, reason, way_out)

    def _plan(self, length: NDArray[np.int64], mini_batch: NDArray[np.int64], ranks: int) -> Schedule:
        capacity = self.passes[UPDATE].capacity if UPDATE in self.passes else None
        if not self.balance.enable:
            return self._cut(length, ranks, int(mini_batch.max()) + 1, capacity)
        window, padding = self.packing.window, PADDING_TOKENS
        return schedule(length, ranks, mini_batch, capacity, self.cost, window=window, padding_length=padding)

    def _cut(self, length: NDArray[np.int64], ranks: int, mini_batches: int, capacity: int | None) -> Schedule:
        window, level = self.packing.window, self.balance.enable
        return plan_in_order(length, ranks, mini_batches, capacity, self.cost, window=window, level=level)

    def _columns(self, plan: Schedule) -> dict[str, torch.Tensor]:
        """Return the plan of every pass; those for log-probs take all mini-batches of a rank at once."""
        columns = {}
        for name, one in self.passes.items():
            cut = plan if name == UPDATE else self._cut(plan.length, one.ranks, 1, one.capacity)
            columns[COLUMNS[name]] = encode(cut.mini_batch, cut.micro_batch)
        return columns

    def _figures(self, plan: Schedule, idle: NDArray[np.bool_]) -> dict[str, float]:
        figures = {
            "balance/mini_batch_cost": imbalance(plan, plan.cost, of_micro_steps=False),
            "balance/mini_batch_tokens": imbalance(plan, plan.length, of_micro_steps=False),
        }
        if UPDATE in self.passes:
            figures |= {
                "balance/micro_step_cost": imbalance(plan, plan.cost, of_micro_steps=True),
                "balance/micro_step_tokens": imbalance(plan, plan.length, of_micro_steps=True),
                "packing/density": plan.density(plan.length[~idle].sum()),
                "packing/micro_batches": float(plan.micro_batches.sum()),
                "packing/padding_rows": float(idle.sum()),
            }
        return {f"dppo/{name}": value for name, value in figures.items()}


def _cost(config: DictConfig, kind: str) -> SequenceCost:
    if kind == "tokens":
        return SequenceCost.tokens()
    model = config.actor_rollout_ref.model.copy()
    with open_dict(model):
        model.load_tokenizer = False
    hf_config = omega_conf_to_dataclass(model).hf_config
    try:
        return SequenceCost.from_config(hf_config)
    except ValueError as error:
        if kind == AUTO:
            logger.warning("a sequence is taken to cost its tokens: %s", error)
            return SequenceCost.tokens()
        way_out = "set algorithm.dppo.balance.cost=tokens"
        raise refuse("algorithm.dppo.balance.cost", kind, str(error), way_out) from error
