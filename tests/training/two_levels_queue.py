"""The transfer queue in memory: rows of fields under keys, with tags."""

import numpy as np
import torch
import transfer_queue
from tensordict import TensorDict
from training.fake_queue import jagged
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu


class Queue:
    """Stands in for `transfer_queue`, of which trainers use three functions."""

    def __init__(self) -> None:
        self.fields: dict[str, dict] = {}
        self.tags: dict[str, dict] = {}

    def install(self, monkeypatch) -> None:
        for name in ("kv_batch_put", "kv_batch_get", "kv_clear"):
            monkeypatch.setattr(transfer_queue, name, getattr(self, name))

    def put(self, key: str, tag: dict, **fields) -> None:
        self.fields.setdefault(key, {}).update(fields)
        self.tags.setdefault(key, {}).update(tag)

    def batch(self, keys) -> KVBatchMeta:
        names = sorted(set().union(*(self.fields[key] for key in keys)))
        return KVBatchMeta(
            partition_id="train", keys=list(keys), tags=[self.tags[key] for key in keys], fields=names, extra_info={}
        )

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None) -> KVBatchMeta:
        columns = {}
        if fields is not None:
            columns = {
                name: fields[name].unbind() if isinstance(fields[name], torch.Tensor) else fields[name].tolist()
                for name in fields.keys()  # noqa: SIM118 (iterating a TensorDict yields its rows)
            }
        for row, key in enumerate(keys):
            self.put(key, tags[row] if tags else {}, **{name: column[row] for name, column in columns.items()})
        return self.batch(keys)

    def kv_batch_get(self, keys, partition_id, select_fields=None) -> TensorDict:
        there = self.fields[keys[0]]
        return tu.get_tensordict(
            {
                name: _column([self.fields[key][name] for key in keys])
                for name in (there if select_fields is None else select_fields)
                if name in there
            }
        )

    def kv_clear(self, keys, partition_id) -> None:
        for key in keys:
            del self.fields[key], self.tags[key]


def _column(values):
    if not isinstance(values[0], torch.Tensor):
        return np.array(values, dtype=object)
    return jagged(values) if values[0].dim() else torch.stack(values)
