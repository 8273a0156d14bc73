"""Pruning is unbiased and varies as its design says: many draws from one batch, through verl's real entry point.

The learning rate is 0 and every step has the same prompts and completions, so that steps differ in nothing but the
draw. The last step trains on the full batch by verl's own code, row by row: it gives the gradient that the others must
have on average, and the gradients of single completions, from which their variance follows. Bounds come from drawing
again, thousands of times, from the probabilities that the trainer used.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.conftest import DPPO, PROMPTS

from verl_dppo.cpu.demo.task import problems, to_row
from verl_dppo.pruning import plan_completions

# A step takes a second or two, the start a minute: pivotal-24 takes two minutes, each of the others eight.
pytestmark = [pytest.mark.end_to_end, pytest.mark.long]

SHORT, LONG = 24, 256
DESIGNS = ("poisson", "pivotal", "cube")
DIRECTIONS = 32
SIMULATED_DRAWS, SIMULATED_RUNS = 20_000, 10_000
FALSE_ALARM = 1e-3
BONFERRONI = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * DIRECTIONS * len(DESIGNS)))


@dataclass(frozen=True)
class Figures:
    """How the gradients of a run lie about that of the full batch."""

    z: np.ndarray
    """(32,) mean less the full batch's, along each direction, in standard errors."""
    bias: float
    """Squared distance of the mean from the full batch's, over what chance leaves of it: the variance / steps."""
    spread: float
    """Sample variance, the trace of the covariance, over the variance."""


def figures(projections, square, mean_square, distance_square, full_projections, variance):
    steps = len(square)
    standard_error = projections.std(axis=0, ddof=1) / sqrt(steps)
    return Figures(
        z=(projections.mean(axis=0) - full_projections) / standard_error,
        bias=distance_square / (variance / steps),
        spread=(square.sum() - steps * mean_square) / (steps - 1) / variance,
    )


@dataclass(frozen=True)
class Sample:
    """Repeated draws from the n completions of one batch."""

    arguments: dict
    """Of `plan_completions`, the generator apart."""
    pi: np.ndarray
    """(n,)"""
    weight: np.ndarray
    """(steps, n) as planned."""
    sequences: list
    """(n,) tuples of tokens, prompt and response."""
    projections: np.ndarray
    """(steps, 32) of the gradients."""
    square: np.ndarray
    """(steps,) squared norms of the gradients."""
    mean: np.ndarray
    """(parameters,) mean gradient."""
    full: np.ndarray
    """(parameters,) gradient of the full batch, by verl's own code."""
    gram: np.ndarray
    """(n, n) inner products of the completions' gradients, which sum to `full`."""
    row_projections: np.ndarray
    """(n, 32) of the completions' gradients."""
    run: object

    def square_of(self, weight):
        """Squared norms of sums of the completions' gradients: (..., n) weights to (...,)."""
        return np.einsum("...i,...i", weight @ self.gram, weight)

    @cached_property
    def simulated_weight(self):
        rng = np.random.default_rng(0)
        return np.array([plan_completions(rng=rng, **self.arguments).weight for _ in range(SIMULATED_DRAWS)])

    @cached_property
    def variance(self):
        """E ||gradient - full||^2, in closed form for independent draws and simulated for the other designs."""
        if self.arguments["design"] == "poisson":
            live = self.pi > 0
            return float(((1 / self.pi[live] - 1) * self.gram.diagonal()[live]).sum())
        return float(self.square_of(self.simulated_weight - 1).mean())

    @cached_property
    def measured(self):
        """Figures of the gradients that the run computed."""
        distance = self.mean - self.full
        return figures(
            self.projections,
            self.square,
            self.mean @ self.mean,
            distance @ distance,
            self.full_projections,
            self.variance,
        )

    @property
    def full_projections(self):
        return self.row_projections.sum(axis=0)

    def figures_of(self, weight, projections=None, square=None):
        """Figures of a run whose gradients are sums of the completions' with (steps, n) weights."""
        mean = weight.mean(axis=0)
        return figures(
            weight @ self.row_projections if projections is None else projections,
            self.square_of(weight) if square is None else square,
            self.square_of(mean),
            self.square_of(mean - 1),
            self.full_projections,
            self.variance,
        )

    @cached_property
    def bounds(self):
        """Between what two values largest |z|, bias and spread lie in all but 2 of 1000 runs of this length."""
        rng = np.random.default_rng(1)
        projections, square = self.simulated_weight @ self.row_projections, self.square_of(self.simulated_weight)
        runs = []
        for _ in range(SIMULATED_RUNS):
            pick = rng.integers(SIMULATED_DRAWS, size=len(self.square))
            run = self.figures_of(self.simulated_weight[pick], projections[pick], square[pick])
            runs.append((np.abs(run.z).max(), run.bias, run.spread))
        quantiles = np.quantile(runs, [FALSE_ALARM, 1 - FALSE_ALARM], axis=0).T
        return dict(zip(("z", "bias", "spread"), quantiles, strict=True))


def by_place(sequences, wanted):
    """Return for each of the wanted sequences its index in `sequences`; equal ones are taken in turn."""
    places = {}
    for index, sequence in enumerate(sequences):
        places.setdefault(sequence, []).append(index)
    return np.array([places[sequence].pop(0) for sequence in wanted])


