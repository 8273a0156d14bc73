"""What both levels save of a pass over the data set, against Amdahl's law, and what they cost in learning.

    VERL_PLATFORM=cpu python benchmarks/two_levels.py [--seeds 0 1 2 3 4] [--out runs/two-levels] [overrides ...]

For each seed GRPO and DPPO see the same problems for the same number of passes through verl's own entry point. A pass
is what is compared: a `refill` step draws round(batch / keep) prompts, so that it takes fewer steps for one. Runs that
finished are read from `--out` and not repeated, so that a broken measurement goes on where it stopped.

Warm-up is left out: the first step of a process, and the first pass, in which no prompt can be skipped.
"""

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from verl_dppo.pruning import candidates, planned_steps

UPDATE_PHASES = ("old_log_prob", "ref", "update_actor")
BATCH_SIZE = 16
COMPLETIONS = 8
FLOOR = 0.3
PASS_RATE = "val-core/reasoning_gym/chain_sum/acc/mean@"
ROLLOUT_SHARE = 0.65
RESAMPLES = 10_000
# Student's t at .975 for 1, 2, ... degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Metrics = Mapping[str, Any]
Average = Callable[[Iterable[float]], float]


@dataclass(frozen=True)
class Arm:
    """One kind of run.

    Attributes:
        algorithm: a key of the demo's ALGORITHMS.
        schedule: of prompts; None where none are skipped.
        scaled_rate: whether the learning rate is multiplied by the root of the prompts drawn over the batch size.
    """

    algorithm: str
    schedule: str | None
    scaled_rate: bool = False

    def drawn(self, keep: float) -> int:
        """Return the prompts that a step after the first pass draws."""
        return candidates(BATCH_SIZE, keep, 1.0, 1, FLOOR) if self.schedule == "refill" else BATCH_SIZE

    def steps(self, rows: int, passes: int, keep: float) -> int:
        """Return the steps that draw every prompt `passes` times."""
        return planned_steps(0, 0, passes * rows, rows, BATCH_SIZE, BATCH_SIZE, self.drawn(keep), 0.0)

    def overrides(self, prompt_keep: float, completion_keep: float, rate: float) -> list[str]:
        """Return the Hydra overrides on top of those of the algorithm."""
        if self.schedule is None:
            return []
        chosen = [
            f"algorithm.dppo.prompt.keep={prompt_keep}", f"algorithm.dppo.prompt.schedule={self.schedule}",
            f"algorithm.dppo.prompt.floor={FLOOR}", f"algorithm.dppo.completion.keep={completion_keep}",
        ]  # fmt: skip
        if self.scaled_rate:
            scaled = rate * (self.drawn(prompt_keep) / BATCH_SIZE) ** 0.5
            chosen.append(f"actor_rollout_ref.actor.optim.lr={scaled:.3g}")
        return chosen


ARMS = {
    "GRPO": Arm("GRPO", None),
    "refill": Arm("DPPO", "refill"),
    "refill-scaled-rate": Arm("DPPO", "refill", scaled_rate=True),
    "shrink": Arm("DPPO", "shrink"),
}
RATE = 2e-4


