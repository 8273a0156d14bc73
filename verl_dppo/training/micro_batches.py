"""Makes verl's engines run the micro-batches that the driver planned.

Every engine of verl cuts a mini-batch, or a pass for log-probs, through `prepare_micro_batches`, which looks
`rearrange_micro_batches` up in its module when it is called. In that one place stands a function that follows a column
of the batch where the driver names one, and is verl's own where it names none.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tensordict import TensorDict
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine import utils as engine_utils

from verl_dppo.training.passes import LOG_PROB, REFERENCE_LOG_PROB, UPDATE

FOLLOWED = "dppo_micro_batch_column"
"""Non-tensor entry of the batch: name of the column with the plan of the pass at hand; missing or None, verl plans."""

COLUMNS = {name: f"dppo_micro_batch_of_{name}" for name in (UPDATE, LOG_PROB, REFERENCE_LOG_PROB)}
"""For each pass its column of the batch: (rows,) int64, see `encode`."""

_MINI_BATCH = 1 << 32


def encode(mini_batch: NDArray[np.int64], micro_batch: NDArray[np.int64]) -> torch.Tensor:
    """Return (rows,) int64 that name mini-batch and micro-batch of each row."""
    return torch.tensor(mini_batch * _MINI_BATCH + micro_batch, dtype=torch.int64)


def install_planned_micro_batches() -> None:
    """Put the function that follows plans in verl's place for it; once per process.

    Raises:
        RuntimeError: another plugin has replaced verl's function.
    """
    of_verl = engine_utils.rearrange_micro_batches
    if hasattr(of_verl, "verl_original"):
        return
    if of_verl is not seqlen_balancing.rearrange_micro_batches or of_verl.__module__ != seqlen_balancing.__name__:
        raise RuntimeError("rearrange_micro_batches in verl is not verl's own: another plugin has replaced it")
    engine_utils.rearrange_micro_batches = _planned(of_verl)


def _planned(of_verl: Callable[..., Any]) -> Callable[..., Any]:
    def rearrange_micro_batches(
        batch: TensorDict,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: int | None = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: int | None = None,
        use_dynamic_bsz_balance: bool = True,
        force_group_size: int = 1,
    ) -> tuple[list[TensorDict], list[list[int]]]:
        column = tu.get_non_tensor_data(batch, FOLLOWED, default=None)
        if column is None:
            return of_verl(
                batch,
                max_token_len,
                dp_group,
                num_batches_divided_by,
                same_micro_num_in_dp,
                min_num_micro_batch,
                use_dynamic_bsz_balance,
                force_group_size,
            )
        bins: list[list[int]] = []
        fault = f"column {column!r} did not reach the worker"
        if column in batch:
            least = max(num_batches_divided_by or 1, 1)
            bins, fault = _read(batch[column], _tokens(batch), int(max_token_len), least, force_group_size)
        _agree(len(bins), fault, dp_group)
        return [tu.index_select_tensor_dict(batch, rows) for rows in bins], bins

    rearrange_micro_batches.verl_original = of_verl  # type: ignore[attr-defined]
    return rearrange_micro_batches


def _tokens(batch: TensorDict) -> torch.Tensor:
    """Return (rows,) tokens, counted as verl counts them."""
    input_ids = batch["input_ids"]
    return input_ids.offsets().diff() if input_ids.is_nested else batch["attention_mask"].sum(dim=1)


def _read(
    plan: torch.Tensor, tokens: torch.Tensor, capacity: int, multiple: int, group: int
) -> tuple[list[list[int]], str]:
    """Return the rows of each micro-batch in the order of the plan, and what is wrong with it, if anything."""
    mini_batch, micro_batch = torch.div(plan, _MINI_BATCH, rounding_mode="floor"), plan % _MINI_BATCH
    count = int(micro_batch.max()) + 1
    bins: list[list[int]] = [[] for _ in range(min(count, len(plan)))]
    numbers = sorted(set(mini_batch.tolist()))
    if len(numbers) != 1:
        return bins, f"rows of mini-batches {numbers} came together"
    if count > len(plan) or len(set(micro_batch.tolist())) != count:
        return bins, f"{count} micro-batches, of which some are empty"
    for row, k in enumerate(micro_batch.tolist()):
        bins[k].append(row)
    lengths = tokens.tolist()
    largest = max(sum(lengths[row] for row in rows) for rows in bins)
    if largest > capacity:
        return bins, f"a micro-batch of {largest} tokens, where the engine takes {capacity}"
    if count % multiple:
        return bins, f"{count} micro-batches, where the pipeline needs a multiple of {multiple}"
    if group != 1:
        return bins, f"rows must stay together in groups of {group}, which a plan does not promise"
    return bins, ""


def _agree(count: int, fault: str, dp_group: Any) -> None:
    """Let no rank run, and none wait for others for ever, unless all of them have as many micro-batches and no fault.

    Raises:
        RuntimeError: on every rank of the group.
    """
    if dp_group is not None and dist.is_initialized():
        extremes = torch.tensor([count, -count, bool(fault)], dtype=torch.int64, device=get_device_name())
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=dp_group)
        most, fewest, faulty = extremes[0].item(), -extremes[1].item(), bool(extremes[2].item())
        if not fault and faulty:
            fault = "another rank cannot run its part"
        elif not fault and most != fewest:
            fault = f"ranks have {fewest} to {most} micro-batches, where all need the same number"
    if fault:
        raise RuntimeError(
            f"the planned micro-batches cannot be run: {fault}. Way out: algorithm.dppo.packing.enable=false leaves "
            "micro-batches to verl"
        )
