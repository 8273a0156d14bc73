"""What skipping prompts costs in variance, and when it pays: on exact policy gradients and on simulated histories.

    OMP_NUM_THREADS=1 python benchmarks/prompt_level.py [FILE.npz ...] [--parts real simulated both] [--out FILE.md]

Without files it takes the small copies in tests/data/policy-gradients; any file of benchmarks/policy_gradients.py will
do.

`cost` is keep * (1 + rho): what a unit of the gradient's precision costs where all time goes with the prompts that are
sampled. Uniform skipping costs exactly 1, since it makes a smaller batch and nothing else; below 1 history pays. rho is
the variance that the draw of prompts adds, sum (1/pi_q - 1) ||G_q||^2, over sum ||G_q||^2, with G_q the gradient of the
group of prompt q: the noise that more prompts average away. Against the noise of the rollouts alone, prompts fixed, the
draw weighs more; that factor is in a column of its own.

real: the rewards of an older policy are the history, the gradients are those of the present one. Averaged over random
choices of 8 of the 16 completions of each.
simulated: thirty passes through `PromptHistory`, `candidates`, `plan_prompts` and `PromptKeepController`; the cost is
that of the last ten, with the true expected energy of every candidate.
both: the best pair of keeps, found by trying all, against where the two controllers of a run stand.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from automatic_budget import COPIES, REST, ROLLOUT_SHARES, table
from measured_batch import MODES, Array, Batch, advantages, load, rollout_noise

from verl_dppo.pruning import (
    KeepController,
    PromptHistory,
    PromptKeepController,
    PromptStream,
    candidates,
    draw,
    inflation_curve,
    neyman_inclusion,
    plan_prompts,
    prompt_inclusion,
    rank_correlation,
    score_magnitude,
)
from verl_dppo.settings import PromptSettings

KEEPS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
FLOORS = (0.1, 0.3, 0.5)
DEFAULT = PromptSettings()
DEFAULT_FLOOR = DEFAULT.floor
CHOICES = 100
DRAWS = 2000
TINY = 1e-9


def cost(pi: Array, energy: Array, keep: float) -> float:
    """Return keep * (1 + rho) of independent draws; `pi` and `energy` are of one shape."""
    return float(keep * (energy / pi).sum() / energy.sum())


def spread_after(rewards: Array) -> Array:
    """Return (P,) what the history makes of one visit of P prompts; rewards are (P, G)."""
    history, ids = PromptHistory(), [f"prompt {q}" for q in range(len(rewards))]
    history.observe(ids, rewards, 1)
    return history.spread(ids)


def chance_informative(rewards: Array) -> Array:
    """Return (P,) the root of the chance that the next group holds both rewards, by the Beta posterior of one visit."""
    group = rewards.shape[1]
    right = rewards.sum(1)

    def all_alike(successes: Array) -> Array:
        return np.prod([(1 + successes + k) / (2 + group + k) for k in range(group)], axis=0)

    return np.sqrt(1 - all_alike(right) - all_alike(group - right))


# ---- measured gradients ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visits:
    """Two visits of the same P prompts, under an older and the present policy: (R, P), R choices of completions each.

    Attributes:
        spread: by the history of the older visit.
        chance: another reading of it, see `chance_informative`.
        energy: ||G_q||^2 of the present visit.
        again: the same of the present policy's other completions.
        seen: what the driver takes for the energy, the sum of its squared magnitudes.
    """

    spread: Array
    chance: Array
    energy: Array
    again: Array
    seen: Array

    def inclusion(self, rule: str, keep: float, floor: float) -> Array:
        """Return pi (R, P) of a rule, in expectation `keep` of the prompts."""
        size = self.spread.shape[1]
        known = np.ones(size, dtype=bool)
        scores = {
            "uniform": np.ones_like(self.spread),
            "beta": self.spread,
            "threshold": self.spread,
            "chance informative": self.chance,
            "oracle, mean energy": np.sqrt(np.broadcast_to(self.energy.mean(0), self.energy.shape)),
            "oracle, this group": np.sqrt(self.energy),
        }[rule]
        solved = "threshold" if rule == "threshold" else "beta"
        scores = np.maximum(scores, TINY * scores.max())
        return np.array([prompt_inclusion(row, known, keep * size, min(floor, keep), solved) for row in scores])

    def cost(self, rule: str, keep: float, floor: float) -> float:
        """Return the true cost."""
        return cost(self.inclusion(rule, keep, floor), self.energy, keep)


RULES = ("beta", "threshold", "uniform", "chance informative", "oracle, mean energy", "oracle, this group")


def visits(batch: Batch, mode: str, choices: int) -> Visits:
    """Return what `choices` random choices of completions give."""
    rng, size = np.random.default_rng(0), batch.completions
    prompts, available = batch.all_reward.shape
    found: dict[str, list[Array]] = {name: [] for name in ("spread", "chance", "energy", "again", "seen")}
    for _ in range(choices):
        past = rng.random((prompts, available)).argsort(1)[:, :size]
        earlier = np.take_along_axis(batch.previous, past, 1)
        found["spread"].append(spread_after(earlier))
        found["chance"].append(chance_informative(earlier))
        present = rng.random((prompts, available)).argsort(1)
        found["energy"].append(group_energy(batch, mode, present[:, :size]))
        found["again"].append(group_energy(batch, mode, present[:, size : 2 * size]))
        found["seen"].append((magnitudes(batch, mode, present[:, :size]) ** 2).sum(1))
    return Visits(**{name: np.array(rows) for name, rows in found.items()})


def _of(values: Array, chosen: Array) -> Array:
    return np.take_along_axis(values, chosen, 1)


def group_energy(batch: Batch, mode: str, chosen: Array) -> Array:
    """Return (P,) ||G_q||^2 of the groups of the completions `chosen` (P, G)."""
    a = advantages(_of(batch.all_reward, chosen))
    if mode == "seq-mean-token-mean":
        a = a / _of(batch.all_length, chosen)
    row = np.arange(len(chosen))[:, None, None]
    return np.einsum("qi,qij,qj->q", a, batch.prompt_gram[row, chosen[:, :, None], chosen[:, None, :]], a)


def magnitudes(batch: Batch, mode: str, chosen: Array) -> Array:
    """Return (P, G) what the driver takes for the gradient norms."""
    length, surprise = (_of(values, chosen).ravel() for values in (batch.all_length, batch.all_surprise))
    a = advantages(_of(batch.all_reward, chosen)).ravel()
    return score_magnitude(a, length, surprise, mode).reshape(chosen.shape)


def group_gram(batch: Batch, mode: str) -> Array:
    """Return (P, P) inner products of the groups' gradients, of the batch's own completions."""
    prompts = len(batch.reward)
    shape = (prompts, batch.completions, prompts, batch.completions)
    return batch.gradient_gram(mode).reshape(shape).sum((1, 3))


def pivotal_ratio(batch: Batch, mode: str, keep: float, floor: float) -> float:
    """Return the variance of the fixed-size draw over that of independent draws, by drawing, in the trainer's order."""
    rng, gram, history = np.random.default_rng(0), group_gram(batch, mode), batch.previous[:, : batch.completions]
    spread, prompts = spread_after(history), len(history)
    pi = prompt_inclusion(spread, np.ones(prompts, dtype=bool), round(keep * prompts), min(floor, keep))
    order = np.lexsort((np.arange(prompts), history.mean(1)))
    off = np.array([draw(pi, rng, order=order) for _ in range(DRAWS)]) / pi - 1
    variance = np.einsum("rp,rp->r", off @ gram, off).mean()
    return float(variance / ((1 / pi - 1) * np.diag(gram)).sum())