@dataclass(frozen=True)
class Cost:
    """What one full-batch-equivalent pass over the data set takes after warm-up.

    Attributes:
        steps: of a pass.
        rollout, update, rest: seconds of a pass.
        generated: response tokens sampled in a pass.
        trained: prompt and response tokens that log-probs and update process in a pass.
    """

    steps: float
    rollout: float
    update: float
    rest: float
    generated: float
    trained: float

    @property
    def seconds(self) -> float:
        """Of a whole pass."""
        return self.rollout + self.update + self.rest

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of rollout, update and rest in a pass."""
        return self.rollout / self.seconds, self.update / self.seconds, self.rest / self.seconds


@dataclass(frozen=True)
class Run:
    """What one finished run left behind.

    Attributes:
        steps: verl's metrics of each optimiser step.
        before: validation scores by problem before training, empty where that was not measured.
        after: the same at the end, each a list of one score for each answer.
        load: of the machine in the minute before the run.
    """

    steps: tuple[Metrics, ...]
    before: dict[str, list[float]]
    after: dict[str, list[float]]
    load: float


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def drawn_prompts(step: Metrics) -> int:
    """Return the prompts that a step drew, whether it sampled them or not."""
    return int(step.get("dppo/prompts/drawn", BATCH_SIZE))


def timed_steps(steps: Sequence[Metrics], rows: int) -> list[Metrics]:
    """Return the steps that belong entirely to later passes than the first."""
    found, before = [], 0
    for step in steps:
        if before >= rows:
            found.append(step)
        before += drawn_prompts(step)
    return found


def generated_tokens(step: Metrics) -> float:
    """Return the response tokens that a step sampled: verl divides the seconds of the rollout by their number."""
    return 1000 * step["timing_s/gen"] / step["timing_per_token_ms/gen"]


def trained_tokens(step: Metrics) -> float:
    """Return the prompt and response tokens that log-probs and update processed, padding left out."""
    return step["perf/total_num_tokens"] * step.get("dppo/trained_sequence_token_fraction", 1.0)


def phases(step: Metrics) -> tuple[float, float, float]:
    """Return the seconds of rollout, of log-probs and update, and of all else. A probe counts as update."""
    update = sum(step.get(f"timing_s/{phase}", 0.0) for phase in UPDATE_PHASES)
    return step["timing_s/gen"], update, step["timing_s/step"] - step["timing_s/gen"] - update


def cost(steps: Sequence[Metrics], rows: int, average: Average = fmean) -> Cost:
    """Return what a pass over `rows` prompts takes, from steps that are all after warm-up.

    Args:
        steps: not empty.
        rows: of the data set.
        average: of a quantity over steps: the mean, or the median where single steps may have been disturbed.
    """
    per_pass = rows / fmean(drawn_prompts(step) for step in steps)
    rollout, update, rest = (per_pass * average(seconds) for seconds in zip(*map(phases, steps), strict=True))
    generated, trained = (per_pass * average(map(count, steps)) for count in (generated_tokens, trained_tokens))
    return Cost(per_pass, rollout, update, rest, generated, trained)


def prediction(full: Cost, pruned: Cost, rollout_share: float | None = None) -> float:
    """Return Amdahl's time of a pruned pass over that of a full one.

    Rollout shrinks with the response tokens that are sampled, log-probs and update with the tokens that they process,
    and the rest with the steps of a pass.

    Args:
        full: whose shares count.
        pruned: whose tokens and steps count.
        rollout_share: in place of the measured one, at the expense of log-probs and update.
    """
    rollout, update, rest = full.shares
    if rollout_share is not None:
        rollout, update = rollout_share, 1 - rollout_share - rest
    return (
        rollout * pruned.generated / full.generated
        + update * pruned.trained / full.trained
        + rest * pruned.steps / full.steps
    )


def noise_equivalent(full: Cost, pruned: Cost, rho: float) -> float:
    """Return the time ratio where the noise that pruning adds is averaged away by more prompts."""
    return ((pruned.rollout + pruned.update) * (1 + rho) + pruned.rest) / full.seconds


def sum_of(costs: Sequence[Cost]) -> Cost:
    """Return the mean over runs."""
    return Cost(*(fmean(getattr(c, name) for c in costs) for name in Cost.__dataclass_fields__))


def pass_rate(scores: Mapping[str, Sequence[float]]) -> float:
    """Return the mean over problems of the mean over answers."""
    return fmean(map(fmean, scores.values()))


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval for the mean of 2 to 10 values."""
    half = T_975[len(values) - 2] * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentile of the mean of resampled values."""
    array = np.array(values)
    means = array[np.random.default_rng(seed).integers(array.size, size=(RESAMPLES, array.size))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def differences_by_problem(ours: Sequence[Run], theirs: Sequence[Run]) -> list[float]:
    """Return for each problem the pass rate after training by `ours` less that by `theirs`, the mean over seeds."""
    return [
        fmean(fmean(one.after[problem]) - fmean(other.after[problem]) for one, other in zip(ours, theirs, strict=True))
        for problem in sorted(ours[0].after)
    ]


# ---- runs -----------------------------------------------------------------------------------------------------------


def read_scores(file: Path) -> dict[str, list[float]]:
    """Return the scores of a validation by problem, from verl's dump of it."""
    scores: dict[str, list[float]] = defaultdict(list)
    if file.exists():
        for line in file.read_text().splitlines():
            answer = json.loads(line)
            scores[answer["input"]].append(answer["score"])
    return dict(scores)