def sample(verl_run, folder, design, steps):
    """Train `steps` times on a sample of one and the same batch, and once on all of it."""
    # Short answers, of which the policy gets some right: most groups have a gradient, and steps are quick.
    entries = islice(problems("train", 0, max_terms=4), PROMPTS)
    rows = [to_row(entry, "train", index) for index, entry in enumerate(entries)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_REPEAT", "1")
        patch.setenv("TEST_PLANS", str(folder / "plans.jsonl"))
        patch.setenv("TEST_GRADIENTS", str(folder))
        run = verl_run(
            *DPPO,
            f"algorithm.dppo.completion.design={design}",
            "algorithm.dppo.completion.keep=0.5",
            "algorithm.dppo.completion.probe_every=null",
            "algorithm.dppo.prompt.enable=false",  # the same eight prompts in every step
            f"algorithm.dppo.anneal_fraction={1 / (steps + 1)}",
            "actor_rollout_ref.actor.optim.lr=0",
            "actor_rollout_ref.actor.optim.weight_decay=0",
            f"data.train_files={folder / 'train.parquet'}",
            "data.shuffle=false",
            f"trainer.total_epochs={steps + 1}",
            steps=steps + 1,
            folder=folder,
        )
    plans, gradients = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("plans", "gradients")
    )
    assert len(plans) == len(gradients) == steps
    first = plans[0]
    for plan in plans:
        assert all(plan[name] == first[name] for name in ("sequences", "arguments", "pi")), "steps differ"
    sequences = [tuple(sequence) for sequence in first["sequences"]]
    full = np.load(folder / "full.npz")
    row = by_place([tuple(sequence) for sequence in json.loads((folder / "full.json").read_text())], sequences)
    return Sample(
        arguments={k: np.array(v) if isinstance(v, list) else v for k, v in first["arguments"].items()},
        pi=np.array(first["pi"]),
        weight=np.array([plan["weight"] for plan in plans]),
        sequences=sequences,
        projections=np.array([line["projections"] for line in gradients]),
        square=np.array([line["square"] for line in gradients]),
        mean=np.load(folder / "sum.npy") / steps,
        full=full["full"],
        gram=full["gram"][np.ix_(row, row)],
        row_projections=full["projections"][row],
        run=run,
    )


@pytest.fixture(
    scope="module",
    params=[("pivotal", SHORT), *((design, LONG) for design in DESIGNS)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def drawn(request, verl_run, tmp_path_factory):
    design, steps = request.param
    return sample(verl_run, tmp_path_factory.mktemp(design), design, steps)


def test_the_parameters_do_not_move(drawn):
    assert len(drawn.run.updates) == len(drawn.weight) + 1
    assert len({update["hash"] for update in drawn.run.updates}) == 1


def test_the_mean_gradient_is_that_of_the_full_batch(drawn):
    largest_z, (low, high) = np.abs(drawn.measured.z).max(), drawn.bounds["bias"]
    assert low < drawn.measured.bias < high
    assert largest_z < drawn.bounds["z"][1]
    if len(drawn.weight) >= LONG:
        assert largest_z < BONFERRONI


def test_the_sample_variance_is_that_of_the_design(drawn):
    low, high = drawn.bounds["spread"]
    assert low < drawn.measured.spread < high


def test_every_gradient_is_the_weighted_sum_of_those_of_the_completions(drawn):
    """Not on average but each, which the simulated runs take for granted."""
    expected = drawn.weight @ drawn.row_projections
    assert np.abs(drawn.projections - expected).max() < 1e-4 * np.abs(expected).max()
    assert drawn.square == pytest.approx(drawn.square_of(drawn.weight), rel=1e-4)


def test_the_planned_weights_reach_the_loss(drawn):
    lines = iter(drawn.run.rows)
    for weight, metrics in zip(drawn.weight, drawn.run.metrics[:-1], strict=True):
        rows = list(islice(lines, int(metrics["dppo/rows_per_mini_batch"])))
        arrived = [(tuple(row["sequence"]), row["weight"]) for row in rows if row["weight"]]
        planned = [(drawn.sequences[i], weight[i]) for i in np.flatnonzero(weight)]
        assert sorted(arrived) == sorted(planned)
    assert next(lines, None) is None


def binomial_tails(times, steps, pi):
    """Return the probabilities of being kept at most, and at least, so many times."""
    probability = np.array([comb(steps, k) * pi**k * (1 - pi) ** (steps - k) for k in range(steps + 1)])
    return probability[: times + 1].sum(), probability[times:].sum()


def test_the_weight_of_each_completion_is_1_on_average(drawn):
    """It is kept as often as its probability says, by the binomial distribution, and then weighs 1 / pi."""
    times = (drawn.weight > 0).sum(axis=0)
    for kept, total, pi in zip(times, drawn.weight.sum(axis=0), drawn.pi, strict=True):
        assert total == pytest.approx(kept / pi if pi else 0)
        assert min(binomial_tails(int(kept), len(drawn.weight), pi)) > FALSE_ALARM / (2 * len(times))


FAULTS = {
    "all weights 10 % too large": lambda weight, length: 1.1 * weight,
    "no weights": lambda weight, length: (weight > 0).astype(float),
    "the tokens of the kept rows as denominator": lambda weight, length: (
        weight * length.sum() / ((weight > 0) @ length)[:, None]
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(drawn, fault):
    """The same draws with other weights; their gradients follow from those of the completions."""
    wrong = drawn.figures_of(FAULTS[fault](drawn.weight, drawn.arguments["length"]))
    assert np.abs(wrong.z).max() > drawn.bounds["z"][1]
    assert wrong.bias > drawn.bounds["bias"][1]
