"""How even parts are whose costs were balanced, and how long balancing takes, side by side in one run.

    OMP_NUM_THREADS=1 python benchmarks/balance.py [--gsm8k FOLDER] [--tokenizer NAME] [--only log-normal]
        [--seeds 3] [--repeats 5] [--plot balance.png]

The cost of a row is verl's workload, 24576 L + L^2. Ours and verl's partition at equal and at free counts, the
`to_constant_bin_number` of `binpacking` where it is installed, longest processing time first, and round robin in order
of length. Lengths are log-normal in groups of 8 and heavy-tailed up to 32k, those of GSM8K and of the demo's rollouts.

gap: makespan over `makespan_lower_bound` for the same counts, less 1, the worst of all steps of a kind. Beside it the
gap to the plainer bound of three terms: the mean, the largest row with the m - 1 smallest for equal counts of m, and
the parts-th with the next. Counts: largest less smallest number of rows of a part. Times are medians over steps and
repeats; in each repeat every balancer runs once, so that a busy moment hits all. What takes longer than 0.3 s is not
repeated.
"""

import argparse
import heapq
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from lengths import DATA, Index, demo_rollouts, gsm8k, lognormal_groups, pareto
from numpy.typing import NDArray

from verl_dppo.packing import balance, makespan_lower_bound

LONGEST = 32768
ACCEPTED_SIZES = ((1024, 16), (4096, 64), (8192, 128))
SLOW = 0.3
REFERENCE = "verl, equal"

Array = NDArray[np.float64]
Parts = list[list[int]] | list[Index]
Balancer = Callable[[Array, list[int], int], Parts]
"""From costs, the same as a list of integers, and the number of parts."""


def workload(length: Index) -> Array:
    return 24576.0 * length + length.astype(np.float64) ** 2


def ours(equal_count: bool) -> Balancer:
    return lambda cost, _, parts: balance(cost, parts, equal_count)


def verl(equal_size: bool) -> Balancer:
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    return lambda _, cost, parts: get_seqlen_balanced_partitions(cost, parts, equal_size)


def binpacking(_: Array, cost: list[int], parts: int) -> Parts:
    from binpacking import to_constant_bin_number

    return [list(rows) for rows in to_constant_bin_number(dict(enumerate(cost)), parts)]


