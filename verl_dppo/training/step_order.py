"""The order in which a step's rows are trained on, and the micro-batches that every worker runs, planned on the
driver."""

import logging

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
        """Order the rows of a step, and write down which micro-batches they run in.

        Args:
            batch: rows, padding included, the same number in every mini-batch; where rows are not balanced, in an order
                whose contiguous split gives each rank, and in it each mini-batch, its rows.
            mini_batch: (rows,) mini-batch of each row.
            ranks: data-parallel ranks of the actor.
            eos_token_id: token of padding rows.

        Returns:
            The batch, which lists the columns that workers follow, and the figures of its order.

        Raises:
            RefusedSettingError: a row with more tokens than a micro-batch may have.
        """
        length = _lengths(batch)
        self._check_longest(length, batch.keys)
        plan = self._plan(length, mini_batch, ranks)
        rows = plan.row.copy()
        rows[rows == PADDING] = len(batch) + np.arange(plan.padding_rows)
        batch = append_padding(batch, plan.padding_rows, eos_token_id)
        batch.reorder(rows.tolist())
        metrics = self._figures(plan, batch)
        if self.balance.enable:
            of_rank = [part.tolist() for part in np.array_split(np.arange(len(batch)), ranks)]
            metrics.update(log_seqlen_unbalance(plan.length.tolist(), of_rank, prefix="global_seqlen"))
        columns = self._columns(plan)
        return (put_columns(batch, columns) if columns else batch), metrics

    def _check_longest(self, length: NDArray[np.int64], keys: list[str]) -> None:
        longest = int(length.argmax())
        for one in self.passes.values():
            if length[longest] > one.capacity:
                reason = (
                    f"the sequence {keys[longest]} has {length[longest]} tokens, and a micro-batch "
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

    def _figures(self, plan: Schedule, batch: KVBatchMeta) -> dict[str, float]:
        figures = {
            "balance/mini_batch_cost": imbalance(plan, plan.cost, of_micro_steps=False),
            "balance/mini_batch_tokens": imbalance(plan, plan.length, of_micro_steps=False),
        }
        if UPDATE in self.passes:
            padding = np.array([tag.get("is_padding", False) for tag in batch.tags])
            figures |= {
                "balance/micro_step_cost": imbalance(plan, plan.cost, of_micro_steps=True),
                "balance/micro_step_tokens": imbalance(plan, plan.length, of_micro_steps=True),
                "packing/density": plan.density(plan.length[~padding].sum()),
                "packing/micro_batches": float(plan.micro_batches.sum()),
                "packing/padding_rows": float(padding.sum()),
            }
        return {f"dppo/{name}": value for name, value in figures.items()}


def _lengths(batch: KVBatchMeta) -> NDArray[np.int64]:
    return np.array([tag["seq_len"] for tag in batch.tags], dtype=np.int64)


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
