"""A name for every row of a data set that says what the row asks, not where it stands."""

import base64
import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_dppo.settings import RefusedSettingError, refuse

ID_BYTES = 12
ROWS_AT_A_TIME = 1000
ROWS_WITH_MEDIA = 16  # they are decoded to be read

logger = logging.getLogger(__name__)


def prompt_ids(dataset: Any, data: DictConfig, id_column: str | None = None) -> list[str]:
    """Return the id of each row: of its prompt and data source, or of a column that names it and its data source.

    Two rows with the same prompt, media and data source have the same id: they are one prompt to the history.

    Args:
        dataset: verl's `RLHFDataset`, or any data set whose items hold `raw_prompt`.
        data: verl's `data` settings, for the names of columns.
        id_column: name of a column, with dots for what is inside of one, e.g. `extra_info.index`.

    Returns:
        One id for each row, 16 characters.

    Raises:
        RefusedSettingError: a column that is not there, that is empty in some row, or that is the same in all rows of a
            data source.
    """
    ids: list[str] = []
    rows_of, ids_of = Counter[str](), defaultdict[str, set[str]](set)
    for content in _contents(dataset, data, id_column):
        ids.append(_digest(content))
        source = str(content[0])
        rows_of[source] += 1
        if len(ids_of[source]) < 2:
            ids_of[source].add(ids[-1])
    for source, rows in rows_of.items():
        if id_column and len(ids_of[source]) == 1 < rows:
            reason = (
                f"all {rows} rows of the data source {source} have the same value there, as if they were one prompt"
            )
            raise refuse("algorithm.dppo.prompt.id_column", id_column, reason, "name another column, or leave it null")
    distinct = len(set(ids))
    if distinct < len(ids):
        logger.warning(
            f"{len(ids)} rows of the data set are {distinct} different prompts: those that repeat share a history"
        )
    return ids


def _contents(dataset: Any, data: DictConfig, id_column: str | None) -> Iterator[Any]:
    """Yield what makes a row what it is."""
    # A class of a user's own may serve other rows than those of its table.
    own = type(dataset).__getitem__ is RLHFDataset.__getitem__ and type(dataset).__len__ is RLHFDataset.__len__
    prompt = data.get("prompt_key", "prompt")
    media = [data.get(f"{kind}_key", f"{kind}s") for kind in ("image", "video", "audio")]
    naming = [id_column.split(".")[0]] if id_column else [prompt, *media]
    if own:
        table = dataset.dataframe
        if naming[0] not in table.column_names:
            raise _nothing_there(id_column or naming[0], table.column_names)
        there = [name for name in dict.fromkeys(["data_source", *naming]) if name in table.column_names]
        table = table.select_columns(there)
        at_a_time = ROWS_WITH_MEDIA if set(there) & set(media) else ROWS_AT_A_TIME
        for start in range(0, len(table), at_a_time):
            rows = table[start : start + at_a_time]
            for values in zip(*(rows[name] for name in there), strict=True):
                yield _content(dict(zip(there, values, strict=True)), [prompt, *media], id_column)
        return
    for row in range(len(dataset)):
        yield _content(dataset[row], ["raw_prompt", *media], id_column)


def _content(row: Mapping[str, Any], columns: list[str], id_column: str | None) -> Any:
    source = row.get("data_source")
    if id_column is None:
        if columns[0] not in row:
            reason = f"rows of the data set have no {columns[0]!r} that could be hashed"
            raise refuse("algorithm.dppo.prompt.id_column", None, reason, "name a column that tells prompts apart")
        return [source, *(row.get(name) for name in columns)]
    value: Any = row
    for name in id_column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        raise _nothing_there(id_column, row)
    return [source, "id", value]


def _nothing_there(name: str, columns: Iterable[str]) -> RefusedSettingError:
    reason = f"a row of the data set has nothing there; its columns are {', '.join(sorted(columns))}"
    return refuse("algorithm.dppo.prompt.id_column", name, reason, "name another column, or leave it null")


def _digest(content: Any) -> str:
    text = json.dumps(_without_none(content), sort_keys=True, default=_plain)
    return base64.urlsafe_b64encode(hashlib.blake2b(text.encode(), digest_size=ID_BYTES).digest()).decode()


def _without_none(value: Any) -> Any:
    """Leave out empty fields: a table has every field of any of its rows in all of them, rows of their own do not."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Return a stand-in for what JSON does not know: bytes, arrays, scalars of numpy and torch, pictures."""
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=ID_BYTES).hexdigest()
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    if hasattr(value, "tobytes"):  # a picture, of which the bytes alone do not tell the width
        return [getattr(value, "size", None), value.tobytes()]
    reason = f"a prompt holds a {type(value).__name__}, which has no content that could be hashed"
    raise refuse("algorithm.dppo.prompt.id_column", None, reason, "name a column that tells prompts apart")


def fingerprint(ids: list[str]) -> str:
    """Return a digest of the ids in their order: the same prompts in another order have another one."""
    return hashlib.blake2b("\n".join(ids).encode(), digest_size=ID_BYTES).hexdigest()
