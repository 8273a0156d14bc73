"""Loading the rows that a step samples, whichever they are, with the workers of torch's loader."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from verl.utils.dataset.rl_dataset import collate_fn


class _Chunks:
    """A batch sampler that yields whatever chunks of rows it was given last."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.chunks)


class RowLoader:
    """Fetches rows of a data set by their numbers. Workers are started at the first fetch and kept."""

    def __init__(
        self,
        dataset: Dataset,
        workers: int,
        collate: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None,
    ) -> None:
        """Prepare for a data set.

        Args:
            dataset: with items as verl's `collate_fn` takes them.
            workers: processes that load; with 0 this one does.
            collate: makes columns of items; None: verl's `collate_fn`.
        """
        self._chunks, self._workers = _Chunks(), workers
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._chunks,
            num_workers=workers,
            collate_fn=collate or collate_fn,
            persistent_workers=workers > 0,
        )

    def fetch(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the rows in this order, each column a tensor (k, ...) or an array (k,) of objects.

        Raises:
            ValueError: rows with different columns.
        """
        size = max(1, -(-len(rows) // max(1, self._workers)))
        self._chunks.chunks = [list(rows[start : start + size]) for start in range(0, len(rows), size)]
        parts = list(self._loader)
        for part in parts:
            if set(part) != set(parts[0]):
                differing = ", ".join(sorted(set(part) ^ set(parts[0])))
                raise ValueError(f"rows of the data set differ in their columns: not all of them have {differing}")
        return {
            name: torch.cat([p[name] for p in parts])
            if isinstance(column, torch.Tensor)
            else np.concatenate([p[name] for p in parts])
            for name, column in parts[0].items()
        }