def share_of_rollouts(batch: Batch, mode: str, found: Visits) -> float:
    """Return the noise of the rollouts, prompts fixed, as a share of sum ||G_q||^2."""
    a = batch.factor(mode)
    noise = rollout_noise(batch, mode, np.random.default_rng(0)) * (a @ batch.gram @ a)
    return float(noise / found.energy.sum(1).mean())


def prediction(batch: Batch, mode: str, found: Visits) -> dict[str, float]:
    """Return how well history, and the energy of another group of the same policy, tell the energy of this group."""
    pi = found.inclusion("beta", 0.9, DEFAULT_FLOOR)
    single = [cost(*pair, 0.9) for pair in zip(pi, found.energy, strict=True)]
    return {
        "rank correlation": np.mean([rank_correlation(*pair) for pair in zip(found.spread, found.energy, strict=True)]),
        "the same, driver": np.mean([rank_correlation(*pair) for pair in zip(found.spread, found.seen, strict=True)]),
        "of two present groups": np.mean(
            [rank_correlation(*pair) for pair in zip(found.energy, found.again, strict=True)]
        ),
        "energy skipped at .9": float(((1 - pi) * found.energy).sum() / found.energy.sum()),
        "cost at .9, 5 % of visits": float(np.quantile(single, 0.05)),
        "95 %": float(np.quantile(single, 0.95)),
        "V_roll / sum G^2": share_of_rollouts(batch, mode, found),
        "pivotal / independent at .9": pivotal_ratio(batch, mode, 0.9, DEFAULT_FLOOR),
        "at .7": pivotal_ratio(batch, mode, 0.7, DEFAULT_FLOOR),
    }


