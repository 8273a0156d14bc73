"""How long the update of one step takes on a simulated cluster: rows in verl's order, in ours, and at best.

    python benchmarks/simulated_cluster.py

Rows are drawn once and both orders get the same mini-batches: those that verl 0.9.1 would cut, which deals the whole
batch to the ranks at equal counts by workload and takes the k-th slice of each rank's rows for mini-batch k. verl's
micro-batches are made by its own partition with its own rule for their number; ours are those of `schedule`. A step is
then the sum of what ranks wait for, in FLOPs, over the mean: 1 is a step in which nobody waits.

    end of a mini-batch  ranks meet at its end only, as data-parallel ranks of Megatron do
    every micro-step     ranks meet at every micro-batch, as FSDP does when it gathers parameters

Bounds are those of the mini-batches at hand. The makespan of each is at least `makespan_lower_bound`, and where ranks
meet at every micro-step also at least `micro_step_bound`.

What it leaves out: communication and its overlap, fixed costs of a micro-batch and the lower efficiency of small ones,
memory, pipeline bubbles, uneven hardware, rollout and log-probs. It says how much waiting an order causes, and nothing
about seconds.
"""

import argparse

import numpy as np
from lengths import lognormal_groups, pareto

from verl_dppo.packing import (
    Schedule,
    SequenceCost,
    imbalance,
    makespan_lower_bound,
    schedule,
)

