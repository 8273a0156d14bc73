"""What balancing and packing save of a real update on two data-parallel ranks, without any pruning.

    python benchmarks/two_ranks.py [--repeats 3] [--steps 3] [--out runs/two-ranks] [overrides ...]

Stock GRPO and `algorithm=dppo algorithm.dppo.completion.enable=false algorithm.dppo.prompt.enable=false` train in turn,
through verl's own entry point, on the same rollouts: random tokens of long-tailed lengths, read from a file. The model
has 12 million random weights, so that a step is spent on matrix products and not on what surrounds them. Sequences are
packed (`use_remove_padding`), so that a micro-batch costs its tokens. Each rank has one thread.

Imbalance is makespan over mean. The predicted one is that of `SequenceCost`, from the rows that the workers of either
run say they ran; the measured one that of their processor seconds, which leave out what a rank waits for. The first
step of a process warms up and is left out.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

os.environ["VERL_PLATFORM"] = "cpu"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from verl_dppo.cpu.agent_loop import prompt_id
from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.comparison import train
from verl_dppo.packing import SequenceCost, makespan_lower_bound

PROMPTS, COMPLETIONS, PROMPTS_OF_MINI_BATCH = 24, 4, 3
MINI_BATCHES = PROMPTS // PROMPTS_OF_MINI_BATCH
RANKS = 2
# Response tokens: log-normal, completions of a prompt alike, cut off at the cap.
MEDIAN, DEVIATION, SHARED, CAP = 60, 1.5, 0.6, 900
MICRO_BATCH_TOKENS = 960
FIRST_TOKEN, VOCABULARY, EOS = 3, 260, 2
MODEL = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "initializer_range": 0.02,
}  # fmt: skip
HOOKS = Path(__file__).resolve().parents[1] / "tests" / "end_to_end"
ARMS = {
    "stock": ("GRPO", []),
    "balanced": ("DPPO", ["algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false"]),
}

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """What one finished run says of its timed steps.

    Attributes:
        mini_batch: predicted imbalance of mini-batches.
        bound: a lower bound of it, for these mini-batches at equal counts.
        micro_step: predicted imbalance where ranks wait for each other at every micro-batch.
        makespan: predicted cost of the slowest rank, summed over micro-steps, of a step.
        busy: measured imbalance of mini-batches.
        slowest: processor seconds of the slowest rank, summed over mini-batches, of a step.
        processor: processor seconds of all ranks in updates, of a step.
        waited: mean share of its update in which a rank did not work.
        reported: `dppo/balance/measured` and `dppo/balance/waited`, where the run has them.
        micro_batches: of a rank, of a step.
        old_log_prob, update, step: seconds.
        fit: see `fit`.
        grad_norm: of each timed step.
    """

    mini_batch: float
    bound: float
    micro_step: float
    makespan: float
    busy: float
    slowest: float
    processor: float
    waited: float
    reported: tuple[float, float] | None
    micro_batches: float
    old_log_prob: float
    update: float
    step: float
    fit: tuple[float, float]
    grad_norm: tuple[float, ...]


# ---- inputs ---------------------------------------------------------------------------------------------------------


def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Reward half of all texts, by a hash: verl's `custom_reward_function` of these runs."""
    return float(crc32(solution_str.encode()) & 1)


def response_lengths(steps: int, seed: int) -> NDArray[np.int64]:
    """Return (steps, prompts, completions) tokens."""
    rng = np.random.default_rng(seed)
    of_prompt, own = rng.normal(size=(steps, PROMPTS, 1)), rng.normal(size=(steps, PROMPTS, COMPLETIONS))
    log_length = np.log(MEDIAN) + DEVIATION * (np.sqrt(SHARED) * of_prompt + np.sqrt(1 - SHARED) * own)
    return np.clip(np.exp(log_length), 2, CAP).astype(np.int64)