def real_tables(worlds: dict[tuple[str, str], Batch]) -> str:
    """Return the tables on measured gradients."""
    found = {key: visits(batch, key[1], CHOICES) for key, batch in worlds.items()}
    figures = {key: prediction(batch, key[1], found[key]) for key, batch in worlds.items()}
    names = list(next(iter(figures.values())))
    rows = [[*key, *(f"{values[name]:.2f}" for name in names)] for key, values in figures.items()]
    text = ["How well history predicts", table(["data", "mode", *names], rows)]
    rows = []
    for key, seen in found.items():
        for rule in RULES:
            rows.append([*key, rule, *(f"{seen.cost(rule, keep, DEFAULT_FLOOR):.3f}" for keep in KEEPS)])
    head = ["data", "mode", "rule", *(f"keep {keep:g}" for keep in KEEPS)]
    text += [f"Cost with a floor of {DEFAULT_FLOOR:g}", table(head, rows)]
    rows = []
    for rule in RULES:
        for floor in FLOORS if rule != "uniform" else FLOORS[:1]:
            costs = [[seen.cost(rule, keep, floor) for seen in found.values()] for keep in KEEPS]
            rows.append([rule, f"{floor:g}", *(f"{np.mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in costs)])
    head = ["rule", "floor", *(f"keep {keep:g}" for keep in KEEPS)]
    text += ["Cost, mean over the data and modes (lowest to highest)", table(head, rows)]
    rows = []
    for key, seen in found.items():
        cells = []
        for keep in KEEPS[:-1]:
            pi = seen.inclusion("beta", keep, DEFAULT_FLOOR)
            true, driver = (cost(pi, energy, keep) / keep - 1 for energy in (seen.energy, seen.seen))
            cells.append(f"{true:.3f} / {driver:.3f}")
        rows.append([*key, *cells])
    text += ["rho of the beta rule: true / on the driver", table(["data", "mode", *head[2:-1]], rows)]
    return "\n\n".join(text)


# ---- simulated histories --------------------------------------------------------------------------------------------

PASSES = 30
LATE, EARLY = (20, 30), (2, 4)
"""Passes over which a cost is taken: those complete when it begins, and when it ends."""
PROMPTS, BATCH_SIZE, GROUP = 512, 64, 8
FORGETTINGS = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)
CONSTANT_KEEPS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LOGIT_SPREAD, SETTLED_LOGIT, CONCENTRATION, SIZE_SCATTER = 4.0, 3.0, 4.0, 0.5


@dataclass(frozen=True)
class Regime:
    """How the pass rates of prompts move.

    The logits have a standard deviation of 4, so that nearly half of the prompts are solved or hopeless at any time.

    Attributes:
        likeness: correlation of a prompt's logit with that of the pass before: 1 stays, 0 is drawn anew.
        trend: what is added to each logit from pass to pass.
        fractional: rewards are between 0 and 1, but for prompts that are solved or hopeless.
        normalised: advantages are divided by the standard deviation of their group.
    """

    likeness: float
    trend: float = 0.0
    fractional: bool = False
    normalised: bool = True

    def logits(self, rng: np.random.Generator, passes: int = PASSES + 2) -> Array:
        """Return (passes, PROMPTS)."""
        found = [rng.normal(0, LOGIT_SPREAD, PROMPTS) - self.trend * PASSES / 2]
        for k in range(1, passes):
            centre = self.trend * (k - PASSES / 2)
            stays = self.likeness * (found[-1] - centre + self.trend)
            scatter = LOGIT_SPREAD * np.sqrt(1 - self.likeness**2)
            found.append(centre + stays + rng.normal(0, 1, PROMPTS) * scatter)
        return np.array(found)

    def rewards(self, logit: Array, rng: np.random.Generator) -> Array:
        """Return (k, GROUP) of prompts with these logits."""
        rate = 1 / (1 + np.exp(-logit))[:, None].repeat(GROUP, 1)
        if not self.fractional:
            return (rng.random(rate.shape) < rate).astype(float)
        settled = np.abs(logit)[:, None] > SETTLED_LOGIT
        rate = np.where(settled, 0.5, rate)
        return np.where(settled, logit[:, None] > 0, rng.beta(CONCENTRATION * rate, CONCENTRATION * (1 - rate)))

    def energy(self, rewards: Array, rng: np.random.Generator) -> Array:
        """Return (k,) the energy of groups with these rewards."""
        a = advantages(rewards) if self.normalised else rewards - rewards.mean(1, keepdims=True)
        return (a**2).sum(1) * rng.lognormal(-(SIZE_SCATTER**2) / 2, SIZE_SCATTER, len(rewards))

    def expected_energy(self, logit: Array) -> Array:
        """Return (k,) what `energy` is on average."""
        rate = 1 / (1 + np.exp(-logit))
        if self.fractional:
            variance = np.where(np.abs(logit) > SETTLED_LOGIT, 0.0, rate * (1 - rate) / (CONCENTRATION + 1))
            informative = (variance > 0).astype(float)
        else:
            variance, informative = rate * (1 - rate), 1 - rate**GROUP - (1 - rate) ** GROUP
        return (GROUP - 1) * (informative if self.normalised else variance)


REGIMES = {
    "persistent": Regime(1.0),
    "slow drift": Regime(0.97),
    "fast drift": Regime(0.8),
    "learning": Regime(1.0, trend=0.15),
    "redrawn each pass": Regime(0.0),
    "fractional, persistent": Regime(1.0, fractional=True),
    "fractional, persistent, A not normalised": Regime(1.0, fractional=True, normalised=False),
    "fractional, redrawn": Regime(0.0, fractional=True),
}


@dataclass(frozen=True)
class Outcome:
    """Of one run: mean keep and true cost over the measured passes, and the keep of the controller at the end."""

    keep: float
    cost: float
    last: float


@cache
def simulate(
    regime: Regime,
    keep: float | None,
    forgetting: float = DEFAULT.forgetting,
    warmup_visits: int = 1,
    seed: int = 0,
    floor: float = DEFAULT_FLOOR,
    rule: str = "beta",
    measured: tuple[int, int] = LATE,
) -> Outcome:
    """Return how a run goes by the `refill` schedule.

    Args:
        regime: of the pass rates.
        keep: constant, or None for the controller's.
        forgetting, warmup_visits, floor, rule: see `PromptSettings`.
        seed: of everything.
        measured: passes over which keep and cost are taken, one of LATE and EARLY; the run ends with them.
    """
    rng = np.random.default_rng(seed)
    logits, ids = regime.logits(rng), np.array([f"prompt {q}" for q in range(PROMPTS)])
    stream = PromptStream(PROMPTS, lambda: rng.permutation(PROMPTS))
    history, controller = PromptHistory(forgetting), PromptKeepController()
    known, step = np.zeros(PROMPTS, dtype=bool), 0
    kept_share, weighted, whole = [], 0.0, 0.0
    while stream.position < measured[1] * PROMPTS:
        now, step = logits[stream.position // PROMPTS], step + 1
        share = controller.keep if keep is None else keep
        counts = stream.position >= measured[0] * PROMPTS
        size = candidates(BATCH_SIZE, share, float(known[stream.to_come()].mean()), 1, floor)
        rows = stream.take(size)
        names = ids[rows].tolist()
        spread, order = history.spread(names), np.lexsort((np.arange(size), history.mean(names), known[rows]))
        plan = plan_prompts(spread, known[rows], order, 1, BATCH_SIZE, min(floor, share), rule, rng, rng)
        drawn = rows[plan.kept]
        rewards = regime.rewards(now[drawn], rng)
        if keep is None and known[rows].all():
            energy = regime.energy(rewards, rng)
            if energy.any():
                controller.observe(spread, floor, rule, plan.kept, plan.pi, energy)
        history.observe(ids[drawn].tolist(), rewards, step)
        known[drawn] = history.visits(ids[drawn].tolist()) >= warmup_visits
        if counts:
            expected = regime.expected_energy(now[rows])
            kept_share.append(BATCH_SIZE / size)
            weighted, whole = weighted + float((expected / plan.pi).sum()), whole + float(expected.sum())
    mean = float(1 / np.mean(1 / np.array(kept_share)))
    return Outcome(mean, mean * weighted / whole, controller.keep)


def over_seeds(seeds: Sequence[int], regime: Regime, keep: float | None, **settings: Any) -> Outcome:
    """Return the means over some runs."""
    runs = [simulate(regime, keep, seed=seed, **settings) for seed in seeds]
    return Outcome(*(float(np.mean(values)) for values in zip(*((r.keep, r.cost, r.last) for r in runs), strict=True)))


def simulated_tables(seeds: Sequence[int]) -> str:
    """Return the tables on simulated histories."""
    rows = []
    for name, regime in REGIMES.items():
        auto = over_seeds(seeds, regime, None)
        constant = [over_seeds(seeds, regime, keep).cost for keep in CONSTANT_KEEPS]
        best = int(np.argmin(constant))
        rows.append(
            [
                name,
                f"{auto.last:.2f}",
                f"{auto.cost:.3f}",
                f"{constant[best]:.3f} at {CONSTANT_KEEPS[best]:g}",
                *(f"{value:.3f}" for value in constant[:-1]),
            ]
        )
    head = ["regime", "auto ends at", "cost of auto", "best constant", *(f"keep {k:g}" for k in CONSTANT_KEEPS[:-1])]
    text = ["Where keep=auto ends, and the cost", table(head, rows)]
    for keep, label in ((0.9, "keep .9"), (0.7, "keep .7"), (None, "auto")):
        rows = []
        for name, regime in REGIMES.items():
            found = [over_seeds(seeds, regime, keep, forgetting=factor) for factor in FORGETTINGS]
            rows.append([name, *(f"{run.cost:.3f}" + (f" at {run.last:.2f}" if keep is None else "") for run in found)])
        head = ["regime", *(f"forgetting {factor:g}" for factor in FORGETTINGS)]
        text += [f"Cost by forgetting, {label}", table(head, rows)]
    text += ["Cost of the third and fourth pass by warmup_visits", warmup_table(seeds)]
    return "\n\n".join([*text, "Cost by rule and floor", floor_table(seeds)])


def warmup_table(seeds: Sequence[int]) -> str:
    """Return the cost of early passes, where one visit more is the most that one can know more."""
    rows = []
    for name, regime in REGIMES.items():
        found = [
            over_seeds(seeds, regime, keep, warmup_visits=warmup, measured=EARLY).cost
            for keep in (0.9, 0.7)
            for warmup in (1, 2)
        ]
        rows.append([name, *(f"{value:.3f}" for value in found)])
    return table(["regime", *(f"keep {keep}, {warmup}" for keep in (".9", ".7") for warmup in (1, 2))], rows)


def floor_table(seeds: Sequence[int]) -> str:
    """Return the cost of late passes by rule and floor, at two keeps."""
    cases = [(rule, keep, floor) for rule in ("beta", "threshold") for keep in (0.9, 0.7) for floor in FLOORS]
    rows = []
    for name, regime in REGIMES.items():
        found = [over_seeds(seeds, regime, keep, floor=floor, rule=rule).cost for rule, keep, floor in cases]
        rows.append([name, *("/".join(f"{value:.3f}" for value in found[k : k + 3]) for k in range(0, 12, 3))])
    head = [f"{rule}, keep {keep:g}" for rule, keep, _ in cases[::3]]
    return "Floors of " + "/".join(f"{floor:g}" for floor in FLOORS) + ".\n\n" + table(["regime", *head], rows)


# ---- both levels ----------------------------------------------------------------------------------------------------

PROMPT_KEEPS, COMPLETION_KEEPS = np.linspace(0.5, 1.0, 11), np.linspace(0.2, 1.0, 17)
CONTROLLED_STEPS = 200
PROMPT_DRAWS = 40
AUTO = "auto"


@dataclass(frozen=True)
class Point:
    """Of a pair of keeps: shares of the tokens that are sampled and trained on, and 1 + rho, true and on the driver."""

    sampled: float
    trained: float
    true: float
    driver: float

    def time(self, share: float) -> float:
        """Return the time of a step over that of a full one, `share` of which is rollout."""
        return share * self.sampled + (1 - REST - share) * self.trained + REST

    def speed_up(self, share: float, driver: bool = False) -> float:
        """Return the noise-equivalent speed-up S = 1 / ((s * sampled + t * trained)(1 + rho) + f0)."""
        return 1 / ((self.time(share) - REST) * (self.driver if driver else self.true) + REST)


@dataclass(frozen=True, eq=False)
class BothLevels:
    """A batch whose prompts are skipped by the history of an older policy, and whose completions are pruned then."""

    batch: Batch
    mode: str

    @cached_property
    def spread(self) -> Array:
        """(P,) by the history."""
        return spread_after(self.batch.previous[:, : self.batch.completions])

    @cached_property
    def magnitude(self) -> Array:
        """(n,) what the driver takes for the gradient norms."""
        return score_magnitude(self.batch.advantage, self.batch.tokens, self.batch.surprise.ravel(), self.mode)

    @cached_property
    def tokens(self) -> Array:
        """(n,) share of each completion in the response tokens."""
        return self.batch.tokens / self.batch.tokens.sum()

    def of_prompts(self, values: Array) -> Array:
        """Return (P,) sums over the completions of each prompt."""
        return np.bincount(self.batch.group, values)

    def prompt_inclusion(self, keep: float) -> Array:
        """Return pi (P,)."""
        prompts = self.spread.size
        return prompt_inclusion(self.spread, np.ones(prompts, dtype=bool), keep * prompts, min(DEFAULT_FLOOR, keep))

    def drawn(self, keep: float) -> Iterator[tuple[Array, Array]]:
        """Yield for some draws of prompts: the rows that are sampled, and the weight of each.

        The draws are independent, and use the same random numbers for every keep.
        """
        pi, rng = self.prompt_inclusion(keep), np.random.default_rng(0)
        for _ in range(PROMPT_DRAWS if keep < 1 else 1):
            rows = np.flatnonzero((rng.random(pi.size) < pi)[self.batch.group])
            yield rows, 1 / pi[self.batch.group[rows]]

    @cache  # noqa: B019 - a handful of worlds live as long as the process
    def point(self, prompt_keep: float, completion_keep: float) -> Point:
        """Return what a pair of keeps costs and adds.

        Of the draws of prompts ratios are taken: noise added by the completions over their energy, tokens trained on
        over tokens sampled. What these are divided by is known on average.
        """
        pi = self.prompt_inclusion(prompt_keep)
        norm, seen = np.diag(self.batch.gradient_gram(self.mode)), self.magnitude**2
        added, energy, trained, sampled = np.zeros(2), np.zeros(2), 0.0, 0.0
        for rows, weight in self.drawn(prompt_keep):
            inner = neyman_inclusion(self.magnitude[rows] * weight, self.batch.tokens[rows], completion_keep)
            live = inner > 0
            squares = np.array([norm[rows], seen[rows]]) * weight**2
            added += (squares[:, live] * (1 / inner[live] - 1)).sum(1)
            energy += squares[:, live].sum(1)
            trained += float((inner * self.tokens[rows]).sum())
            sampled += float(self.tokens[rows].sum())
        share = float((pi * self.of_prompts(self.tokens)).sum())
        group = np.diag(group_gram(self.batch, self.mode))
        true, driver = (
            float(((of_group / pi).sum() + ratio * (self.of_prompts(square) / pi).sum()) / of_group.sum())
            for of_group, square, ratio in (
                (group, norm * self.batch.informative, added[0] / energy[0]),
                (self.of_prompts(seen), seen, added[1] / energy[1]),
            )
        )
        return Point(share, share * trained / sampled, true, driver)

    @cached_property
    def skipping(self) -> tuple[float, list[tuple[Array, Array]]]:
        """Where the controller of prompts stands after CONTROLLED_STEPS steps, and what each step sampled on the way.

        The latter as `drawn` has it, by the fixed-size draw of a run.
        """
        rng, controller, energy = np.random.default_rng(0), PromptKeepController(), self.of_prompts(self.magnitude**2)
        steps = []
        for _ in range(CONTROLLED_STEPS):
            pi = self.prompt_inclusion(controller.keep)
            kept = draw(pi, rng)
            rows = np.flatnonzero(kept[self.batch.group])
            steps.append((rows, 1 / pi[self.batch.group[rows]]))
            controller.observe(self.spread, DEFAULT_FLOOR, "beta", kept, pi, energy[kept])
        return controller.keep, steps

    @cache  # noqa: B019
    def settle(self, share: float) -> tuple[float, float]:
        """Return where both controllers stand after CONTROLLED_STEPS steps whose times carry no noise."""
        controller = KeepController()
        prompt_keep, steps = self.skipping
        for rows, weight in steps:
            magnitude, length, keep = self.magnitude[rows] * weight, self.batch.tokens[rows], controller.keep
            trained = float((neyman_inclusion(magnitude, length, keep) * self.tokens[rows]).sum())
            if trained > 0:
                seconds = share * float(self.tokens[rows].sum()), (1 - REST - share) * trained
                controller.observe(*seconds, trained, keep, inflation_curve(magnitude, length))
        return prompt_keep, controller.keep

    def chosen(self, share: float, prompt_keep: float | str, completion_keep: float | str) -> Point:
        """Return the point of two keeps, either of which may be `auto`: as both stand when both are."""
        automatic = self.settle(share) if AUTO in (prompt_keep, completion_keep) else (1.0, 1.0)
        pair = (automatic[k] if keep == AUTO else keep for k, keep in enumerate((prompt_keep, completion_keep)))
        return self.point(*(float(keep) for keep in pair))

    def best(self, share: float, driver: bool = False) -> tuple[float, float]:
        """Return the pair of keeps with the largest S of all."""
        pairs = [(float(q), float(o)) for q in PROMPT_KEEPS for o in COMPLETION_KEEPS]
        return max(pairs, key=lambda pair: self.point(*pair).speed_up(share, driver))

    def separate(self, share: float) -> tuple[float, float]:
        """Return each level's own best keep on the driver's figures, the other level left out."""
        prompt = min(PROMPT_KEEPS, key=lambda keep: keep * self.point(float(keep), 1.0).driver)
        completion = max(COMPLETION_KEEPS, key=lambda keep: self.point(1.0, float(keep)).speed_up(share, driver=True))
        return float(prompt), float(completion)


def separability(world: BothLevels, share: float) -> float:
    """Return S at the two levels' own best keeps over the largest S of any pair, both on the driver's figures."""
    best = world.best(share, driver=True)
    apart, joint = (world.point(*pair).speed_up(share, driver=True) for pair in (world.separate(share), best))
    return apart / joint


def against_best(world: BothLevels, share: float) -> float:
    """Return the true S where the controllers stand, over the largest true S of any pair."""
    best = world.best(share)
    return world.chosen(share, AUTO, AUTO).speed_up(share) / world.point(*best).speed_up(share)


TABLE_PROMPT_KEEPS: tuple[float | str, ...] = (1.0, 0.9, 0.7, AUTO)
TABLE_COMPLETION_KEEPS: tuple[float | str, ...] = (1.0, 0.6, 0.5, AUTO)


def joint_rows(name: tuple[str, str], world: BothLevels) -> Iterator[list[str]]:
    """Yield for each rollout share where the controllers stand and where the best pair is, with the true S of both."""
    for share in ROLLOUT_SHARES:
        best = world.best(share)
        cells = [
            f"{world.point(*pair).speed_up(share):.3f} at {pair[0]:.2f} x {pair[1]:.2f}"
            for pair in (world.settle(share), best)
        ]
        ratios = separability(world, share), against_best(world, share)
        yield [*name, f"{share:g}", *cells, *(f"{ratio:.3f}" for ratio in ratios)]


def both_tables(worlds: dict[tuple[str, str], Batch]) -> str:
    """Return the tables of both levels."""
    levels = {key: BothLevels(batch, key[1]) for key, batch in worlds.items()}
    rows = [row for key, world in levels.items() for row in joint_rows(key, world)]
    head = ["data", "mode", "rollout share s", "S of both controllers", "best pair", "separate / joint", "auto / best"]
    text = ["Both levels: keep of prompts x keep of completions", table(head, rows)]
    rows = []
    for prompt_keep in TABLE_PROMPT_KEEPS:
        for completion_keep in TABLE_COMPLETION_KEEPS:
            cells = []
            for share in ROLLOUT_SHARES:
                points = [world.chosen(share, prompt_keep, completion_keep) for world in levels.values()]
                time, speed_up = (
                    np.mean(values) for values in ([p.time(share) for p in points], [p.speed_up(share) for p in points])
                )
                cells.append(f"{time:.2f} / {speed_up:.2f}")
            rows.append([str(prompt_keep), str(completion_keep), *cells])
    head = ["prompts keep", "completions keep", *(f"s = {share:g}" for share in ROLLOUT_SHARES)]
    text += ["Time of a step over GRPO's / noise-equivalent speed-up, mean over the data and modes", table(head, rows)]
    return "\n\n".join(text)


def main() -> None:
    """Print the tables of the parts that are wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=sorted(COPIES.glob("*.npz")))
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--parts", nargs="+", choices=("real", "simulated", "both"), default=["real", "both"])
    parser.add_argument("--seeds", type=int, default=2, help="of each simulated history")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    worlds = {(path.stem, mode): load(path, arguments.completions) for path in arguments.files for mode in MODES}
    sections: dict[str, Callable[[], str]] = {
        "real": lambda: real_tables(worlds),
        "simulated": lambda: simulated_tables(range(arguments.seeds)),
        "both": lambda: both_tables(worlds),
    }
    text = "\n\n".join(sections[part]() for part in arguments.parts)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
