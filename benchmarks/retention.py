"""Which completions to keep: variance, bias and noise-equivalent speed-up of pruning rules on exact policy gradients.

    python benchmarks/retention.py [FILE.npz ...] [--completions 8] [--out retention.md]

Without files it measures the small copies in tests/data/policy-gradients. Any file of benchmarks/policy_gradients.py
will do; with at least twice as many completions per prompt as are used, the noise of the rollouts is estimated without
bias.

Budgets are compared at equal kept share of the response tokens of informative groups, with a floor of kept / 4.
Variance and bias are relative to the full-batch gradient: tr Cov(g_hat) / ||g||^2 and ||E g_hat - g|| / ||g||.
Averaging over k kept rows of n instead of dividing by n makes a longer step, and much of some rules' bias is that;
"bias at its best scale" takes it out and leaves the wrong direction.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import published_rules as rules
from automatic_budget import COPIES, DEFAULT_KEEP, GRID, REST, ROLLOUT_SHARES, settle, table
from measured_batch import (
    MODES,
    Array,
    Batch,
    Quality,
    Weights,
    advantages,
    batch_noise,
    load,
    quality,
    rollout_noise,
)

from verl_dppo.pruning import NormModel, NormRecord, draw, neyman_inclusion, score_magnitude, token_factor
from verl_dppo.pruning.order import chain_order, snake_order

KEEPS = (0.7, 0.5, 0.3, 0.15)
RATES = (0.5, 0.7, 0.9)
DRAWS = {"pivotal": 2000, "cube": 400}
STEPS = 200
PROBES, PROBED, PROBE_SEEDS = 16, 8, 5


def slopes(batch: Batch, mode: str) -> dict[str, Array]:
    """Return by name what each rule takes for a completion's gradient norm, (n,); 0 where the group is constant."""
    factor, length = np.abs(batch.factor(mode)), batch.tokens
    surprise = batch.surprise.ravel()
    # The budget is spent in proportion to norm / sqrt(tokens): a factor sqrt(tokens) makes pi itself what is named.
    per_token = np.sqrt(length) * batch.informative
    return {
        "uniform": per_token,
        "pi ~ abs A": np.abs(batch.advantage) * per_token,
        "pi ~ abs A / length": np.abs(batch.advantage) / length * per_token,
        "abs A c u": factor * np.sqrt(surprise),
        "abs A c u^1.25 (ours)": score_magnitude(batch.advantage, length, surprise, mode),
        "oracle: true norms": factor * batch.norm(),
    }


OURS, ORACLE, FIRST_POWER = "abs A c u^1.25 (ours)", "oracle: true norms", "abs A c u"


def inclusion(batch: Batch, mode: str, name: str, keep: float) -> Array:
    """Return pi (n,) of a rule under a budget."""
    return neyman_inclusion(slopes(batch, mode)[name], batch.tokens, keep)


def poisson_variance(batch: Batch, mode: str, pi: Array) -> float:
    """Return the variance of independent draws."""
    return quality(batch, rules.horvitz_thompson(batch, pi), mode).variance


def simulated_variance(batch: Batch, mode: str, pi: Array, design: str, order: Array, seed: int = 0) -> float:
    """Return the variance of a fixed-size design, by drawing from it."""
    rng = np.random.default_rng(seed)
    live = np.flatnonzero(pi > 0)
    position = np.empty(pi.size, dtype=np.int64)
    position[live] = np.arange(live.size)
    ranks = position[order[pi[order] > 0]]
    a, probability = np.abs(batch.factor(mode)[live]), pi[live]
    balance = None
    if design == "cube":
        balance = np.column_stack([probability * batch.tokens[live], batch.factor(mode)[live], a])
    draws = [draw(probability, rng, design, ranks, balance) for _ in range(DRAWS[design])]
    off = np.array(draws) / probability - 1
    return float(np.einsum("ri,ri->r", off @ batch.gradient_gram(mode)[np.ix_(live, live)], off).mean())


def orders(batch: Batch) -> dict[str, Array]:
    """Return by name the orders of a fixed-size draw, (n,) permutations."""
    found = {
        "group, sign, length": np.lexsort((batch.tokens, np.sign(batch.advantage), batch.group)),
        "snake of surprise": snake_order(batch.surprise.ravel(), batch.advantage, batch.group),
    }
    if batch.signature is not None:
        found["chain of surprise"] = chain_order(batch.signature, batch.advantage, batch.group)
    return found


def figure(value: float) -> str:
    """Return two significant digits."""
    return f"{value:.2g}" if value < 0.0995 else f"{value:.2f}"


def unbiased_rules(batch: Batch, mode: str) -> str:
    """Return the variances at equal budgets, independent draws first, then designs with our probabilities."""
    rows = [
        [name, *(figure(poisson_variance(batch, mode, inclusion(batch, mode, name, keep))) for keep in KEEPS)]
        for name in slopes(batch, mode)
    ]
    for design in DRAWS:
        for label, order in orders(batch).items():
            cells = []
            for keep in KEEPS:
                pi = inclusion(batch, mode, OURS, keep)
                variance = simulated_variance(batch, mode, pi, design, order)
                cells.append(f"{figure(variance)} ({variance / poisson_variance(batch, mode, pi):.2f} of independent)")
            rows.append([f"ours, {design}, order {label}", *cells])
    return table(["variance = MSE (unbiased)", *(f"kept {keep:g}" for keep in KEEPS)], rows)


