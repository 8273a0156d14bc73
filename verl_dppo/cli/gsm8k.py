"""`verl-dppo gsm8k`: make verl's train.parquet and test.parquet of GSM8K.

    verl-dppo gsm8k --jsonl DIR                 # DIR/train.jsonl and DIR/test.jsonl
    verl-dppo gsm8k --train FILE --test FILE
    verl-dppo gsm8k --hub                       # openai/gsm8k through `datasets`

Every row is checked before anything is written: a refused input leaves older files as they were.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPLITS = ("train", "test")
DATA_SOURCE = "openai/gsm8k"  # the name under which verl's default reward knows these answers
INSTRUCTION = "Think it through step by step, and end with a line that holds only the answer, written as `#### number`."
_ANSWER = re.compile(r"#### (-?\d[\d,]*(?:\.\d+)?)\s*\Z")

Row = dict[str, Any]


class InputError(ValueError):
    """An input that cannot become training data; the message says where and what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--jsonl", type=Path, metavar="DIR", help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--train", type=Path, metavar="FILE", help="training split as jsonl, together with --test")
    parser.add_argument("--test", type=Path, metavar="FILE", help="test split as jsonl, together with --train")
    parser.add_argument(
        "--hub",
        nargs="?",
        const=DATA_SOURCE,
        metavar="NAME",
        help=f"Hugging Face data set (without NAME: {DATA_SOURCE})",
    )
    parser.add_argument("--hub-config", default="main", metavar="NAME", help="configuration of --hub (default: main)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("data/gsm8k"),
        metavar="DIR",
        help="where train.parquet and test.parquet go (default: data/gsm8k)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0, or 2 after saying why the input was refused."""
    try:
        written = write_splits({split: to_rows(split, source) for split, source in _sources(args).items()}, args.out)
    except (InputError, OSError) as error:
        print(f"verl-dppo gsm8k: {error}", file=sys.stderr)
        return 2
    for path, count in written.items():
        print(f"{path}: {count} rows")
    return 0


def ground_truth(answer: str) -> str:
    """Return the number after the final `####` as verl's reward compares it: without thousands separators."""
    match = _ANSWER.search(answer)
    if match is None:
        raise ValueError("the answer does not end with `#### number`")
    return match.group(1).replace(",", "")


def to_row(split: str, index: int, record: Any) -> Row:
    """Turn one GSM8K record into one row of verl; raise ValueError if it is not one."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    for key in ("question", "answer"):
        if not isinstance(record.get(key), str) or not record[key].strip():
            raise ValueError(f"`{key}` is missing, empty, or not text")
    question, answer = record["question"], record["answer"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth(answer)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def to_rows(split: str, source: Iterator[tuple[str, Any]]) -> list[Row]:
    """Turn (place, record) pairs into rows; a refusal names the place."""
    rows: list[Row] = []
    for place, record in source:
        try:
            rows.append(to_row(split, len(rows), record))
        except ValueError as error:
            raise InputError(f"{place}: {error}; correct or remove this record") from error
    return rows


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", record) for every line that is not blank; refuse a file without any."""
    if not path.is_file():
        raise InputError(
            f"{path} does not exist; give the folder that holds train.jsonl and test.jsonl with --jsonl, "
            "both files with --train and --test, or fetch the data with --hub"
        )
    empty = True
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                empty = False
                yield f"{path}:{number}", _parse(line, f"{path}:{number}")
    if empty:
        raise InputError(f"{path} is empty; expected one JSON object with `question` and `answer` a line")


def read_hub(name: str, config: str, split: str) -> Iterator[tuple[str, Any]]:
    """Yield ("name split row i", record) for every row of a Hugging Face data set."""
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # network, name, split: `datasets` has no common base for them
        raise InputError(
            f"could not load the {split} split of {name} ({config}): {error}\n"
            "Without a network, copy train.jsonl and test.jsonl here and use --jsonl DIR"
        ) from error
    if len(rows) == 0:
        raise InputError(f"the {split} split of {name} ({config}) is empty")
    for index, record in enumerate(rows):
        yield f"{name} {split} row {index}", record


def write_splits(rows: dict[str, list[Row]], out: Path) -> dict[Path, int]:
    """Write `out`/SPLIT.parquet for every split and return the row counts.

    Each file is written in full next to its final name; only when all are complete are they renamed into place.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    out.mkdir(parents=True, exist_ok=True)
    final = {split: out / f"{split}.parquet" for split in rows}
    partial = {split: out / f".{split}.parquet.{os.getpid()}.partial" for split in rows}
    try:
        for split, path in partial.items():
            pq.write_table(pa.Table.from_pylist(rows[split]), path)
        for split, path in partial.items():
            os.replace(path, final[split])
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return {final[split]: len(rows[split]) for split in rows}


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # broken JSON and broken UTF-8 alike
        raise InputError(f"{place}: not JSON ({error}); expected an object with `question` and `answer`") from error


def _sources(args: argparse.Namespace) -> dict[str, Iterator[tuple[str, Any]]]:
    """Return one reader per split, from the one source that the options choose."""
    files = args.train is not None or args.test is not None
    if sum((args.jsonl is not None, files, args.hub is not None)) != 1:
        raise InputError("choose one source: --jsonl DIR, or --train FILE with --test FILE, or --hub")
    if args.hub is not None:
        return {split: read_hub(args.hub, args.hub_config, split) for split in SPLITS}
    if args.jsonl is not None:
        return {split: read_jsonl(args.jsonl / f"{split}.jsonl") for split in SPLITS}
    if args.train is None or args.test is None:
        raise InputError("--train and --test go together: give both files")
    return {"train": read_jsonl(args.train), "test": read_jsonl(args.test)}
