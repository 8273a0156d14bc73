"""Chain sums of the reasoning-gym library as verl's data and verl's reward.

    custom_reward_function.path=pkg://verl_dppo.cpu.demo.task custom_reward_function.name=compute_score

A problem belongs to the training or the validation split by a hash of its expression, so the splits are disjoint
for every pair of seeds, and the warm start, which draws from the training split, has seen no validation problem.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq
import reasoning_gym
from reasoning_gym.factory import get_score_answer_fn

Split = Literal["train", "validation"]
DATASET = "chain_sum"
DATA_SOURCE = f"reasoning_gym/{DATASET}"
DIFFICULTY = {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 2}
VALIDATION_SHARE = 0.1
# reasoning-gym's Decimal also accepts digits of other scripts and underscores, which a byte-level policy may find.
FINAL_ANSWER = re.compile(r"answer: (-?[0-9]+)")


def split_of(expression: str) -> Split:
    """Return the only split that `expression` may appear in."""
    return "validation" if crc32(expression.encode()) < VALIDATION_SHARE * 2**32 else "train"


def problems(split: Split, seed: int, **easier: int) -> Iterator[dict[str, Any]]:
    """Yield reasoning-gym entries of one split without end; the easiest ones recur.

    `easier` overrides entries of `DIFFICULTY`.
    """
    # reasoning-gym seeds entry i with seed + i: neighbouring seeds would share all entries but one.
    dataset = reasoning_gym.create_dataset(DATASET, seed=seed << 32, size=2**32, **(DIFFICULTY | easier))
    for index in range(len(dataset)):
        entry = dataset[index]
        if split_of(entry["metadata"]["expression"]) == split:
            yield entry


def unique_problems(split: Split, seed: int, count: int) -> list[dict[str, Any]]:
    """Return the first `count` entries of a split with different expressions."""
    found: dict[str, dict[str, Any]] = {}
    for entry in problems(split, seed):
        if len(found) == count:
            break
        found.setdefault(entry["metadata"]["expression"], entry)
    return list(found.values())


def messages(entry: dict[str, Any]) -> list[dict[str, str]]:
    """Return the chat prompt: the expression alone, as the library's sentence around it never changes."""
    return [{"role": "user", "content": entry["metadata"]["expression"] + " ="}]


def to_row(entry: dict[str, Any], split: Split, index: int) -> dict[str, Any]:
    """Convert one entry to a row that verl's `RLHFDataset` reads."""
    metadata = entry["metadata"]
    return {
        "data_source": DATA_SOURCE,
        "prompt": messages(entry),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "split": split,
            "index": index,
            "num_terms": metadata["num_terms"],
            "num_digits": metadata["num_digits"],
        },
    }


def write_parquet(folder: str | Path, train_rows: int, validation_rows: int, seed: int = 0) -> dict[Split, Path]:
    """Write `train.parquet` and `validation.parquet` below `folder` and return their paths by split."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts: dict[Split, int] = {"train": train_rows, "validation": validation_rows}
    paths: dict[Split, Path] = {}
    for split, count in counts.items():
        rows = [to_row(entry, split, index) for index, entry in enumerate(unique_problems(split, seed, count))]
        paths[split] = folder / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), paths[split])
    return paths


@cache
def _score_answer() -> Any:
    return get_score_answer_fn(DATASET)


def final_answer(response: str) -> str | None:
    """Return the number on the last line if that line reads `answer: N`, else None."""
    last_line = response.rstrip().rpartition("\n")[2]
    match = FINAL_ANSWER.fullmatch(last_line)
    return match.group(1) if match else None


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Return 1.0 if reasoning-gym accepts the response's final answer, else 0.0 (verl's reward signature)."""
    if data_source != DATA_SOURCE:
        raise ValueError(f"this reward scores {DATA_SOURCE!r}, got data_source={data_source!r}")
    answer = final_answer(solution_str)
    # reasoning-gym pays a fraction for an answer that contains the right one; this task pays for the right one only.
    return float(answer is not None and _score_answer()(answer, {"answer": ground_truth}) == 1.0)