def against_threshold(batch: Batch, mode: str) -> str:
    """Return the threshold rule at its own kept share, and how many times less variance others have there."""
    rows = []
    for rate in RATES:
        weights = rules.threshold(batch, rate)
        found = quality(batch, weights, mode)
        ratios = [
            f"{found.variance / poisson_variance(batch, mode, inclusion(batch, mode, name, found.kept)):.1f}"
            for name in (FIRST_POWER, OURS, ORACLE)
        ]
        rows.append([f"{rate}", f"{found.kept:.2f}", figure(found.variance), *ratios])
    return table(
        ["threshold r", "kept", "its variance", "over that of u", "over ours (u^1.25)", "over the oracle"], rows
    )


def biased_candidates(batch: Batch) -> Iterator[tuple[str, Weights]]:
    """Yield the rules that are not unbiased, at the budgets that they can have."""
    for keep in KEEPS:
        yield f"CPPO top-k, budget {keep:g}", rules.cppo(batch, keep)
    for share in (0.75, 0.5, 0.25):
        size = max(2, round(share * batch.completions))
        yield f"PODS, {size} of {batch.completions}", rules.pods(batch, size)
    for exploration in (0.5, 0.01):
        yield f"GRESO-like, exploration {exploration:g}", rules.greso(batch, exploration)
    for rate in RATES:
        yield f"InfoBatch-like, r = {rate}", rules.infobatch(batch, rate)


def biased_rules(batch: Batch, mode: str) -> str:
    """Return variance, bias and MSE of the biased rules beside our variance at the same kept share."""
    rows = []
    for name, weights in biased_candidates(batch):
        found: Quality = quality(batch, weights, mode)
        ours = poisson_variance(batch, mode, inclusion(batch, mode, OURS, min(found.kept, 1.0)))
        errors = (found.variance, found.bias, found.scaled_bias, found.mse, ours)
        rows.append([name, f"{found.kept:.2f}", *(figure(error) for error in errors)])
    head = [
        "rule as published",
        "kept",
        "variance",
        "bias",
        "bias at its best scale",
        "MSE",
        "MSE of ours at that kept",
    ]
    return table(head, rows)


def driver_rho(batch: Batch, mode: str, keep: float) -> float:
    """Return what the driver sees: sum (1/pi - 1) m^2 / sum m^2 over its magnitudes."""
    m, pi = slopes(batch, mode)[OURS], inclusion(batch, mode, OURS, keep)
    live = pi > 0
    return float(((1 / pi[live] - 1) * m[live] ** 2).sum() / (m[live] ** 2).sum())


def added_noise(batch: Batch, mode: str) -> str:
    """Return the driver's estimate of rho beside the true one."""
    rng = np.random.default_rng(0)
    rollout, both = rollout_noise(batch, mode, rng), batch_noise(batch, mode)
    rows = []
    for keep in (0.9, 0.8, *KEEPS[:1], 0.6, *KEEPS[1:]):
        variance = poisson_variance(batch, mode, inclusion(batch, mode, OURS, keep))
        seen, true = driver_rho(batch, mode, keep), variance / rollout
        rows.append([f"{keep:g}", *(figure(x) for x in (seen, true, variance / both)), f"{seen / true:.2f}"])
    text = f"V_roll / ||g||^2: {rollout:.3f} over the completions, {both:.3f} over prompts and completions.\n\n"
    head = [
        "kept",
        "rho on the driver",
        "true rho = V_prune / V_roll",
        "the same, prompts resampled too",
        "driver / true",
    ]
    return text + table(head, rows)


def speed_up(batch: Batch, keep: float | Array, rho: float | Array, rollout: float) -> float | Array:
    """Return S = 1 / ((s + t * keep)(1 + rho) + f0), relative to a full batch that drops nothing."""
    update = 1 - REST - rollout
    return 1 / ((rollout + update * keep * batch.informative_token_share) * (1 + rho) + REST)


def noise_equivalent(batch: Batch, mode: str) -> str:
    """Return S at the default, at the automatic and at the best fixed keep, and for dropping constant groups alone.

    The automatic one is where the controller stands after STEPS steps.
    """
    noise = rollout_noise(batch, mode, np.random.default_rng(0))
    true = np.array([poisson_variance(batch, mode, inclusion(batch, mode, OURS, keep)) / noise for keep in GRID])
    thresholds = [quality(batch, rules.threshold(batch, rate), mode) for rate in RATES]
    rows = []
    for share in ROLLOUT_SHARES:
        value = speed_up(batch, GRID, true, share)
        auto = settle(batch, mode, share, fixed=0.0, steps=STEPS, seed=0, prompts=False)
        reached = float(np.interp(auto, GRID, value))
        best, default = int(np.argmax(value)), int(np.abs(GRID - DEFAULT_KEEP).argmin())
        rival = max(speed_up(batch, found.kept, found.variance / noise, share) for found in thresholds)
        rows.append(
            [
                f"{share:g}",
                f"{value[-1]:.3f}",
                f"{rival:.3f}",
                f"{value[default]:.3f}",
                f"{reached:.3f} at {auto:.2f}",
                f"{value[best]:.3f} at {GRID[best]:.2f}",
                f"{reached / value[default]:.3f}",
            ]
        )
    head = [
        "rollout share s",
        "constant groups only",
        "threshold, best r",
        "keep .6",
        "auto",
        "best keep",
        "auto / keep .6",
    ]
    return table(head, rows)


