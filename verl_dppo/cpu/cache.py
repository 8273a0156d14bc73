"""A KV cache for decoding a changing set of rows, written in place.

All rows end at the same column, so a step writes one column for everyone; a row's own tokens begin at its `start`, and
the columns before that are masked. Rows join (their prompt is placed to end at the current column) and leave (the last
rows move into the holes) without copying the others.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Layer(CacheLayerMixin):
    """One layer's keys and values: (row capacity, heads, column capacity, head size), used up to `rows` and `end`."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.end = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the first rows."""
        rows, heads, _, _ = key_states.shape
        self.keys = key_states.new_zeros((rows, heads, 0, key_states.shape[-1]))
        self.values = value_states.new_zeros((rows, heads, 0, value_states.shape[-1]))
        self.rows, self.is_initialized = rows, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.end + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.place(self.rows, self.end, end, skip=0)
        self.keys[: self.rows, :, self.end : end] = key_states
        self.values[: self.rows, :, self.end : end] = value_states
        self.end = end
        return self.keys[: self.rows, :, :end], self.values[: self.rows, :, :end]

    def place(self, rows: int, end: int, capacity: int, skip: int) -> None:
        """Move to buffers of `rows` x `capacity`, less the first `skip` columns, so that the content ends at `end`."""
        width = self.end - skip
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty((rows, old.shape[1], capacity, old.shape[3]))
            new[: self.rows, :, end - width : end] = old[: self.rows, :, skip : self.end]
            # What is masked must still be finite: 0 * NaN is NaN.
            new[: self.rows, :, : end - width] = 0
            setattr(self, name, new)
        self.end = end

    def join(self, other: "Layer", source: torch.Tensor) -> None:
        """Append rows `source` of `other`, ending at this cache's end."""
        stop = self.rows + len(source)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine[self.rows : stop, :, self.end - other.end : self.end] = theirs[source, :, : other.end]
            mine[self.rows : stop, :, : self.end - other.end] = 0
        self.rows = stop

    def leave(self, holes: torch.Tensor, movers: torch.Tensor, rows: int) -> None:
        """Put rows `movers` in the place of rows `holes`, then keep the first `rows`."""
        for buffer in (self.keys, self.values):
            buffer[holes, :, : self.end] = buffer[movers, :, : self.end]
        self.rows = rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a query attends over, and the first one's index."""
        return self.end + query_length, 0

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.end

    def get_max_cache_shape(self) -> int:
        """No limit."""
        return -1


class RowCache(Cache):
    """The layers of a model, and where each row starts."""

    layers: list[Layer]

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__(layer_class_to_replicate=Layer)
        self.start = start

    @property
    def end(self) -> int:
        """Columns in use."""
        return self.layers[0].end if self.layers else 0

    def mask(self, new: int = 0) -> torch.Tensor:
        """Return (rows, end + new): which columns hold a row's own tokens."""
        return torch.arange(self.end + new) >= self.start[:, None]

    def select(self, source: torch.Tensor, room: int) -> "RowCache":
        """Return a cache of rows `source`, repeats allowed, with room for `room` more columns."""
        chosen = RowCache(self.start[source])
        for layer in self.layers:
            copy = Layer()
            copy.keys, copy.values = layer.keys[source], layer.values[source]
            copy.rows, copy.end, copy.is_initialized = len(source), layer.end, True
            copy.place(len(source), layer.end, layer.end + room, skip=0)
            chosen.layers.append(copy)
        return chosen

    def join(self, other: "RowCache", source: torch.Tensor, room: int) -> None:
        """Append rows `source` of `other`; see to room for `room` more columns."""
        rows, before, unused = len(self.start) + len(source), self.end, int(self.start.min())
        capacity = self.layers[0].keys.shape
        if rows > capacity[0] or before + room > capacity[2] or other.end > before:
            end = max(before - unused, other.end)
            for layer in self.layers:
                layer.place(rows, end, end + room, skip=unused)
            self.start = self.start + end - before
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs, source)
        self.start = torch.cat([self.start, other.start[source] + self.end - other.end])

    def leave(self, holes: torch.Tensor, movers: torch.Tensor, rows: int) -> None:
        """Put rows `movers` in the place of rows `holes`, then keep the first `rows`."""
        for layer in self.layers:
            layer.leave(holes, movers, rows)
        self.start[holes] = self.start[movers]
        self.start = self.start[:rows].clone()
