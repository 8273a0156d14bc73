"""How many bins packers need under a token cap, whether they keep it, and how long they take, side by side.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [--gsm8k FOLDER] [--tokenizer NAME] [--only gsm8k] [--limit 10]
        [--plot packing.png]

Ours with the whole step at hand and with a window of 512 rows; verl's rearrange_micro_batches, which raises the number
of micro-batches until the cap holds; verl's partition into ceil(tokens / cap) parts, free counts; TRL's best-fit
decreasing and `binpacking` where they are installed; plain first-fit decreasing and next-fit. Lengths are log-normal in
groups of 8, heavy-tailed, those of GSM8K and of the demo's rollouts. L2 is the Martello-Toth bound, which no packing
undercuts; density is tokens / (bins * cap). Times are the median of up to 11 runs, those above the limit are given up.
verl's rearrange_micro_batches also takes the batch apart, here one of nothing but token ids, and TRL's packing moves
the tokens. verl packs what one rank has of a mini-batch, tens of rows to some hundreds: see 64 rows for its times.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from lengths import DATA, Index, demo_rollouts, gsm8k, lognormal_groups, pareto

from verl_dppo.packing.bins import bins_lower_bound, pack

WINDOW = 512
REPEATS = 11
OURS = "ours, whole step"

Rows = list[Any]
Packer = Callable[[Index, int], tuple[Callable[[], Any], Callable[[Any], Rows]]]
"""From lengths and cap to what is timed, and to what reads the rows of each bin from its answer."""


def same(bins: Rows) -> Rows:
    return bins


def ours(length: Index, cap: int, window: int | None = None):
    return lambda: pack(length, cap, window), same


def first_fit_decreasing(length: Index, cap: int):
    def run() -> Rows:
        bins: Rows = []
        room: list[int] = []
        tokens = length.tolist()
        for row in np.argsort(-length, kind="stable").tolist():
            k = next((k for k, left in enumerate(room) if tokens[row] <= left), len(bins))
            if k == len(bins):
                bins.append([])
                room.append(cap)
            bins[k].append(row)
            room[k] -= tokens[row]
        return bins

    return run, same


def next_fit(length: Index, cap: int):
    def run() -> Rows:
        bins: Rows = []
        left = -1
        for row, tokens in enumerate(length.tolist()):
            if tokens > left:
                bins.append([])
                left = cap
            bins[-1].append(row)
            left -= tokens
        return bins

    return run, same


def verl_rearrange(length: Index, cap: int):
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(length)]))
    ids = torch.nested.nested_tensor_from_jagged(torch.zeros(int(offsets[-1]), dtype=torch.int64), offsets)
    batch = TensorDict({"input_ids": ids}, batch_size=[length.size])
    return lambda: rearrange_micro_batches(batch, max_token_len=cap), lambda answer: answer[1]


def verl_partitions(length: Index, cap: int):
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    tokens, parts = length.tolist(), -(-int(length.sum()) // cap)
    return lambda: get_seqlen_balanced_partitions(tokens, parts, equal_size=False), same


def trl_best_fit_decreasing(length: Index, cap: int):
    import pyarrow
    from trl.data_utils import _pack_bfd

    # Each token is the number of its row, by which rows are found again.
    ends = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
    tokens = np.repeat(np.arange(length.size, dtype=np.int32), length)
    table = pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(ends, tokens)})
    return lambda: _pack_bfd(table, cap), lambda packed: [np.unique(row.values) for row in packed["input_ids"]]


def binpacking_constant_volume(length: Index, cap: int):
    from binpacking import to_constant_volume

    tokens = dict(enumerate(length.tolist()))
    return lambda: to_constant_volume(tokens, cap), lambda bins: [list(rows) for rows in bins]


PACKERS: dict[str, Packer] = {
    OURS: ours,
    f"ours, window of {WINDOW}": partial(ours, window=WINDOW),
    "verl rearrange_micro_batches": verl_rearrange,
    "verl partitions, ceil(tokens / cap)": verl_partitions,
    "TRL best-fit decreasing": trl_best_fit_decreasing,
    "binpacking to_constant_volume": binpacking_constant_volume,
    "first-fit decreasing, plain": first_fit_decreasing,
    "next-fit": next_fit,
}


@dataclass(frozen=True)
class Figures:
    """What one packer did with one set of lengths."""

    bins: int
    over_bound: float
    density: float
    violations: int
    seconds: float


class GivenUpError(Exception):
    """A run took longer than its limit."""


@contextmanager
def limited(seconds: float):
    """Raise GivenUpError in what takes longer."""

    def stop(*_: object) -> None:
        raise GivenUpError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(packer: Packer, length: Index, cap: int, limit: float) -> Figures | str:
    """Return the figures, or the words that stand for them."""
    try:
        run, rows_of = packer(length, cap)
        with limited(limit):
            times, answer = timed(run)
    except ImportError:
        return "not installed"
    except GivenUpError:
        return f"more than {limit:.0f} s"
    rows = rows_of(answer)
    if sorted(row for one in rows for row in np.asarray(one).tolist()) != list(range(length.size)):
        return "lost rows"
    loads = np.array([length[np.asarray(one)].sum() for one in rows])
    bound = bins_lower_bound(length, cap)
    density = float(length.sum()) / (loads.size * cap)
    return Figures(loads.size, loads.size / bound - 1, density, int((loads > cap).sum()), float(np.median(times)))


def timed(run: Callable[[], Any]) -> tuple[list[float], Any]:
    """Return the times and the last answer; what takes long runs once."""
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < 1:
        start = perf_counter()
        answer = run()
        times.append(perf_counter() - start)
    return times, answer


def steps(folder: Path, tokenizer: str | None) -> dict[str, tuple[Index, int]]:
    """Return lengths and cap of each step, by name."""
    texts, counted_by = gsm8k(folder, tokenizer)
    found = {
        f"log-normal, {n} rows, cap {cap}": (lognormal_groups(n, cap, seed=0), cap)
        for n, cap in ((64, 8192), (1024, 8192), (4096, 16384), (8192, 32768))
    }
    for n, cap in ((1024, 8192), (8192, 32768)):
        found[f"log-normal about cap / 3, {n} rows, cap {cap}"] = (lognormal_groups(n, cap, 0, median=cap / 3), cap)
        found[f"Pareto 1.2, {n} rows, cap {cap}"] = (pareto(n, 1.2, cap, seed=0), cap)
    cap = 4096 if texts.size > 1000 else 1024
    found[f"gsm8k, {texts.size} rows, cap {cap}; {counted_by}"] = (texts, cap)
    for name in ("mixed-length-0", "even-length-0"):
        found[f"demo rollouts {name}, 1024 rows, cap 256"] = (demo_rollouts(name), 256)
    return found


def table(name: str, figures: dict[str, Figures | str]) -> str:
    """Return a Markdown table with a row for each packer."""
    reference = figures[OURS]
    lines = [
        f"| {name} | bins | over L2 | density | bins above the cap | ms | time / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for packer, found in figures.items():
        if isinstance(found, str) or isinstance(reference, str):
            lines.append(f"| {packer} | {found} | | | | | |")
            continue
        lines.append(
            f"| {packer} | {found.bins} | {found.over_bound:+.2%} | {found.density:.4f} | {found.violations} | "
            f"{1e3 * found.seconds:.1f} | {found.seconds / reference.seconds:.2g} |"
        )
    return "\n".join(lines)


def plot(path: Path, results: dict[str, dict[str, Figures | str]]) -> None:
    """Draw density and time of each packer on each step; hollow where the cap is broken."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 0.55 * len(results) + 3.2), sharey=True, layout="constrained")
    markers = "oD^vPXsd"
    for k, packer in enumerate(PACKERS):
        for axis, value in zip(axes, (lambda f: f.density, lambda f: 1e3 * f.seconds), strict=True):
            points = [(y, f[packer]) for y, f in enumerate(results.values()) if not isinstance(f[packer], str)]
            if points:
                filled = [f"C{k}" if not f.violations else "none" for _, f in points]
                axis.scatter(
                    [value(f) for _, f in points],
                    [y for y, _ in points],
                    c=filled,
                    edgecolors=f"C{k}",
                    marker=markers[k],
                    label=packer,
                )
    axes[0].set(xlabel="density: tokens / (bins x cap); hollow: bins above the cap")
    axes[1].set(xlabel="time, ms", xscale="log")
    axes[0].set_yticks(range(len(results)), [name.split(";")[0] for name in results])
    axes[0].invert_yaxis()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=150)


def selected(found: dict[str, tuple[Index, int]], only: Iterable[str]) -> dict[str, tuple[Index, int]]:
    return {name: step for name, step in found.items() if not only or any(word in name for word in only)}


def main() -> None:
    """Print a table for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=DATA / "gsm8k", help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--tokenizer", help="Hugging Face tokenizer for GSM8K")
    parser.add_argument("--only", nargs="*", default=[], help="words of which one is in the name of a step")
    parser.add_argument("--limit", type=float, default=10, help="seconds after which a packer is given up")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, (length, cap) in selected(steps(arguments.gsm8k, arguments.tokenizer), arguments.only).items():
        results[name] = {label: measure(packer, length, cap, arguments.limit) for label, packer in PACKERS.items()}
        print(table(f"{name}; L2 {bins_lower_bound(length, cap)}", results[name]) + "\n", flush=True)
    if arguments.plot:
        plot(arguments.plot, results)


if __name__ == "__main__":
    main()
