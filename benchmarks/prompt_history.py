"""What remembering a data set's prompts costs on the driver: per step, per checkpoint, and in the file.

    OMP_NUM_THREADS=1 python benchmarks/prompt_history.py [--prompts 1000000] [--batch 1024] [--group 8] [--repeats 20]

Every prompt has been visited. Times of a step are medians over the repeats, those of files the longest of three. The
decision is all of `PromptLevel.next_batch` but the loading of rows, halfway through a pass; the share of known prompts
among those to come is part of it. Learning is its `observe`.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from omegaconf import OmegaConf

from verl_dppo.pruning import PromptHistory, load_history, save_history
from verl_dppo.settings import DPPOSettings
from verl_dppo.training.prompt_level import PromptLevel
from verl_dppo.training.transform import FullBatch

MILLISECOND, SECOND, MEGABYTE = 1e3, 1.0, 1e-6


class NumberedPrompts:
    """A data set of different prompts that are made when they are asked for."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": f"problem {row}"}], "data_source": "made up"}


class NoRows:
    """Loads nothing: what rows cost to load is the data set's own matter."""

    def fetch(self, rows: list[int]) -> dict[str, Any]:
        return {"rows": rows}


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = perf_counter()
    function()
    return perf_counter() - start


def median(function: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of several calls, the first of which is not counted."""
    return float(np.median([timed(function) for _ in range(repeats + 1)][1:]))


def new_level(rows: int, batch: int, group: int, keep: float | str = 0.9) -> PromptLevel:
    """Return the prompt level of a data set none of whose prompts was visited; it loads no rows."""
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": batch},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": batch}, "rollout": {"n": group}},
            "trainer": {"total_epochs": 3},
        }
    )
    order = np.random.default_rng(0)
    settings = DPPOSettings.from_mapping({"prompt": {"keep": keep}})
    level = PromptLevel(settings, config, NumberedPrompts(rows), lambda: order.permutation(rows))
    level.loader = NoRows()
    return level


def visited_level(rows: int, batch: int, group: int, keep: float | str = 0.9) -> PromptLevel:
    """Return the prompt level of a data set all of whose prompts were visited once, halfway through its second pass."""
    level, rng = new_level(rows, batch, group, keep), np.random.default_rng(1)
    level.history.observe(level.ids, binary_rewards(rows, group, rng), 1)
    with tempfile.TemporaryDirectory() as folder:  # loading is what tells it which rows are known
        level.save(folder)
        level.load(folder)
    level.stream.position = rows + rows // 2  # of the second pass, half of which was drawn
    return level


def binary_rewards(prompts: int, group: int, rng: np.random.Generator) -> np.ndarray:
    """Return (prompts, group) rewards of pass rates that are spread evenly."""
    return (rng.random((prompts, group)) < rng.random((prompts, 1))).astype(np.float64)


def sampled(prompts: int, group: int, rng: np.random.Generator) -> FullBatch:
    """Return what a step knows of the completions of so many prompts."""
    reward, n = binary_rewards(prompts, group, rng).ravel(), prompts * group
    return FullBatch(
        group=np.repeat(np.arange(prompts), group),
        advantage=rng.normal(size=n),
        length=np.full(n, 500.0),
        prompt_length=np.full(n, 100),
        sequence_length=np.full(n, 600),
        reward=reward,
        session=np.arange(n),
        has_advantage=np.ones(n, dtype=bool),
        sum_sq_one_minus_p=None,
        signature=None,
        mean_negative_log_prob=None,
        verl_metrics={},
    )


def history_times(history: PromptHistory, ids: list[str], group: int, repeats: int) -> dict[str, float]:
    """Return seconds and bytes of a history: of a step for the prompts `ids`, of its file, and what it takes there."""
    rng = np.random.default_rng(2)
    rewards = binary_rewards(len(ids), group, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.npz"
        times = {
            "observe": median(lambda: history.observe(ids, rewards, 2), repeats),
            "inclusion, beta": median(lambda: history.inclusion(ids, 0.9), repeats),
            "inclusion, threshold": median(lambda: history.inclusion(ids, 0.9, rule="threshold"), repeats),
            "save": max(timed(lambda: save_history(path, history)) for _ in range(3)),
            "load": max(timed(lambda: load_history(path, PromptHistory())) for _ in range(3)),
        }
        return times | {"file": float(path.stat().st_size), "file, ids apart": _columns_bytes(path)}


def _columns_bytes(path: Path) -> float:
    with np.load(path) as file:
        return float(sum(file[name].nbytes for name in file.files if name not in ("id", "header")))


def level_times(level: PromptLevel, group: int, repeats: int) -> dict[str, float]:
    """Return the seconds that the prompt level adds to a step."""
    deal, sample = np.random.default_rng(3), np.random.default_rng(4)
    full = sampled(level.batch_size, group, np.random.default_rng(5))
    magnitude = np.abs(full.advantage)
    return {
        "first decision": timed(lambda: level.next_batch(False, deal, sample)),
        "decision": median(lambda: level.next_batch(False, deal, sample), repeats),
        "learning": median(lambda: level.observe(2, full, full.group, magnitude), repeats),
    }


def rows(found: dict[str, float], names: Iterable[tuple[str, str, float, str]]) -> list[str]:
    """Return lines of a Markdown table: name, figure in its unit, goal."""
    return [f"| {label} | {found[name] * unit:.1f} | {goal} |" for name, label, unit, goal in names]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    level = visited_level(arguments.prompts, arguments.batch, arguments.group)
    automatic = visited_level(arguments.prompts, arguments.batch, arguments.group, "auto")
    drawn = np.random.default_rng(6).choice(arguments.prompts, arguments.batch)
    found = history_times(level.history, [level.ids[row] for row in drawn], arguments.group, arguments.repeats)
    found["observe + inclusion"] = found["observe"] + found["inclusion, beta"]
    found |= level_times(level, arguments.group, arguments.repeats)
    found["learning, auto"] = level_times(automatic, arguments.group, arguments.repeats)["learning"]
    print(f"{arguments.prompts} prompts; a batch of {arguments.batch} x {arguments.group}\n")
    print("| | measured | goal |\n|---|---|---|")
    names = [
        ("observe", "observe, ms", MILLISECOND, ""),
        ("inclusion, beta", "inclusion by beta, ms", MILLISECOND, ""),
        ("inclusion, threshold", "inclusion by threshold, ms", MILLISECOND, ""),
        ("observe + inclusion", "observe + inclusion by beta, ms", MILLISECOND, "10"),
        ("decision", "decision of a step, rows not loaded, ms", MILLISECOND, ""),
        ("first decision", "the first after a start, which orders two passes, s", SECOND, ""),
        ("learning", "learning from a step, ms", MILLISECOND, ""),
        ("learning, auto", "the same with keep=auto, ms", MILLISECOND, ""),
        ("save", "save, s", SECOND, "2"),
        ("load", "load, s", SECOND, "2"),
        ("file", "file, MB", MEGABYTE, "40"),
        ("file, ids apart", "file without ids, MB", MEGABYTE, "16"),
    ]
    print("\n".join(rows(found, names)))


if __name__ == "__main__":
    main()
