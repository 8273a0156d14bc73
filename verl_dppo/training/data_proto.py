"""Pruning a step's batch as verl's classic trainers hold it: a DataProto, cut down to a plan's rows.

Pure functions, usable in any loop: each returns a new DataProto and leaves the given one alone. Tensors are copied;
the objects inside object arrays, and the values of meta_info, are shared.
"""

from itertools import count as count_from
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.protocol import DataProto

from verl_dppo.pruning import CompletionPlan
from verl_dppo.training.loss import WEIGHT

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


def lengths(batch: DataProto) -> NDArray[np.int64]:
    """Return (n,) tokens of each row: those of `input_ids` where it is nested, else those that are attended to.

    Raises:
        ValueError: the batch has neither nested `input_ids` nor an `attention_mask`.
    """
    columns = {} if batch.batch is None else batch.batch
    ids, mask = columns.get("input_ids", None), columns.get("attention_mask", None)
    if ids is not None and ids.is_nested:
        return _bounds(ids)[1].cpu().numpy().astype(np.int64)
    if mask is None:
        raise ValueError(
            f"the batch has no attention_mask, nor nested input_ids, to count tokens of; its tensors: {[*columns.keys()]}"
        )
    return mask.flatten(1).sum(-1).cpu().numpy().astype(np.int64)


def select_rows(batch: DataProto, rows: ArrayLike) -> DataProto:
    """Return the batch of these rows: tensors, padded or nested, non-tensors, and what meta_info says of each row.

    Of meta_info, `global_token_num` is cut and `images_seqlens` built anew. Nothing else there is taken to be of rows.

    Args:
        batch: n rows. An entry of `batch.batch` that is one value for all rows (NonTensorData) stays what it is.
        rows: (m,) int, in any order, repeats allowed, m >= 1.

    Raises:
        ValueError: rows that are not there, none at all, or columns of different lengths.
    """
    n = _aligned_rows(batch)
    index = np.asarray(rows)
    if index.ndim != 1 or index.size == 0 or index.dtype.kind not in "iu":
        raise ValueError(f"rows must be (m,) integers, m >= 1, got {index.dtype} of shape {index.shape}")
    if index.min() < 0 or index.max() >= n:
        raise ValueError(f"rows must be in [0, {n}), got {index[(index < 0) | (index >= n)][:3].tolist()}")
    index = index.astype(np.int64)
    selected = type(batch)(
        batch=None if batch.batch is None else _select_columns(batch.batch, torch.from_numpy(index)),
        non_tensor_batch={name: column[index] for name, column in batch.non_tensor_batch.items()},
        meta_info=dict(batch.meta_info),
    )
    tokens = batch.meta_info.get("global_token_num")
    if tokens is not None:
        if len(tokens) != n:
            raise ValueError(
                f"meta_info['global_token_num'] has {len(tokens)} entries for {n} rows: it was taken before this batch "
                "was split or joined. Remove it, or take it again."
            )
        selected.meta_info["global_token_num"] = [tokens[i] for i in index.tolist()]
    if batch.meta_info.get("images_seqlens") is not None:
        selected.meta_info["images_seqlens"] = _images_seqlens(selected)
    return selected


def append_idle_rows(batch: DataProto, count: int) -> DataProto:
    """Append `count` rows that weigh nothing: copies of the row with the fewest tokens, masked and without reward.

    Of rows without multi-modal inputs, where there are any, and padded, the copies attend to two tokens only, the last
    of the prompt and the first of the response: the least that verl's engines take. Nested copies, and those with
    multi-modal inputs, whose tokens must match their features, keep all tokens. Other columns, such as extras of the
    reward, are those of the copied row.

    Args:
        batch: n >= 1 rows, with or without WEIGHT, ROW and MINI_BATCH. Where these are, the new rows weigh 0, are no
            row of the full batch, and join the mini-batches that have the fewest rows.
        count: rows to append, >= 0.

    Raises:
        ValueError: a count that is none, or what `select_rows` refuses.
    """
    return _with_idle_rows(batch, count, set(_objects(batch, "uid") or []))


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
    present = [name for name in (WEIGHT, ROW, MINI_BATCH) if _has(batch, name)]
    if present:
        raise ValueError(
            f"the batch has the columns {present} already: it was pruned before, and a second plan would lose the "
            "weights of the first. Prune the full batch, once."
        )
    if plan.pi.size != _aligned_rows(batch):
        raise ValueError(
            f"the plan is for {plan.pi.size} rows, the batch has {len(batch)}. Plan on this batch, in this order."
        )
    idle = sum(plan.padding)
    pruned = _with_idle_rows(select_rows(batch, plan.kept), idle, set(_objects(batch, "uid") or []))
    steps = np.arange(len(plan.rows))
    mini_batch = np.concatenate([np.repeat(steps, [r.size for r in plan.rows]), np.repeat(steps, plan.padding)])
    if pruned.batch is None:
        pruned.batch = TensorDict({}, batch_size=[len(pruned)])
    pruned.batch[WEIGHT] = torch.from_numpy(np.concatenate([plan.weight[plan.kept], np.zeros(idle)]))
    pruned.batch[ROW] = torch.from_numpy(np.concatenate([plan.kept, np.full(idle, -1)]))
    pruned.batch[MINI_BATCH] = torch.from_numpy(mini_batch)
    return pruned


