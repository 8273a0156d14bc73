"""Train GRPO and DPPO on the demo task through verl's own entry point, and set what they did side by side."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from verl_dppo.cpu.demo import MODEL_FOLDER

Report = Callable[[str], None]

PHASES = ("gen", "dppo_prune", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
UPDATE_PHASES = ("old_log_prob", "ref", "update_actor")
PASS_RATE = "val-core/reasoning_gym/chain_sum/acc/"
# A number for keep, so that the comparison repeats: the budget of keep=auto follows measured times.
ALGORITHMS = {
    "GRPO": ("algorithm.adv_estimator=grpo",),
    "DPPO": ("algorithm=dppo", "algorithm.dppo.completion.keep=0.6"),
}


@dataclass(frozen=True)
class Training:
    """What one finished run logged: verl's metrics of each step, the first entry from before training."""

    name: str
    seed: int
    before: dict[str, Any]
    steps: tuple[dict[str, Any], ...]

    @property
    def timed_steps(self) -> tuple[dict[str, Any], ...]:
        """The steps after the first, which pays for warming up."""
        return self.steps[1:] or self.steps

    def seconds(self, phase: str) -> float:
        """Mean seconds of a phase in a step."""
        return fmean(step.get(f"timing_s/{phase}", 0.0) for step in self.timed_steps)

    @property
    def update_seconds(self) -> float:
        """Mean seconds of old log-probs and actor update in a step."""
        return sum(self.seconds(phase) for phase in UPDATE_PHASES)

    def pass_rates(self) -> tuple[float, float]:
        """Validation pass rate before the first and after the last step."""
        return _pass_rate(self.before), _pass_rate(self.steps[-1])

    def trained_tokens(self) -> float:
        """Mean prompt and response tokens that a step trained on."""
        share = [s.get("dppo/trained_sequence_token_fraction", 1.0) for s in self.timed_steps]
        full = [s["perf/total_num_tokens"] for s in self.timed_steps]
        return fmean(a * b for a, b in zip(share, full, strict=True))

    def mean(self, metric: str) -> float | None:
        """Mean of a metric over the timed steps, or None where the run does not log it."""
        values = [s[metric] for s in self.timed_steps if metric in s]
        return fmean(values) if values else None


def _pass_rate(metrics: dict[str, Any]) -> float:
    names = [name for name in metrics if name.startswith(PASS_RATE + "mean@")]
    if len(names) != 1:
        raise RuntimeError(f"expected one validation metric {PASS_RATE}mean@n, found {names}")
    return float(metrics[names[0]])


def command(files: dict[str, Path], overrides: Sequence[str]) -> list[str]:
    """Return the command of one run: verl's entry point, the recipe, and where the files are."""
    return [
        sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=chain_sum",
        f"data.train_files={files['train']}", f"data.val_files={files['validation']}",
        f"actor_rollout_ref.model.path={MODEL_FOLDER}", *overrides,
    ]  # fmt: skip


def train(
    name: str, seed: int, files: dict[str, Path], overrides: Sequence[str], steps: int, folder: Path, report: Report
) -> Training:
    """Run one training, reporting each step as it ends.

    Args:
        name: a key of ALGORITHMS.
        seed: of sampling, of the order of problems and of the draws.
        files: parquet files by split.
        overrides: Hydra overrides added to those of the algorithm.
        steps: optimiser batches.
        folder: receives `metrics.jsonl` and `output.log`.
        report: called with each line of progress.

    Raises:
        RuntimeError: verl ended with an error; the message holds the end of its output and where the rest is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics, log = folder / "metrics.jsonl", folder / "output.log"
    metrics.unlink(missing_ok=True)
    seeds = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
    if name == "DPPO":
        seeds.append(f"algorithm.dppo.seed={seed}")
    chosen = [
        *ALGORITHMS[name], *seeds, f"trainer.total_training_steps={steps}", f"trainer.experiment_name={name}-{seed}",
        f"trainer.default_local_dir={folder / 'checkpoints'}", "trainer.resume_mode=disable",
        f"hydra.run.dir={folder}", *overrides,
    ]  # fmt: skip
    line = command(files, chosen)
    report(f"{name}: VERL_PLATFORM=cpu " + " ".join(["python", *line[1:]]))
    report(f"{name}: output in {log}; starting Ray and the workers takes half a minute")
    environment = {
        **os.environ, "VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(metrics), "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _follow(process, metrics, name, steps, report)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-25:])
        raise RuntimeError(f"{name} ended with status {process.returncode}; the end of {log}:\n{tail}")
    before, *later = _read(metrics)
    return Training(name, seed, before["data"], tuple(entry["data"] for entry in later))


def _read(metrics: Path) -> list[dict[str, Any]]:
    """Return the complete lines of verl's metrics file."""
    if not metrics.exists():
        return []
    text = metrics.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _follow(process: subprocess.Popen, metrics: Path, name: str, steps: int, report: Report) -> None:
    """Report each step until the process ends."""
    seen, began = 0, time.monotonic()
    while True:
        ended = process.poll() is not None
        entries = _read(metrics)
        for entry in entries[seen:]:
            report(f"{name} {time.monotonic() - began:5.0f} s  {describe(entry, steps)}")
        seen = len(entries)
        if ended:
            return
        time.sleep(0.5)