def probed_model(batch: Batch, mode: str, seed: int) -> NormModel:
    """Return the norm model after PROBES probes, as the trainer makes them, of completions that are not in the batch.

    The second group of each prompt is pruned at DEFAULT_KEEP; of what is drawn, PROBED completions are measured.
    """
    rng, record = np.random.default_rng(seed), NormRecord()
    other = slice(batch.completions, 2 * batch.completions)
    norm = np.sqrt(np.einsum("qii->qi", batch.prompt_gram))[:, other].ravel()
    advantage = advantages(batch.all_reward[:, other]).ravel()
    length, surprise = batch.all_length[:, other].ravel(), batch.all_surprise[:, other].ravel()
    prompt_length = batch.prompt_length[batch.group]
    scale = np.abs(advantage) * token_factor(length, mode)
    for step in range(PROBES):
        magnitude = score_magnitude(advantage, length, surprise, mode, record.model(), prompt_length)
        pi = neyman_inclusion(magnitude, length, DEFAULT_KEEP)
        drawn = rng.permutation(np.flatnonzero(draw(pi, rng, "poisson")))[:PROBED]
        record.observe(
            step,
            sum_sq_one_minus_p=surprise[drawn],
            length=length[drawn],
            prompt_length=prompt_length[drawn],
            scale=scale[drawn],
            magnitude=magnitude[drawn],
            norm=(scale * norm)[drawn],
            weight=1 / pi[drawn],
        )
    return record.model()


def fitted_norms(batch: Batch, mode: str) -> str:
    """Return the variance of ours with norms fitted from probes, over that with u^1.25 and over that of true norms."""
    if batch.all_reward.shape[1] < 2 * batch.completions:
        return "There are no completions besides those of the batch to probe."
    models = [probed_model(batch, mode, seed) for seed in range(PROBE_SEEDS)]
    prompt_length = batch.prompt_length[batch.group]
    means, worst, over_oracle = [], [], []
    for keep in KEEPS:
        variances = []
        for model in models:
            magnitude = score_magnitude(
                batch.advantage, batch.tokens, batch.surprise.ravel(), mode, model, prompt_length
            )
            variances.append(poisson_variance(batch, mode, neyman_inclusion(magnitude, batch.tokens, keep)))
        ours, oracle = (poisson_variance(batch, mode, inclusion(batch, mode, name, keep)) for name in (OURS, ORACLE))
        means.append(f"{np.mean(variances) / ours:.2f}")
        worst.append(f"{max(variances) / ours:.2f}")
        over_oracle.append(f"{np.mean(variances) / oracle:.2f} (u^1.25: {ours / oracle:.2f})")
    powers = np.array([(model.surprise, model.length, model.prompt) for model in models])
    spread = ", ".join(
        f"{name} {low:.2f} to {high:.2f}"
        for name, low, high in zip(("u", "length", "prompt length"), powers.min(0), powers.max(0), strict=True)
    )
    rows = [["over u^1.25, mean", *means], ["over u^1.25, worst", *worst], ["over the oracle, mean", *over_oracle]]
    text = f"{PROBES} probes of {PROBED}, {PROBE_SEEDS} seeds; powers of {spread}.\n\n"
    return text + table(["variance with fitted norms", *(f"kept {keep:g}" for keep in KEEPS)], rows)


SECTIONS: dict[str, Callable[[Batch, str], str]] = {
    "Unbiased rules at equal budgets": unbiased_rules,
    "The threshold rule at its own kept share": against_threshold,
    "Norms fitted from probes": fitted_norms,
    "Biased rules": biased_rules,
    "The noise that pruning adds": added_noise,
    "Noise-equivalent speed-up": noise_equivalent,
}


def report(path: Path, completions: int) -> str:
    """Return all tables of one file."""
    batch = load(path, completions)
    shape = f"{len(batch.reward)} prompts x {completions} completions"
    groups = batch.informative.mean()
    lines = [
        f"## {path.stem}",
        f"{shape}, {groups:.0%} of the groups informative, mean length {batch.tokens.mean():.0f}.",
    ]
    for mode in MODES:
        for title, section in SECTIONS.items():
            lines += [f"### {title}: {path.stem}, {mode}", section(batch, mode)]
    return "\n\n".join(lines)


def main() -> None:
    """Print the tables of every file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=sorted(COPIES.glob("*.npz")))
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    text = "\n\n".join(report(path, arguments.completions) for path in arguments.files)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
