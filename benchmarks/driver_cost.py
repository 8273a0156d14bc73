"""What deciding who is kept costs on the driver, per step.

    OMP_NUM_THREADS=1 python benchmarks/driver_cost.py [--prompts 1024] [--group 16] [--keep .6] [--repeats 20]

Random completions of realistic shape: log-normal lengths of 100 to 4,000 tokens, binary rewards with half or all of
the groups informative. Tables in milliseconds (median over the repeats): first scores, pi, draw and weights through
the public functions, then the whole plan of a step, with dealing and the common row count, for 1 and 4 mini-batches.
The order of the draw is that of group, sign of the advantage and length; `chain_order` is timed beside it.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from verl_dppo.pruning import (
    chain_order,
    deal_mini_batches,
    draw,
    neyman_inclusion,
    plan_completions,
    score_magnitude,
)

DESIGNS = ("pivotal", "cube")


@dataclass(frozen=True)
class Completions:
    """(n,) what the driver knows of each completion of a step."""

    group: np.ndarray
    length: np.ndarray
    surprise: np.ndarray
    advantage: np.ndarray
    signature: np.ndarray

    def by_length(self) -> np.ndarray:
        return np.lexsort((self.length, np.sign(self.advantage), self.group))


def completions(prompts: int, size: int, informative: float, rng: np.random.Generator) -> Completions:
    """Return completions of which the given share of groups has both rewards."""
    n = prompts * size
    length = np.clip(np.round(rng.lognormal(6.6, 0.7, n)), 100, 4000)
    right = rng.integers(1, size, prompts)
    right[rng.random(prompts) >= informative] = 0
    reward = rng.permuted(np.arange(size) < right[:, None], axis=1).astype(float)
    deviation = reward.std(axis=1, ddof=1, keepdims=True)
    advantage = (reward - reward.mean(axis=1, keepdims=True)) / np.where(deviation > 0, deviation, np.inf)
    surprise = 0.1 * length * rng.lognormal(0, 0.3, n)
    signature = rng.normal(size=(n, 128))
    return Completions(np.repeat(np.arange(prompts), size), length, surprise, advantage.ravel(), signature)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        function()
        times.append(perf_counter() - start)
    return 1e3 * float(np.median(times[1:]))


def parts(data: Completions, design: str, keep: float, repeats: int) -> dict[str, float]:
    """Return the time of each public function on its own, and of all that a draw needs."""
    rng = np.random.default_rng(1)
    magnitude = score_magnitude(data.advantage, data.length, data.surprise)
    pi, order = neyman_inclusion(magnitude, data.length, keep), data.by_length()

    def balanced() -> np.ndarray | None:
        return np.column_stack([pi * data.length, data.advantage]) if design == "cube" else None

    kept = draw(pi, rng, design, order, balanced())
    times = {
        "scores": milliseconds(lambda: score_magnitude(data.advantage, data.length, data.surprise), repeats),
        "pi": milliseconds(lambda: neyman_inclusion(magnitude, data.length, keep), repeats),
        "order by length": milliseconds(data.by_length, repeats),
        "draw": milliseconds(lambda: draw(pi, rng, design, order, balanced()), repeats),
        "weights": milliseconds(lambda: np.divide(kept, pi, out=np.zeros_like(pi), where=kept), repeats),
    }
    return times | {
        "sum": sum(times.values()),
        "chain_order, in place of the order": milliseconds(
            lambda: chain_order(data.signature, data.advantage, data.group), max(3, repeats // 5)
        ),
    }


def plans(data: Completions, design: str, keep: float, mini_batches: int, repeats: int) -> dict[str, float]:
    """Return the time of a whole plan, from scores to weights, and of its parts."""
    rng = np.random.default_rng(1)

    def magnitude() -> np.ndarray:
        return score_magnitude(data.advantage, data.length, data.surprise)

    def deal() -> np.ndarray:
        return deal_mini_batches(norms > 0, data.group, mini_batches, rng)

    def targets() -> np.ndarray:
        target = np.zeros_like(norms)
        for k in range(mini_batches):
            mine = dealt == k
            target[mine] = neyman_inclusion(norms[mine], data.length[mine], keep)
        return target

    def plan() -> object:
        slope = norms / np.sqrt(data.length)
        return plan_completions(
            slope, target, dealt, order, data.length, data.advantage, mini_batches, 8, keep / 4, design, rng
        )

    norms = magnitude()
    dealt, order = deal(), data.by_length()
    target = targets()
    steps = {"scores": magnitude, "deal": deal, "pi": targets, "order by length": data.by_length, "plan": plan}
    times = {name: milliseconds(step, repeats) for name, step in steps.items()}
    return times | {"sum": sum(times.values())}


def table(title: str, columns: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table with a column for each entry."""
    rows = next(iter(columns.values()))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    lines += [f"| {row} | " + " | ".join(f"{times[row]:.1f}" for times in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--keep", type=float, default=0.6)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    batches = {
        name: completions(args.prompts, args.group, share, np.random.default_rng(0))
        for name, share in (("half", 0.5), ("all", 1.0))
    }
    print(f"{args.prompts} prompts x {args.group} completions, keep {args.keep}; ms, median of {args.repeats}\n")
    cases = [(design, name) for design in DESIGNS for name in batches]
    columns = {f"{d}, {name} informative": parts(batches[name], d, args.keep, args.repeats) for d, name in cases}
    print(table("public functions", columns) + "\n")
    for count in (1, 4):
        columns = {
            f"{d}, {name} informative": plans(batches[name], d, args.keep, count, args.repeats) for d, name in cases
        }
        print(table(f"plan of {count} mini-batch{'es' * (count > 1)}", columns) + "\n")


if __name__ == "__main__":
    main()