def describe(entry: dict[str, Any], steps: int) -> str:
    """Return one line about one logged step."""
    data = entry["data"]
    if "timing_s/step" not in data:
        return f"before training: validation pass rate {_pass_rate(data):.3f}"
    update = sum(data.get(f"timing_s/{phase}", 0.0) for phase in UPDATE_PHASES)
    text = (
        f"step {entry['step']}/{steps}: training pass rate {data['critic/score/mean']:.3f}, "
        f"{data['timing_s/step']:.1f} s (rollout {data['timing_s/gen']:.1f}, log-probs and update {update:.1f})"
    )
    kept = data.get("dppo/kept_token_fraction")
    if kept is not None:
        text += f", kept {kept:.0%} of the response tokens"
    if any(key.startswith(PASS_RATE) for key in data):
        text += f"; validation pass rate {_pass_rate(data):.3f}"
    return text


def table(grpo: Sequence[Training], dppo: Sequence[Training]) -> str:
    """Return the comparison as a Markdown table; over several seeds, means with standard deviations."""
    rows: list[tuple[str, list[float], list[float], bool]] = []

    def add(label: str, value: Callable[[Training], float], ratio: bool) -> None:
        rows.append((label, [value(run) for run in grpo], [value(run) for run in dppo], ratio))

    logged = {name for run in (*grpo, *dppo) for step in run.steps for name in step}
    for phase in PHASES:
        if f"timing_s/{phase}" not in logged:
            continue
        add(f"seconds per step: {phase}", lambda run, phase=phase: run.seconds(phase), phase != "dppo_prune")  # type: ignore[misc]
    add("seconds per step: log-probs + update", lambda run: run.update_seconds, True)
    add("seconds per step: all", lambda run: run.seconds("step"), True)
    add("tokens trained on per step", Training.trained_tokens, True)
    add("validation pass rate before", lambda run: run.pass_rates()[0], False)
    add("validation pass rate after", lambda run: run.pass_rates()[1], False)
    seeds = f"{len(grpo)} seed{'s' if len(grpo) > 1 else ''}, {len(grpo[0].steps)} steps each"
    lines = [f"| {seeds} | GRPO | DPPO | DPPO / GRPO |", "|---|---|---|---|"]
    for label, ours, theirs, with_ratio in rows:
        ratio = f"{fmean(theirs) / fmean(ours):.2f}" if with_ratio and fmean(ours) > 0 else ""
        lines.append(f"| {label} | {_spread(ours)} | {_spread(theirs)} | {ratio} |")
    return "\n".join([*lines, "", *_in_words(grpo, dppo)])


def _spread(values: Sequence[float]) -> str:
    digits = 0 if fmean(values) >= 100 else 3
    text = f"{fmean(values):,.{digits}f}"
    return f"{text} ± {stdev(values):,.{digits}f}" if len(values) > 1 else text


def _in_words(grpo: Sequence[Training], dppo: Sequence[Training]) -> list[str]:
    """Return the two speeds: plain time, and with the noise that pruning adds paid for."""
    step_grpo, step_dppo = (fmean(run.seconds("step") for run in runs) for runs in (grpo, dppo))
    noise = fmean(run.mean("dppo/variance_inflation") or 0.0 for run in dppo)
    noisy = fmean(sum(run.seconds(phase) for phase in ("gen", *UPDATE_PHASES)) for run in dppo)
    equivalent = step_grpo / (step_dppo + noise * noisy)
    kept = fmean(run.mean("dppo/kept_token_fraction") or 1.0 for run in dppo)
    return [
        f"Plain time: a step of DPPO takes {step_dppo / step_grpo:.2f} of GRPO's ({step_grpo / step_dppo:.2f} times as"
        f" fast), training on {kept:.0%} of the response tokens.",
        f"Noise-equivalent: pruning adds an estimated {noise:.0%} to the gradient noise of the rollouts; with more"
        f" prompts to average that away it is {equivalent:.2f} times as fast.",
    ]