def _aligned_rows(batch: DataProto) -> int:
    """Return the number of rows, on which all columns must agree: they may have been replaced since verl checked."""
    for name, column in batch.non_tensor_batch.items():
        if column.shape[0] != len(batch):
            raise ValueError(f"non_tensor_batch[{name!r}] has {column.shape[0]} rows, the batch has {len(batch)}")
    return len(batch)


def _has(batch: DataProto, name: str) -> bool:
    return name in batch.non_tensor_batch or (batch.batch is not None and name in batch.batch)


def _objects(batch: DataProto, name: str) -> list[Any] | None:
    """Return the (n,) objects of a column that is no tensor, on whichever side it is kept, or None without it."""
    if not _has(batch, name):
        return None
    return list(batch.non_tensor_batch[name]) if name in batch.non_tensor_batch else batch.batch.get(name).tolist()


def _bounds(nested: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (n,) starts and (n,) lengths of a jagged tensor's rows in its values, and the dimension they run along.

    Neither `unbind` nor the shape is to be trusted for more than two dimensions: verl sets the ragged one by hand.
    """
    offsets, of_rows = nested.offsets(), nested.lengths()
    return offsets[:-1], offsets.diff() if of_rows is None else of_rows, nested._ragged_idx - 1


def _select_nested(nested: Any, index: torch.Tensor) -> torch.Tensor:
    start, length, dim = _bounds(nested)
    index = index.to(start.device)
    start, length = start[index], length[index]
    offsets = torch.nn.functional.pad(length.cumsum(0), (1, 0))
    position = torch.repeat_interleave(start - offsets[:-1], length) + torch.arange(
        int(offsets[-1]), device=start.device
    )
    values = nested.values().index_select(dim, position)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim + 1)


def _select_columns(columns: TensorDict, index: torch.Tensor) -> TensorDict:
    selected = {}
    for name, value in columns.items():
        if isinstance(value, NonTensorData):
            selected[name] = NonTensorData(value.data, batch_size=[len(index)])
        elif isinstance(value, torch.Tensor) and value.is_nested:
            selected[name] = _select_nested(value, index)
        else:
            selected[name] = value[index]
    return TensorDict(selected, batch_size=[len(index)], device=columns.device)


def _images_seqlens(batch: DataProto) -> list[int]:
    """Return the lengths of the images of all rows, row after row, as verl's trainer lists them."""
    inputs = _objects(batch, "multi_modal_inputs")
    if inputs is None and batch.meta_info["images_seqlens"]:
        raise ValueError(
            "meta_info['images_seqlens'] lists images, but no column 'multi_modal_inputs' says of which rows. Keep "
            "that column until the batch is pruned, or remove the list."
        )
    with_images = [of_row for of_row in inputs or [] if of_row and "image_grid_thw" in of_row]
    return [length for of_row in with_images for length in of_row["images_seqlens"].tolist()]


def _with_idle_rows(batch: DataProto, count: int, taken: set[Any]) -> DataProto:
    """Append idle rows whose uids are none of the taken ones; see `append_idle_rows`."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
        raise ValueError(f"count must be an integer >= 0, got {count!r}")
    n = _aligned_rows(batch)
    if n == 0:
        raise ValueError("the batch has no rows, and an idle row is a copy of one")
    if count == 0:
        return select_rows(batch, np.arange(n))
    template, is_text = _cheapest_row(batch)
    extended = select_rows(batch, np.append(np.arange(n), np.full(count, template)))
    _name_idle_rows(extended, n, taken)
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
    if is_text and _is_padded(columns):
        _attend_to_two_tokens(columns, n)
    if extended.meta_info.get("global_token_num") is not None:
        extended.meta_info["global_token_num"][n:] = lengths(extended)[n:].tolist()
    return extended


def _cheapest_row(batch: DataProto) -> tuple[int, bool]:
    """Return the row with the fewest tokens, of those without multi-modal inputs if there are any, and whether so."""
    inputs = _objects(batch, "multi_modal_inputs") or [None] * len(batch)
    text = np.array([not of_row for of_row in inputs])
    among = np.flatnonzero(text) if text.any() else np.arange(len(batch))
    countable = _has(batch, "attention_mask") or _has(batch, "input_ids")
    tokens = lengths(batch) if countable else np.zeros(len(batch))
    return int(among[np.argmin(tokens[among])]), bool(text.any())


def _name_idle_rows(batch: DataProto, kept: int, taken: set[Any]) -> None:
    """Give each row from `kept` on a uid of its own, so that it is in nobody's group."""
    uid = _objects(batch, "uid")
    if uid is None:
        return
    free = (name for name in (f"dppo_idle_{i}" for i in count_from()) if name not in taken)
    uid[kept:] = islice(free, len(batch) - kept)
    if "uid" in batch.non_tensor_batch:
        batch.non_tensor_batch["uid"] = np.fromiter(uid, dtype=object, count=len(uid))
    else:
        batch.batch["uid"] = NonTensorStack.from_list([NonTensorData(name) for name in uid])


def _zero_from(value: Any, kept: int) -> None:
    """Zero the rows from `kept` on, in place."""
    if value.is_nested:
        values, offset, dim = value.values(), int(value.offsets()[kept]), _bounds(value)[2]
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