def write_inputs(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """Write the model, the prompts and the rollouts of all steps."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in ("train.parquet", "rollouts.jsonl", "model")}
    rng, lengths = np.random.default_rng(seed), response_lengths(steps, seed)
    rows, lines = [], []
    for index, of_prompt in enumerate(lengths.reshape(-1, COMPLETIONS)):
        messages = [{"role": "user", "content": f"{index} ="}]
        rows.append({
            "data_source": "lengths", "prompt": messages, "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        })  # fmt: skip
        for sample, length in enumerate(of_prompt):
            tokens = [*rng.integers(FIRST_TOKEN, VOCABULARY, length - 1).tolist(), EOS]
            version = index // PROMPTS
            lines.append({
                "key": (version + 1, prompt_id(messages, "lengths", index), sample), "token_ids": tokens,
                "log_probs": [-np.log(VOCABULARY)] * int(length),
                "extra_fields": {"min_global_steps": version, "max_global_steps": version},
            })  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), files["train.parquet"])
    files["rollouts.jsonl"].write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_model(files["model"], seed)
    return {"train": files["train.parquet"], "validation": files["train.parquet"], **files}


def save_model(folder: Path, seed: int) -> None:
    """Write an untrained Qwen2 with the demo's tokenizer."""
    import torch
    from transformers import AutoTokenizer

    from verl_dppo.cpu.demo.architecture import build_model

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    model = build_model(tokenizer, **MODEL)
    model.config.max_position_embeddings = 2 * CAP
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---- runs -----------------------------------------------------------------------------------------------------------


def run_once(arm: str, files: dict[str, Path], folder: Path, steps: int, overrides: Sequence[str]) -> Run:
    """Train on the rollouts and read what workers and trainer logged."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = folder / "batches.jsonl"
    batches.unlink(missing_ok=True)
    os.environ |= {
        "VERL_USE_EXTERNAL_MODULES": "verl_hooks", "PYTHONPATH": str(HOOKS),
        "TEST_REPLAY": str(files["rollouts.jsonl"]), "TEST_BATCHES": str(batches),
    }  # fmt: skip
    algorithm, of_arm = ARMS[arm]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    load = [
        *of_arm, f"trainer.n_gpus_per_node={RANKS}", "trainer.val_before_train=false", "trainer.test_freq=-1",
        f"data.train_batch_size={PROMPTS}", f"{rollout}.n={COMPLETIONS}", "data.shuffle=false",
        f"{actor}.ppo_mini_batch_size={PROMPTS_OF_MINI_BATCH}", f"data.max_response_length={CAP}",
        f"{actor}.ppo_max_token_len_per_gpu={MICRO_BATCH_TOKENS}", f"{rollout}.calculate_log_probs=true",
        f"{rollout}.log_prob_max_token_len_per_gpu={MICRO_BATCH_TOKENS}",
        "actor_rollout_ref.model.use_remove_padding=true", f"actor_rollout_ref.model.path={files['model']}",
        f"reward.custom_reward_function.path={Path(__file__).resolve()}", "reward.custom_reward_function.name=reward",
        *overrides,
    ]  # fmt: skip
    train(algorithm, 0, files, load, steps, folder, lambda line: print(line, flush=True))
    logged = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in map(json.loads, batches.read_text().splitlines()) if line["pass"] == "update"]
    return summary([entry for entry in logged if "timing_s/step" in entry], updates, cost_of(files["model"]))


def cost_of(model: Path) -> SequenceCost:
    """Return what a sequence costs the model."""
    return SequenceCost.from_config(json.loads((model / "config.json").read_text()))


# ---- figures --------------------------------------------------------------------------------------------------------


def loads(updates: Sequence[dict], steps: int, price: Callable[[Sequence[int]], float]) -> Array:
    """Return (ranks, mini-batches of all timed steps, micro-batches) what each micro-batch costs, 0 where none is."""
    of_ranks = [[line for line in updates if line["rank"] == rank] for rank in range(RANKS)]
    counted = {len(lines) for lines in of_ranks}
    if counted != {steps * MINI_BATCHES}:
        raise RuntimeError(f"ranks ran {counted} mini-batches, where {steps * MINI_BATCHES} were expected")
    most = max(len(line["micro_batches"]) for line in updates)
    found = np.zeros((RANKS, steps * MINI_BATCHES, most))
    for rank, lines in enumerate(of_ranks):
        for k, line in enumerate(lines):
            for micro, rows in enumerate(line["micro_batches"]):
                found[rank, k, micro] = price([length for _, length in rows])
    return found[:, MINI_BATCHES:]


def seconds(updates: Sequence[dict], name: str) -> Array:
    """Return (ranks, mini-batches of all timed steps) seconds."""
    of_ranks = [[line[name] for line in updates if line["rank"] == rank] for rank in range(RANKS)]
    return np.array(of_ranks)[:, MINI_BATCHES:]


def imbalance(load: Array) -> float:
    """Return makespan over mean; ranks are the first axis, and wait for each other at each entry of the others."""
    return float(load.max(axis=0).sum() / load.mean(axis=0).sum())


def bound(updates: Sequence[dict], cost: SequenceCost) -> float:
    """Return an imbalance of mini-batches that no order of their rows over the ranks is below."""
    of_ranks = [[line for line in updates if line["rank"] == rank][MINI_BATCHES:] for rank in range(RANKS)]
    rows = [cost([length for line in lines for one in line["micro_batches"] for _, length in one])
            for lines in zip(*of_ranks, strict=True)]  # fmt: skip
    least = sum(makespan_lower_bound(costs, RANKS) for costs in rows)
    return float(least / sum(costs.sum() / RANKS for costs in rows))


def fit(busy: Array, cost: Array) -> tuple[float, float]:
    """Return how well processor seconds follow the cost: R^2 of a line, and the share of the seconds it calls fixed."""
    slope, fixed = np.polyfit(cost.ravel(), busy.ravel(), 1)
    residual = busy.ravel() - slope * cost.ravel() - fixed
    return float(1 - residual.var() / busy.var()), float(fixed / busy.mean())


def summary(logged: Sequence[dict], updates: Sequence[dict], cost: SequenceCost) -> Run:
    """Return the figures of a run, from verl's metrics of each step and the workers' lines."""
    steps, timed = len(logged), logged[1:]
    predicted = loads(updates, steps, lambda lengths: float(cost(lengths).sum()))
    micro_batches = loads(updates, steps, lambda lengths: 1.0)
    busy, wall = seconds(updates, "busy"), seconds(updates, "wall")

    def mean(name: str) -> float:
        return fmean(step[name] for step in timed)

    names = ("dppo/balance/measured", "dppo/balance/waited")
    return Run(
        mini_batch=imbalance(predicted.sum(axis=2)),
        bound=bound(updates, cost),
        micro_step=imbalance(predicted),
        makespan=float(predicted.max(axis=0).sum()) / len(timed),
        busy=imbalance(busy),
        slowest=float(busy.max(axis=0).sum()) / len(timed),
        processor=float(busy.sum()) / len(timed),
        waited=float(1 - busy.sum() / wall.sum()),
        reported=(mean(names[0]), mean(names[1])) if names[0] in timed[0] else None,
        micro_batches=float(micro_batches[0].sum()) / len(timed),
        old_log_prob=mean("timing_s/old_log_prob"),
        update=mean("timing_s/update_actor"),
        step=mean("timing_s/step"),
        fit=fit(busy, predicted.sum(axis=2)),
        grad_norm=tuple(step["actor/grad_norm"] for step in timed),
    )


def table(stock: Sequence[Run], balanced: Sequence[Run]) -> str:
    """Return the comparison as Markdown: means over repeats, and the ratio of each pair of runs."""

    def line(label: str, value: Callable[[Run], float], form: str, kind: str = "") -> list[str]:
        a, b = [value(run) for run in stock], [value(run) for run in balanced]
        last = ""
        if kind == "excess":
            last = f"excess {1 - (fmean(b) - 1) / (fmean(a) - 1):+.1%}".replace("+", "-", 1)
        elif kind == "ratio":
            ratios = [theirs / ours for ours, theirs in zip(a, b, strict=True)]
            last = f"{fmean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        return [label, f"{fmean(a):{form}}", f"{fmean(b):{form}}", last]

    rows = [
        line("predicted imbalance of mini-batches", lambda run: run.mini_batch, ".3f", "excess"),
        line("... lower bound for these mini-batches", lambda run: run.bound, ".3f"),
        line("predicted imbalance of micro-steps", lambda run: run.micro_step, ".3f", "excess"),
        line("measured imbalance of mini-batches, processor seconds", lambda run: run.busy, ".3f", "excess"),
        line("share of the update that a rank waited", lambda run: run.waited, ".3f"),
        line("micro-batches of a rank, per step", lambda run: run.micro_batches, ".1f", "ratio"),
        line("predicted update: makespan over micro-steps, GFLOP", lambda run: run.makespan / 1e9, ".0f", "ratio"),
        line("processor seconds of the slowest rank of each mini-batch", lambda run: run.slowest, ".2f", "ratio"),
        line("processor seconds of all ranks in updates, per step", lambda run: run.processor, ".2f", "ratio"),
        line("seconds of old log-probs", lambda run: run.old_log_prob, ".2f", "ratio"),
        line("seconds of the update", lambda run: run.update, ".2f", "ratio"),
        line("seconds of a step", lambda run: run.step, ".2f", "ratio"),
        line("processor seconds of mini-batches against their cost: R^2", lambda run: run.fit[0], ".3f"),
        line("... and their share that is fixed", lambda run: run.fit[1], ".3f"),
    ]
    head = [f"{len(stock)} runs each, in turn", "stock GRPO", "balanced and packed", "balanced over stock"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def in_words(stock: Sequence[Run], balanced: Sequence[Run]) -> str:
    """Return what the table leaves out: what the trainer itself reports, and that both trained on the same."""
    reported = [run.reported for run in balanced if run.reported is not None]
    pairs = [zip(a.grad_norm, b.grad_norm, strict=True) for a, b in zip(stock, balanced, strict=True)]
    apart = max(abs(b / a - 1) for pair in pairs for a, b in pair)
    measured, waited = (fmean(values) for values in zip(*reported, strict=True))
    return (
        f"The trainer reports dppo/balance/measured {measured:.3f} and dppo/balance/waited {waited:.3f}.\n"
        f"Gradient norms of the two runs differ by {apart:.1e} at most."
    )


def main() -> None:
    """Run both in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=8, help="of lengths, tokens and weights")
    parser.add_argument("--out", type=Path, default=Path("runs/two-ranks"))
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    files = write_inputs(out / "inputs", arguments.steps, arguments.seed)
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for repeat in range(arguments.repeats):
        for arm in ARMS:
            run = run_once(arm, files, out / f"{arm}-{repeat}", arguments.steps, arguments.overrides)
            runs[arm].append(run)
            print(f"{arm}, run {repeat}: {run}", flush=True)
    text = table(runs["stock"], runs["balanced"]) + "\n\n" + in_words(runs["stock"], runs["balanced"])
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