def run_once(name: str, seed: int, files: dict[str, Path], arguments: argparse.Namespace, folder: Path) -> Run:
    """Return a finished run, after training it unless it is there already.

    Raises:
        SystemExit: a run in this folder was made with other settings.
    """
    from verl_dppo.cpu.demo.comparison import train

    arm, result = ARMS[name], folder / "finished.json"
    steps = arm.steps(arguments.rows, arguments.passes, arguments.prompt_keep)
    overrides = [
        *arm.overrides(arguments.prompt_keep, arguments.completion_keep, RATE), *arguments.overrides,
        f"actor_rollout_ref.rollout.val_kwargs.n={arguments.validation_answers}",
        # The completions of a step, as many as the demo decodes at once in any case; validation is slower with more.
        f"actor_rollout_ref.rollout.max_num_seqs={BATCH_SIZE * COMPLETIONS}",
        # All arms of a seed start from the same policy: its pass rate is measured once.
        f"trainer.val_before_train={str(name == 'GRPO').lower()}",
    ]  # fmt: skip
    settings = {"overrides": overrides, "steps": steps, "rows": arguments.rows, "problems": arguments.validation_rows}
    if not result.exists():
        load = os.getloadavg()[0]
        dump = f"trainer.validation_data_dir={folder / 'validation'}"
        train(arm.algorithm, seed, files, [*overrides, dump], steps, folder, lambda line: print(line, flush=True))
        result.write_text(json.dumps(settings | {"load": load}))
    finished = json.loads(result.read_text())
    if any(finished[key] != value for key, value in settings.items()):
        raise SystemExit(f"{folder} holds a run with other settings; give another --out, or remove it")
    entries = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run(
        tuple(entry for entry in entries if "timing_s/step" in entry),
        read_scores(folder / "validation" / "0.jsonl"),
        read_scores(folder / "validation" / f"{steps}.jsonl"),
        finished["load"],
    )


# ---- tables ---------------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def time_rows(
    name: str, seeds: Sequence[int], runs: Mapping[str, Sequence[Run]], rows: int, average
) -> list[list[str]]:
    """Return one line for each seed and one for their mean: seconds, fractions, Amdahl's prediction, what is off it."""
    found, pairs = [], []
    for full, pruned in zip(runs["GRPO"], runs[name], strict=True):
        pairs.append([cost(timed_steps(run.steps, rows), rows, average) for run in (full, pruned)])
    labels = [f"{name}, seed {seed}" for seed in seeds]
    if len(pairs) > 1:
        pairs.append([sum_of(costs) for costs in zip(*pairs, strict=True)])
        labels.append(f"{name}, all")
    for label, (full, pruned) in zip(labels, pairs, strict=True):
        measured, predicted = pruned.seconds / full.seconds, prediction(full, pruned)
        found.append([
            label, f"{full.seconds:.1f}", "/".join(f"{share:.3f}" for share in full.shares), f"{pruned.seconds:.1f}",
            f"{pruned.generated / full.generated:.3f}", f"{pruned.trained / full.trained:.3f}",
            f"{pruned.steps / full.steps:.3f}", f"{measured:.3f}", f"{predicted:.3f}",
            f"{measured / predicted - 1:+.1%}",
        ])  # fmt: skip
    return found


def in_words(name: str, runs: Mapping[str, Sequence[Run]], rows: int) -> list[str]:
    """Return plain and noise-equivalent time, and Amdahl's for another rollout share."""
    full, pruned = (sum_of([cost(timed_steps(run.steps, rows), rows) for run in runs[arm]]) for arm in ("GRPO", name))
    timed = [step for run in runs[name] for step in timed_steps(run.steps, rows)]
    rho, rho_prompts = (fmean(s[f"dppo/{key}variance_inflation"] for s in timed) for key in ("", "prompts/"))
    predicted, ratio = prediction(full, pruned), pruned.seconds / full.seconds
    by_phase = (f"{getattr(pruned, phase) / getattr(full, phase):.3f}" for phase in ("rollout", "update", "rest"))
    elsewhere = prediction(full, pruned, ROLLOUT_SHARE)
    return [
        f"{name}: a pass takes {ratio:.3f} of GRPO's, {ratio / predicted - 1:+.1%} off Amdahl's {predicted:.3f};"
        f" rollout, log-probs and update, and the rest alone {', '.join(by_phase)} of theirs.",
        f"Noise-equivalent: pruning adds an estimated {rho:.1%} to the gradient noise of the rollouts (the prompt level"
        f" alone {rho_prompts:.1%}); averaged away by more prompts a pass takes"
        f" {noise_equivalent(full, pruned, rho):.3f} of GRPO's.",
        f"Computed, not measured: at a rollout share of {ROLLOUT_SHARE} these fractions give {elsewhere:.3f}.",
    ]