CAPACITY = 32768
COMMON = {"vocab_size": 151936, "head_dim": 128}
MODELS = {
    "Qwen3-4B": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
LENGTHS = {
    "log-normal": lambda rows, seed: lognormal_groups(rows, CAPACITY, seed),
    "Pareto 1.5": lambda rows, seed: pareto(rows, 1.5, CAPACITY, seed),
}
# Ranks, rows of a step, mini-batches; the last line is a step of which about half of the rows were pruned.
CLUSTERS = ((64, 4096, 4), (512, 8192, 1), (512, 32768, 4), (512, 16384, 4))


def partition(values, parts, equal):
    """Return verl's own partition of these workloads."""
    import torch
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    return get_seqlen_balanced_partitions(torch.as_tensor(values), k_partitions=parts, equal_size=equal)


def workload(length):
    """Return verl's own estimate of the work of rows."""
    import torch
    from verl.utils.seqlen_balancing import calculate_workload

    return calculate_workload(torch.as_tensor(length, dtype=torch.int64)).tolist()


def verl_rows(length, ranks, mini_batches):
    """Return (ranks, mini-batches, rows) as verl's trainer orders and its workers slice them."""
    order = [row for part in partition(workload(length), ranks, equal=True) for row in part]
    return np.array(order).reshape(ranks, mini_batches, -1)


def verl_micro_batches(cells):
    """Return for each rank (rows,) micro-batch of its rows of one mini-batch, by verl's rule for all ranks together.

    As many as the fullest rank needs by tokens, and one more as often as one of them is above the cap.
    """
    count = max(min(rows.size, -(-int(rows.sum()) // CAPACITY)) for rows in cells)
    while True:
        bins = [partition(workload(rows), count, equal=False) for rows in cells]
        if all(rows[part].sum() <= CAPACITY for rows, parts in zip(cells, bins, strict=True) for part in parts):
            break
        count += 1
    answer = []
    for rows, parts in zip(cells, bins, strict=True):
        work = np.array(workload(rows))
        by_work = sorted(parts, key=lambda part: -work[part].sum())
        micro = np.empty(rows.size, dtype=np.int64)
        for step, part in enumerate(by_work[::2][::-1] + by_work[1::2]):
            micro[part] = step
        answer.append(micro)
    return answer


def verl_schedule(length, ranks, mini_batches, cost):
    """Return verl's order of a step and (rows,) mini-batch of each row."""
    rows = verl_rows(length, ranks, mini_batches)
    micro = np.stack([verl_micro_batches(list(length[rows[:, k]])) for k in range(mini_batches)], axis=1)
    rank, mini_batch, _ = (axis.ravel() for axis in np.indices(rows.shape))
    member = np.empty(length.size, dtype=np.int64)
    member[rows.ravel()] = mini_batch
    flat = length[rows.ravel()]
    return Schedule(rows.ravel(), rank, mini_batch, micro.ravel(), flat, cost(flat), CAPACITY), member


def bounds(length, mini_batch, ranks, cost):
    """Return the least makespan over mean that these mini-batches allow, ranks meeting at the end or at every step."""
    at_end = at_steps = 0.0
    for k in range(int(mini_batch.max()) + 1):
        rows = length[mini_batch == k]
        least = makespan_lower_bound(cost(rows), ranks)
        at_end += least
        at_steps += max(least, micro_step_bound(rows, cost(rows), ranks, CAPACITY))
    mean = cost(length).sum() / ranks
    return at_end / mean, at_steps / mean


def micro_step_bound(length, cost, ranks, capacity):
    """Return a cost that the micro-steps of one mini-batch take at least, however many there are.

    With micro-batches in falling order of cost it is least that every `ranks` of them share a step, and then it is the
    sum of the first of each. Rows above half the cap are in micro-batches of their own: the first of step s, from 0,
    costs at least what the (s * ranks + 1)-th costliest of these rows does. Of s steps the micro-batches hold at most
    s * ranks * capacity tokens, and cost at most what so many tokens of the rows with the costliest tokens do. What is
    left is spread evenly at best. Rows may be cut for that, so no cut into whole rows beats the best of it over s.
    """
    order = np.argsort(-cost / length, kind="stable")
    tokens, work = (np.append(0.0, np.cumsum(values[order])) for values in (length, cost))
    waited = np.append(0.0, np.cumsum(-np.sort(-cost[2 * length > capacity])[::ranks]))
    held = np.interp(np.arange(waited.size) * float(ranks * capacity), tokens, work)
    return float((waited + (work[-1] - held) / ranks).max())


def measure(model, shape, ranks, rows, mini_batches, seeds):
    """Return the mean figures of one line of the table."""
    cost, figures = SequenceCost.from_config(COMMON | MODELS[model]), []
    for seed in range(seeds):
        length = LENGTHS[shape](rows, seed)
        theirs, mini_batch = verl_schedule(length, ranks, mini_batches, cost)
        ours = schedule(length, ranks, mini_batch, CAPACITY, cost)
        at_end, at_steps = bounds(length, mini_batch, ranks, cost)
        figures.append(
            [
                *(imbalance(plan, plan.cost, of_micro_steps=False) for plan in (theirs, ours)),
                at_end,
                *(imbalance(plan, plan.cost, of_micro_steps=True) for plan in (theirs, ours)),
                at_steps,
                *(plan.micro_batches.sum() for plan in (theirs, ours)),
            ]
        )
    return np.mean(figures, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="draws of lengths to average over")
    parser.add_argument("--clusters", type=int, default=len(CLUSTERS), help="how many of the clusters, smallest first")
    options = parser.parse_args()
    print(
        "| model | lengths | ranks, rows, mini-batches | end of a mini-batch: verl | ours | bound | ours / verl "
        "| every micro-step: verl | ours | bound | ours / verl | micro-batches: verl | ours |\n" + "|---" * 13 + "|"
    )
    for ranks, rows, mini_batches in CLUSTERS[: options.clusters]:
        for shape in LENGTHS:
            for model in MODELS:
                theirs, ours, least, their_micro, our_micro, least_micro, their_count, our_count = measure(
                    model, shape, ranks, rows, mini_batches, options.seeds
                )
                print(
                    f"| {model} | {shape} | {ranks}, {rows:,}, {mini_batches} | {theirs:.3f} | {ours:.3f} "
                    f"| {least:.3f} | {ours / theirs:.2f} | {their_micro:.3f} | {our_micro:.3f} "
                    f"| {least_micro:.3f} | {our_micro / their_micro:.2f} | {their_count:.1f} | {our_count:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
