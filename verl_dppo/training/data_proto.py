"""Pruning a step's batch as verl's classic trainers hold it: a DataProto, cut down to a plan's rows.

Pure functions, usable in any loop: each returns a new DataProto and leaves the given one alone, as `select_rows` does.
"""

from itertools import count as count_from
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.protocol import DataProto

from verl_dppo.pruning import CompletionPlan
from verl_dppo.training.data_proto_rows import (
    aligned_rows,
    counted_tokens,
    has_column,
    images_seqlens,
    jagged_bounds,
    lengths,
    objects_of,
    row_index,
    select_rows,
)
from verl_dppo.training.loss import WEIGHT

__all__ = ["MINI_BATCH", "ROW", "WEIGHT", "append_idle_rows", "lengths", "prune_data_proto", "select_rows"]

ROW = "dppo_row"
"""Column of the batch: (rows,) int64, place of each row in the full batch, -1 for idle rows."""

MINI_BATCH = "dppo_mini_batch"
"""Column of the batch: (rows,) int64, mini-batch (optimiser step) of each row."""

_ZERO_IN_IDLE_ROWS = (
    "response_mask",
    "loss_mask",
    "rm_scores",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
    WEIGHT,
)


def append_idle_rows(batch: DataProto, count: int) -> DataProto:
    """Append `count` rows that weigh nothing: copies of the row with the fewest tokens, masked and without reward.

    Padded copies attend to two tokens only, the last of the prompt and the first of the response: the least that verl's
    engines take. They are text, whatever the copied row holds, as verl's own padding is. Nested copies keep all tokens,
    and multi-modal inputs with them. Other columns, such as extras of the reward, are those of the copied row.

    Args:
        batch: n >= 1 rows, with or without WEIGHT, ROW and MINI_BATCH. Where these are, the new rows weigh 0, are no
            row of the full batch, and join the mini-batches that have the fewest rows.
        count: rows to append, >= 0.

    Raises:
        ValueError: a count that is none, or what `select_rows` refuses.
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
        raise ValueError(f"count must be an integer >= 0, got {count!r}")
    return _rows_and_idle(batch, np.arange(len(batch)), int(count))


def prune_data_proto(batch: DataProto, plan: CompletionPlan) -> DataProto:
    """Cut the batch down to the plan's rows, and pad each mini-batch to the common size with idle rows.

    Args:
        batch: the full batch, in the order that the plan was made for.
        plan: from `plan_completions`.

    Returns:
        A new batch: the rows of mini-batch 0, of 1, and so on, then the idle rows of mini-batch 0, of 1, and so on,
        with the columns WEIGHT, ROW and MINI_BATCH.

    Raises:
        ValueError: a batch that was pruned before, or a plan for another number of rows.
    """
    present = [name for name in (WEIGHT, ROW, MINI_BATCH) if has_column(batch, name)]
    if present:
        raise ValueError(
            f"the batch has the columns {present} already: it was pruned before, and a second plan would lose the "
            "weights of the first. Prune the full batch, once."
        )
    if plan.pi.size != aligned_rows(batch):
        raise ValueError(
            f"the plan is for {plan.pi.size} rows, the batch has {len(batch)}. Plan on this batch, in this order."
        )
    idle = sum(plan.padding)
    pruned = _rows_and_idle(batch, plan.kept, idle)
    steps = np.arange(len(plan.rows))
    mini_batch = np.concatenate([np.repeat(steps, [r.size for r in plan.rows]), np.repeat(steps, plan.padding)])
    if pruned.batch is None:
        pruned.batch = TensorDict({}, batch_size=[len(pruned)])
    pruned.batch[WEIGHT] = torch.from_numpy(np.concatenate([plan.weight[plan.kept], np.zeros(idle)]))
    pruned.batch[ROW] = torch.from_numpy(np.concatenate([plan.kept, np.full(idle, -1)]))
    pruned.batch[MINI_BATCH] = torch.from_numpy(mini_batch)
    return pruned


def _rows_and_idle(batch: DataProto, rows: NDArray[np.int64], count: int) -> DataProto:
    """Return the batch of these rows and of `count` idle ones behind them; see `append_idle_rows`."""
    rows, n = row_index(batch, rows), len(rows)
    if count == 0:
        return select_rows(batch, rows)
    extended = select_rows(batch, np.append(rows, np.full(count, _cheapest(batch, rows))))
    _name_idle_rows(extended, n, set(objects_of(batch, "uid") or []))
    if extended.batch is None:
        return extended
    columns = extended.batch
    for name in _ZERO_IN_IDLE_ROWS:
        if name in columns:
            _zero_from(columns.get(name), n)
    if ROW in columns:
        columns[ROW][n:] = -1
    if MINI_BATCH in columns:
        columns[MINI_BATCH][n:] = _levelling(columns[MINI_BATCH][:n], count)
    if _is_padded(columns):
        _attend_to_two_tokens(columns, n)
        _take_media_away(extended, n)
    tokens = counted_tokens(extended)
    if tokens is not None and extended.meta_info.get("global_token_num") is not None:
        extended.meta_info["global_token_num"][n:] = tokens[n:].tolist()
    return extended


def _cheapest(batch: DataProto, rows: NDArray[np.int64]) -> int:
    """Return that of the rows with the fewest tokens, one without multi-modal inputs if there is any."""
    inputs = objects_of(batch, "multi_modal_inputs") or [None] * len(batch)
    text = np.array([not inputs[row] for row in rows])
    among = rows[text] if text.any() else rows
    tokens = counted_tokens(batch)
    return int(among[0] if tokens is None else among[np.argmin(tokens[among])])


def _name_idle_rows(batch: DataProto, kept: int, taken: set[Any]) -> None:
    """Give each row from `kept` on a uid that is none of those taken, so that it is in nobody's group."""
    uid = objects_of(batch, "uid")
    if uid is None:
        return
    free = (name for name in (f"dppo_idle_{i}" for i in count_from()) if name not in taken)
    uid[kept:] = islice(free, len(batch) - kept)
    _put_objects(batch, "uid", uid)