def learning(name: str, seeds: Sequence[int], runs: Mapping[str, Sequence[Run]]) -> str:
    """Return the pass rates by seed, and the intervals of their difference."""
    full, pruned = runs["GRPO"], runs[name]
    rates = [(pass_rate(a.before), pass_rate(a.after), pass_rate(b.after)) for a, b in zip(full, pruned, strict=True)]
    lines = [
        [str(seed), *(f"{rate:.3f}" for rate in three), f"{three[2] - three[1]:+.3f}"]
        for seed, three in zip(seeds, rates, strict=True)
    ]
    table = markdown(["seed", "before", "GRPO after", f"{name} after", "difference"], lines)
    gaps, by_problem = [three[2] - three[1] for three in rates], differences_by_problem(pruned, full)
    low, high = bootstrap_interval(by_problem)
    text = f"\n\n{name} less GRPO: {fmean(gaps):+.3f}; 95 % interval over {len(by_problem)} problems (bootstrap)"
    text += f" {low:+.3f} to {high:+.3f}"
    if len(gaps) > 1:
        low, high = t_interval(gaps)
        text += f", over {len(gaps)} seeds (Student's t) {low:+.3f} to {high:+.3f}"
    return table + text + "."


HEAD = (
    "run", "GRPO: seconds of a pass", "rollout/update/rest", "DPPO: seconds of a pass", "tokens sampled",
    "tokens trained on", "steps", "time, measured", "Amdahl", "off by",
)  # fmt: skip


def report(seeds: Sequence[int], runs: Mapping[str, Sequence[Run]], rows: int) -> str:
    """Return all tables."""
    parts = []
    for name in runs:
        if name == "GRPO":
            continue
        counts = [len(timed_steps(runs[arm][0].steps, rows)) for arm in ("GRPO", name)]
        parts.append(f"Means over {counts[0]} (GRPO) and {counts[1]} ({name}) steps after the first pass.")
        parts.append(markdown(HEAD, time_rows(name, seeds, runs, rows, fmean)))
        parts.append("The same from medians over steps.")
        parts.append(markdown(HEAD, time_rows(name, seeds, runs, rows, median)))
        parts += in_words(name, runs, rows)
        parts.append(learning(name, seeds, runs))
    loads = [f"{run.load:.1f}" for arm in runs.values() for run in arm]
    parts.append(f"Load of the machine before each run: {', '.join(loads)}.")
    return "\n\n".join(parts)


def main() -> None:
    """Run what is missing, print and save the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/two-levels"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--arms", nargs="+", choices=[n for n in ARMS if n != "GRPO"], default=["refill"])
    parser.add_argument("--rows", type=int, default=96, help="training problems, a multiple of 16")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--validation-rows", type=int, default=256)
    parser.add_argument("--validation-answers", type=int, default=4, help="to each validation problem")
    parser.add_argument("--prompt-keep", type=float, default=0.7)
    parser.add_argument("--completion-keep", type=float, default=0.5)
    parser.add_argument("--override", dest="overrides", action="append", default=[], help="Hydra override of all runs")
    arguments = parser.parse_args()
    if arguments.rows % BATCH_SIZE or arguments.passes < 2:
        raise SystemExit(f"--rows must be a multiple of {BATCH_SIZE}, so that GRPO loses none, and --passes at least 2")
    os.environ["VERL_PLATFORM"] = "cpu"
    from verl_dppo.cpu.demo.task import write_parquet

    out = arguments.out.resolve()
    files = {str(k): v for k, v in write_parquet(out / "data", arguments.rows, arguments.validation_rows).items()}
    runs: dict[str, list[Run]] = {name: [] for name in ("GRPO", *arguments.arms)}
    for seed in arguments.seeds:
        for name, finished in runs.items():
            finished.append(run_once(name, seed, files, arguments, out / f"seed{seed}" / name))
    text = report(arguments.seeds, runs, arguments.rows)
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
