"""Any rows of a DataProto, verl's batch of padded or nested tensors, object arrays and meta_info, as a new one.

Tensors are copied; the objects inside object arrays, and the values of meta_info, are shared.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import NonTensorData, TensorDict
from verl.protocol import DataProto


def lengths(batch: DataProto) -> NDArray[np.int64]:
    """Return (n,) tokens of each row: those of `input_ids` where it is nested, else those that are attended to.

    Raises:
        ValueError: the batch has neither nested `input_ids` nor an `attention_mask`.
    """
    tokens = counted_tokens(batch)
    if tokens is None:
        present = [] if batch.batch is None else list(batch.batch.keys())
        raise ValueError(f"the batch has no attention_mask, nor nested input_ids, to count; its tensors: {present}")
    return tokens


def counted_tokens(batch: DataProto) -> NDArray[np.int64] | None:
    """Return what `lengths` does, or None where nothing tells."""
    columns = {} if batch.batch is None else batch.batch
    ids, mask = columns.get("input_ids", None), columns.get("attention_mask", None)
    if ids is not None and ids.is_nested:
        return jagged_bounds(ids)[1].cpu().numpy().astype(np.int64)
    return None if mask is None else mask.flatten(1).sum(-1).cpu().numpy().astype(np.int64)


def select_rows(batch: DataProto, rows: ArrayLike) -> DataProto:
    """Return the batch of these rows: tensors, padded or nested, non-tensors, and what meta_info says of each row.

    Of meta_info, `global_token_num` is cut and `images_seqlens` built anew. Nothing else there is taken to be of rows.

    Args:
        batch: n rows. An entry of `batch.batch` that is one value for all rows (NonTensorData) stays what it is.
        rows: (m,) int, in any order, repeats allowed, m >= 1.

    Raises:
        ValueError: rows that are not there, none at all, or columns of different lengths.
    """
    index = row_index(batch, rows)
    selected = type(batch)(
        batch=None if batch.batch is None else _select_columns(batch.batch, torch.from_numpy(index)),
        non_tensor_batch={name: column[index] for name, column in batch.non_tensor_batch.items()},
        meta_info=dict(batch.meta_info),
    )
    tokens = batch.meta_info.get("global_token_num")
    if tokens is not None:
        if len(tokens) != len(batch):
            raise ValueError(
                f"meta_info['global_token_num'] has {len(tokens)} entries for {len(batch)} rows: it was taken before "
                "this batch was split or joined. Remove it, or take it again."
            )
        selected.meta_info["global_token_num"] = [tokens[i] for i in index.tolist()]
    if batch.meta_info.get("images_seqlens") is not None:
        selected.meta_info["images_seqlens"] = images_seqlens(selected)
    return selected


def row_index(batch: DataProto, rows: ArrayLike) -> NDArray[np.int64]:
    """Return the rows as (m,) int64, or raise the ValueError of `select_rows`."""
    n = aligned_rows(batch)
    index = np.asarray(rows)
    if index.ndim != 1 or index.size == 0 or index.dtype.kind not in "iu":
        raise ValueError(f"rows must be (m,) integers, m >= 1, got {index.dtype} of shape {index.shape}")
    if index.min() < 0 or index.max() >= n:
        raise ValueError(f"rows must be in [0, {n}), got {index[(index < 0) | (index >= n)][:3].tolist()}")
    return index.astype(np.int64)


def aligned_rows(batch: DataProto) -> int:
    """Return the number of rows, on which all columns must agree: they may have been replaced since verl checked."""
    for name, column in batch.non_tensor_batch.items():
        if not isinstance(column, np.ndarray) or len(column) != len(batch):
            raise ValueError(
                f"non_tensor_batch[{name!r}] must be an array of the batch's {len(batch)} rows, "
                f"got {type(column).__name__} of {len(column)}"
            )
    return len(batch)


def has_column(batch: DataProto, name: str) -> bool:
    """Return whether the batch has the column, as a tensor or not."""
    return name in batch.non_tensor_batch or (batch.batch is not None and name in batch.batch)


def objects_of(batch: DataProto, name: str) -> list[Any] | None:
    """Return the (n,) objects of a column that is no tensor, on whichever side it is kept, or None without it."""
    if not has_column(batch, name):
        return None
    return list(batch.non_tensor_batch[name]) if name in batch.non_tensor_batch else batch.batch.get(name).tolist()


def jagged_bounds(nested: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (n,) starts and (n,) lengths of a jagged tensor's rows in its values, and the dimension they run along.

    Of three dimensions, as multi-modal position ids have them, neither `unbind`, nor the shape, nor even the ragged
    index is reliable: verl sets it by hand, and pickling a DataProto resets it to the first. The sizes tell.
    """
    offsets, of_rows, values = nested.offsets(), nested.lengths(), nested.values()
    dim = nested._ragged_idx - 1
    if of_rows is not None:
        return offsets[:-1], of_rows, dim
    if values.shape[dim] != offsets[-1]:
        dim = list(values.shape).index(int(offsets[-1]))
    return offsets[:-1], offsets.diff(), dim


def _select_nested(nested: Any, index: torch.Tensor) -> torch.Tensor:
    start, length, dim = jagged_bounds(nested)
    index = index.to(start.device)
    start, length = start[index], length[index]
    offsets = torch.nn.functional.pad(length.cumsum(0), (1, 0))
    position = torch.repeat_interleave(start - offsets[:-1], length)
    position += torch.arange(position.numel(), device=start.device)
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


def images_seqlens(batch: DataProto) -> list[int]:
    """Return the lengths of the images of all rows, row after row, as verl's trainer lists them."""
    inputs = objects_of(batch, "multi_modal_inputs")
    if inputs is None and batch.meta_info["images_seqlens"]:
        raise ValueError(
            "meta_info['images_seqlens'] lists images, but no column 'multi_modal_inputs' says of which rows. Keep "
            "that column until the batch is pruned, or remove the list."
        )
    with_images = [of_row for of_row in inputs or [] if of_row and "image_grid_thw" in of_row]
    return [length for of_row in with_images for length in of_row["images_seqlens"].tolist()]