def _take_media_away(batch: DataProto, kept: int) -> None:
    """Leave the rows from `kept` on without multi-modal inputs: the tokens that stood for them are masked."""
    inputs = objects_of(batch, "multi_modal_inputs")
    if inputs is None:
        return
    inputs[kept:] = [{} for _ in range(len(batch) - kept)]
    _put_objects(batch, "multi_modal_inputs", inputs)
    if batch.meta_info.get("images_seqlens") is not None:
        batch.meta_info["images_seqlens"] = images_seqlens(batch)


def _put_objects(batch: DataProto, name: str, objects: list[Any]) -> None:
    """Replace a column that is no tensor, on the side on which it is kept."""
    if name in batch.non_tensor_batch:
        batch.non_tensor_batch[name] = np.fromiter(objects, dtype=object, count=len(objects))
    else:
        batch.batch[name] = NonTensorStack.from_list([NonTensorData(item) for item in objects])


def _zero_from(value: Any, kept: int) -> None:
    """Zero the rows from `kept` on, in place."""
    if value.is_nested:
        values, offset, dim = value.values(), int(value.offsets()[kept]), jagged_bounds(value)[2]
        values.narrow(dim, offset, values.shape[dim] - offset).zero_()
    else:
        value[kept:] = 0


def _levelling(mini_batch: torch.Tensor, count: int) -> torch.Tensor:
    """Return (count,) mini-batches, ascending, that level the row counts of all."""
    rows = torch.bincount(mini_batch)
    chosen = []
    for _ in range(count):
        chosen.append(int(rows.argmin()))
        rows[chosen[-1]] += 1
    return torch.tensor(sorted(chosen), dtype=mini_batch.dtype)


def _is_padded(columns: TensorDict) -> bool:
    """Return whether the rows are padded, with prompt and response in two blocks, so that a mask can cut them."""
    needed = [columns.get(name, None) for name in ("input_ids", "attention_mask", "prompts")]
    return all(value is not None and not value.is_nested for value in needed)


def _attend_to_two_tokens(columns: TensorDict, kept: int) -> None:
    """Let the rows from `kept` on, copies of one, attend to the last prompt and the first response token, in place.

    Positions start from 0 again: attention over packed rows takes a position of 0 for the start of the next row.
    """
    mask, width = columns["attention_mask"][kept:], columns["prompts"].shape[1]
    attended = mask[0, :width].nonzero()
    last = int(attended.max()) if attended.numel() else width - 1
    mask.zero_()
    mask[:, last] = 1
    mask[:, width : width + 1] = 1
    if "position_ids" in columns:
        positions = columns["position_ids"][kept:]
        positions.copy_((mask.cumsum(-1) - 1).clamp(min=0).view(len(mask), *[1] * (positions.dim() - 2), -1))