def longest_first(equal_count: bool) -> Balancer:
    def run(_: Array, cost: list[int], parts: int) -> Parts:
        room = -(-len(cost) // parts) if equal_count else len(cost)
        dealt: Parts = [[] for _ in range(parts)]
        heap = [(0, part) for part in range(parts)]
        for row in sorted(range(len(cost)), key=cost.__getitem__, reverse=True):
            load, part = heapq.heappop(heap)
            dealt[part].append(row)
            if len(dealt[part]) < room:
                heapq.heappush(heap, (load + cost[row], part))
        return dealt

    return run


def round_robin(cost: Array, _: list[int], parts: int) -> Parts:
    order = np.argsort(-cost, kind="stable")
    return [order[part::parts] for part in range(parts)]


def balancers() -> dict[str, tuple[bool, Balancer]]:
    """Return whether counts are equal, and the balancer, by name."""
    return {
        "ours, equal": (True, ours(True)),
        REFERENCE: (True, verl(True)),
        "longest first, equal": (True, longest_first(True)),
        "round robin": (True, round_robin),
        "ours, free": (False, ours(False)),
        "verl, free": (False, verl(False)),
        "binpacking, free": (False, binpacking),
        "longest first, free": (False, longest_first(False)),
    }


def three_terms(cost: Array, parts: int, equal_count: bool) -> float:
    """Return the larger of the mean, the largest with the m - 1 smallest, and the parts-th with the next."""
    ascending, least = np.sort(cost), cost.size // parts if equal_count else 1
    company = float(ascending[: max(least - 1, 0)].sum())
    two = float(ascending[-parts - 1 :][:2].sum()) if cost.size > parts else 0.0
    return max(float(cost.sum()) / parts, float(ascending[-1]) + company, two)


@dataclass
class Figures:
    """Of one balancer over all steps of a kind."""

    gap: list[float] = field(default_factory=list)
    plain_gap: list[float] = field(default_factory=list)
    spread: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def add(self, cost: Array, dealt: Parts, equal_count: bool) -> None:
        if sorted(row for rows in dealt for row in rows) != list(range(cost.size)):
            raise AssertionError("not a partition")
        makespan = max(float(cost[np.asarray(rows, dtype=np.int64)].sum()) for rows in dealt)
        counts = [len(rows) for rows in dealt]
        self.gap.append(makespan / makespan_lower_bound(cost, len(dealt), equal_count) - 1)
        self.plain_gap.append(makespan / three_terms(cost, len(dealt), equal_count) - 1)
        self.spread.append(max(counts) - min(counts))


def measure(steps: list[Index], parts: int, repeats: int) -> dict[str, Figures]:
    """Balance every step with every balancer."""
    found = {name: Figures() for name in balancers()}
    for length in steps:
        cost = workload(length)
        as_integers = cost.astype(np.int64).tolist()
        for repeat in range(repeats):
            for name, (equal_count, balancer) in balancers().items():
                figures = found[name]
                if figures.failure or (repeat and figures.seconds[-1] > SLOW):
                    continue
                try:
                    start = perf_counter()
                    dealt = balancer(cost, as_integers, parts)
                    figures.seconds.append(perf_counter() - start)
                except (AssertionError, ImportError) as error:
                    figures.failure = f"{type(error).__name__}: {error}"
                    continue
                if repeat == 0:
                    figures.add(cost, dealt, equal_count)
    return found


def kinds(folder: Path, tokenizer: str | None, seeds: int) -> dict[str, tuple[list[Index], int]]:
    """Return the steps and the number of parts of each kind, by name."""
    found = {}
    for n, parts in ((256, 16), *ACCEPTED_SIZES, (1000, 16)):
        steps = [lognormal_groups(n, LONGEST, seed, median=1000) for seed in range(seeds)]
        found[f"log-normal, {n} x {parts}"] = steps, parts
    for alpha in (1.1, 1.5, 2.5):
        for n, parts in ((128, 16), (256, 16), (4096, 64)):
            for cap, cut in ((LONGEST, "cut at 32k"), (2**26, "not cut")):
                steps = [pareto(n, alpha, cap, seed, smallest=200) for seed in range(seeds)]
                found[f"Pareto {alpha} {cut}, {n} x {parts}"] = steps, parts
    texts, counted_by = gsm8k(folder, tokenizer)
    n = min(1024, texts.size // 16 * 16)
    found[f"gsm8k, {n} x 16; {counted_by}"] = (
        [texts[k * n : (k + 1) * n] for k in range(min(seeds, texts.size // n))],
        16,
    )
    for name in ("mixed-length-0", "even-length-0"):
        found[f"demo rollouts {name}, 1024 x 16"] = [demo_rollouts(name)], 16
    mini_batches = [lognormal_groups(1024, LONGEST, seed, median=1000).reshape(4, 256) for seed in range(seeds)]
    found["4 mini-batches of 1024 log-normal rows, 256 x 16 each"] = [row for step in mini_batches for row in step], 16
    return found


def table(name: str, results: dict[str, Figures]) -> str:
    """Return a Markdown table with a row for each balancer."""
    lines = [
        f"| {name} | gap, % | gap to three terms, % | counts | ms | time / verl's, equal |",
        "|---|---|---|---|---|---|",
    ]
    reference = results[REFERENCE].seconds
    for label, found in results.items():
        if found.failure:
            lines.append(f"| {label} | {found.failure} | | | | |")
            continue
        time = float(np.median(found.seconds))
        ratio = f"{time / float(np.median(reference)):.2f}" if reference else ""
        gaps = f"{100 * max(found.gap):.4f} | {100 * max(found.plain_gap):.4f}"
        lines.append(f"| {label} | {gaps} | {max(found.spread)} | {1e3 * time:.2f} | {ratio} |")
    return "\n".join(lines)


def plot(path: Path, results: dict[str, dict[str, Figures]]) -> None:
    """Draw gap against time, a panel for each kind of step at the sizes that verl's equal counts can be had for."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(4.6 * columns, 3.2 * lines), squeeze=False)
    for axis, (name, found) in zip(axes.flat, results.items(), strict=False):
        for k, (label, figures) in enumerate(found.items()):
            if not figures.failure:
                time, gap = 1e3 * float(np.median(figures.seconds)), max(100 * max(figures.gap), 1e-5)
                axis.scatter(time, gap, c=f"C{k}", marker="oDv^oDPv"[k], label=label)
        axis.set(title=name.split(";")[0], xscale="log", yscale="log", xlabel="ms", ylabel="gap to the bound, %")
        axis.title.set_fontsize(9)
    for axis in list(axes.flat)[len(results) :]:
        axis.axis("off")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="upper center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.7 / (3.2 * lines)))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a table for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=DATA / "gsm8k", help="folder of train.jsonl and test.jsonl")
    parser.add_argument("--tokenizer", help="Hugging Face tokenizer for GSM8K")
    parser.add_argument("--only", nargs="*", default=[], help="words of which one is in the name of a kind")
    parser.add_argument("--seeds", type=int, default=3, help="steps of each kind")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, (steps, parts) in kinds(arguments.gsm8k, arguments.tokenizer, arguments.seeds).items():
        if not arguments.only or any(word in name for word in arguments.only):
            results[name] = measure(steps, parts, arguments.repeats)
            print(table(name, results[name]) + "\n", flush=True)
    if arguments.plot:
        plot(arguments.plot, results)


if __name__ == "__main__":
    main()
