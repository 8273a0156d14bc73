"""A name for every row of a data set that says what the row asks, not where it stands."""

import base64
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_dppo.settings import refuse

ID_BYTES = 12
ROWS_AT_A_TIME = 1000

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
        RefusedSettingError: a column that is not there, that is empty in some row, or that is the same in all of them.
    """
    ids = [_digest(content) for content in _contents(dataset, data, id_column)]
    distinct = len(set(ids))
    if id_column and distinct == 1 < len(ids):
        reason = f"all {len(ids)} rows have the same value there, so that the history would take them for one prompt"
        raise refuse("algorithm.dppo.prompt.id_column", id_column, reason, "name another column, or leave it null")
    if distinct < len(ids):
        logger.warning(
            f"{len(ids)} rows of the data set are {distinct} different prompts: those that repeat share a history"
        )
    return ids


def _contents(dataset: Any, data: DictConfig, id_column: str | None) -> Iterator[Any]:
    """Yield what makes a row what it is."""
    table: Any = getattr(dataset, "dataframe", None)
    prompt = data.get("prompt_key", "prompt")
    media = [data.get(f"{kind}_key", f"{kind}s") for kind in ("image", "video", "audio")]
    naming = [id_column.split(".")[0]] if id_column else [prompt, *media]
    if naming[0] in getattr(table, "column_names", ()):
        there = [name for name in dict.fromkeys(["data_source", *naming]) if name in table.column_names]
        table = table.select_columns(there)
        for start in range(0, len(table), ROWS_AT_A_TIME):
            rows = table[start : start + ROWS_AT_A_TIME]
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
        reason = f"a row of the data set has nothing there; its columns are {', '.join(sorted(row))}"
        raise refuse("algorithm.dppo.prompt.id_column", id_column, reason, "name another column, or leave it null")
    return [source, "id", value]


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
