"""Fifty passes of a simulated run: no prompt is lost, and each is kept as often as its recorded probabilities say."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import count, product
from statistics import NormalDist

import numpy as np
import pytest
from pruning.pivotal_tree import pivotal_tree

from verl_dppo.pruning import PromptHistory, PromptStream, candidates, plan_prompts, shrunk_size
from verl_dppo.pruning import prompts as prompts_module
from verl_dppo.pruning.prompts import PROMPT_RULES, SCHEDULES

PASSES, ROWS, BATCH, GROUP, FLOOR = 50, 203, 16, 8, 0.1
MINI_BATCHES_AND_WARMUP = ((1, 1), (2, 3))
CELLS = [(*names, *numbers) for names in product(SCHEDULES, PROMPT_RULES) for numbers in MINI_BATCHES_AND_WARMUP]
ERROR = 1e-3 / len(CELLS)
"""Chance with which a sound draw fails a test of one cell."""


@dataclass
class Record:
    """What a run leaves.

    Attributes:
        rows: of each draw, in the order of the stream.
        steps, pi, kept: of each draw.
        weight_z: standardised sum of kept / pi over all draws, less their number.
        tilt_z: standardised sum of (kept - pi) log pi: whether large probabilities are exceeded and small ones not met.
        features: what occurred.
    """

    rows: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    pi: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    weight_z: float = 0.0
    tilt_z: float = 0.0
    features: set[str] = field(default_factory=set)


def pivotal_moments(pi, value) -> tuple[float, float]:
    """Return mean and variance of the sum of `value` over an ordered pivotal sample, from the design's definition.

    Of each possible champion the probability and the first two moments of what is kept so far are carried along.
    """
    certain = pi >= 1
    fixed, p, x = float(value[certain].sum()), pi[~certain], value[~certain]
    if p.size == 0:
        return fixed, 0.0
    a, moments = p[0], np.array([[1.0, 0.0, 0.0]])
    for challenger, b in enumerate(p[1:].tolist(), start=1):
        total = a + b
        if total < 1 - 1e-9:
            stays, leaves = a / total * moments, b / total * moments
            a = total
        else:
            stays = (1 - a) / (2 - total) * with_kept(moments, x[challenger])
            leaves = (1 - b) / (2 - total) * with_kept(moments, x[:challenger])
            a = total - 1
        moments = np.vstack([stays, leaves.sum(axis=0)])
    _, first, second = (a * with_kept(moments, x) + (1 - a) * moments).sum(axis=0)
    return fixed + first, second - first**2


def with_kept(moments, x) -> np.ndarray:
    """Return (k, 3) probability and moments of sums to which x is added."""
    p, first, second = moments.T
    return np.column_stack([p, first + x * p, second + 2 * x * first + x * x * p])


@cache
def simulated(schedule: str, rule: str, mini_batches: int, warmup: int, fault: str = "") -> Record:
    """Run until every row was drawn PASSES times, the history being all that the draws depend on."""
    number = CELLS.index((schedule, rule, mini_batches, warmup))
    rng = np.random.default_rng([7, number])
    # Every tenth row asks what the one before it does.
    names = [str(row - (row % 10 == 9)) for row in range(ROWS)]
    # Many pass rates are near 0 or 1.
    rate = rng.beta(0.5, 0.5, ROWS)
    history, stream = PromptHistory(0.95), PromptStream(ROWS, lambda: rng.permutation(ROWS))
    record, keep = Record(), 0.5
    sums = {"weight": [0.0, 0.0], "tilt": [0.0, 0.0]}
    for step in count():
        if stream.position >= PASSES * ROWS:
            break
        known_share = float((history.visits([names[row] for row in stream.to_come()]) >= warmup).mean())
        drawn = candidates(BATCH, keep, known_share, mini_batches, FLOOR) if schedule == "refill" else BATCH
        rows = stream.take(drawn)
        ids = [names[row] for row in rows]
        known = history.visits(ids) >= warmup
        size = BATCH // mini_batches if schedule == "refill" else shrunk_size(known, keep, mini_batches, FLOOR)
        order = np.lexsort((np.arange(drawn), history.mean(ids), known))
        plan = plan_prompts(history.spread(ids), known, order, mini_batches, size, FLOOR, rule, rng, rng)
        note(record, sums, plan, order, known, rows, ids, step)
        kept = np.flatnonzero(plan.kept)
        p = rate[[int(ids[k]) for k in kept]]
        history.observe([ids[k] for k in kept], (rng.random((kept.size, GROUP)) < p[:, None]).astype(float), step)
        rate = np.clip(rate + 0.01 * rng.normal(size=ROWS), 0.0, 1.0)
    record.weight_z, record.tilt_z = (total / variance**0.5 for total, variance in sums.values())
    return record


def note(record, sums, plan, order, known, rows, ids, step) -> None:
    record.rows += rows.tolist()
    record.steps += [step] * rows.size
    record.pi += plan.pi.tolist()
    record.kept += plan.kept.tolist()
    if known.any() and not known.all():
        record.features.add("seen and unseen")
    if len(set(ids)) < len(ids):
        record.features.add("one prompt twice")
    if not known.any():
        record.features.add("warm-up")
    for k in range(plan.drawn.size):
        mine = order[plan.mini_batch[order] == k]
        pi, kept = plan.pi[mine], plan.kept[mine]
        for name, value in (("weight", 1 / pi), ("tilt", np.log(pi))):
            mean, variance = pivotal_moments(pi, value)
            assert mean == pytest.approx(float((pi * value).sum()), abs=1e-9)
            sums[name][0] += float(value[kept].sum()) - mean
            sums[name][1] += variance


def tail(pi: np.ndarray, times: int) -> float:
    """Return the two-sided p-value of so many successes: the Poisson-binomial distribution, term by term.

    It takes the probabilities for given. Later ones depend a little on earlier draws, by what history learnt of them,
    which is why `evidence` stands beside it.
    """
    mass = np.array([1.0])
    for p in pi:
        mass = np.append(mass * (1 - p), 0.0) + np.append(0.0, mass * p)
    return min(1.0, 2 * min(mass[: times + 1].sum(), mass[times:].sum()))


def evidence(pi: np.ndarray, kept: np.ndarray) -> float:
    """Return a bound on the p-value that holds although later probabilities depend on earlier draws.

    exp(s * kept) / (1 - pi + pi exp(s)) has mean 1 whatever came before, for any s. So has the product over all draws,
    and the mean of that over several s; and what has mean 1 exceeds 1 / p with probability p at most (Markov).
    """
    tilts = np.array([-1.5, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 1.5])
    logs = [(s * kept - np.log1p(pi * np.expm1(s))).sum() for s in tilts]
    return float(min(1.0, 1 / np.exp(logs).mean()))


def smallest_p(record: Record, p_value) -> float:
    """Return the smallest p-value of any row, times their number; a row's second draw in a step counts for another."""
    groups, seen = defaultdict(list), set()
    for k, (row, step) in enumerate(zip(record.rows, record.steps, strict=True)):
        groups[row, (row, step) in seen].append(k)
        seen.add((row, step))
    pi, kept = np.array(record.pi), np.array(record.kept)
    return len(groups) * min(p_value(pi[own], kept[own]) for own in groups.values())


def of_poisson_binomial(pi, kept) -> float:
    return tail(pi, int(kept.sum()))


def too_far(z: float) -> bool:
    return abs(z) > NormalDist().inv_cdf(1 - ERROR / 2)


each_cell = pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))


@each_cell
def test_every_row_is_drawn_once_in_every_pass(cell):
    record = simulated(*cell)
    assert ROWS % BATCH
    for start in range(0, PASSES * ROWS, ROWS):
        assert sorted(record.rows[start : start + ROWS]) == list(range(ROWS))
    assert record.features == {"warm-up", "seen and unseen", "one prompt twice"}
    assert 0.4 < np.mean(record.kept) < 0.65


@each_cell
def test_every_row_is_kept_as_often_as_its_recorded_probabilities_say(cell):
    record = simulated(*cell)
    print(cell, smallest_p(record, of_poisson_binomial), smallest_p(record, evidence))
    assert smallest_p(record, of_poisson_binomial) > ERROR
    assert smallest_p(record, evidence) > ERROR


@each_cell
def test_all_weights_together_make_up_for_all_that_was_drawn(cell):
    """Sums over all draws against their exact variance, which the fixed size of each draw makes small."""
    record = simulated(*cell)
    weights = np.array(record.kept) / np.array(record.pi)
    print(cell, record.weight_z, record.tilt_z, weights.sum() / len(record.rows))
    assert not too_far(record.weight_z)
    assert not too_far(record.tilt_z)


def test_the_moments_of_the_pivotal_design_are_those_of_its_tree():
    pi, value = np.array([0.3, 0.9, 1.0, 0.6, 0.25, 0.45, 0.5]), np.array([3.0, -1.0, 2.0, 0.5, 4.0, 1.0, -2.0])
    outcomes = [(p, value[sorted(kept)].sum()) for p, kept in pivotal_tree(pi)]
    mean = sum(p * x for p, x in outcomes)
    assert pivotal_moments(pi, value) == pytest.approx((mean, sum(p * (x - mean) ** 2 for p, x in outcomes)))


def test_the_tail_is_the_binomial_one_where_all_probabilities_are_alike():
    assert tail(np.full(4, 0.5), 4) == pytest.approx(2 / 16)
    assert tail(np.full(4, 0.5), 2) == 1


class TestAFaultyDrawShows:
    """The draw follows other probabilities than those that are recorded, of the same sum."""

    def record(self, monkeypatch, change) -> Record:
        draw = prompts_module.draw
        monkeypatch.setattr(prompts_module, "draw", lambda pi, rng: draw(change(pi), rng))
        return simulated.__wrapped__(*CELLS[0])

    def test_a_power_of_the_probability(self, monkeypatch):
        def power(pi):
            return prompts_module.proportional_inclusion(pi**0.9, float(pi.sum()), 1e-9)

        record = self.record(monkeypatch, power)
        print(record.weight_z, record.tilt_z)
        assert too_far(record.tilt_z)

    def test_the_largest_are_kept(self, monkeypatch):
        def largest(pi):
            kept = np.zeros(pi.size)
            kept[np.argsort(-pi, kind="stable")[: round(pi.sum())]] = 1.0
            return kept

        record = self.record(monkeypatch, largest)
        print(record.weight_z, record.tilt_z, smallest_p(record, of_poisson_binomial), smallest_p(record, evidence))
        assert smallest_p(record, of_poisson_binomial) < ERROR
        assert smallest_p(record, evidence) < ERROR
        assert too_far(record.weight_z)

    def test_all_are_kept_alike(self, monkeypatch):
        record = self.record(monkeypatch, lambda pi: np.full(pi.size, pi.mean()))
        print(record.weight_z, record.tilt_z, smallest_p(record, of_poisson_binomial), smallest_p(record, evidence))
        assert smallest_p(record, of_poisson_binomial) < ERROR
        assert too_far(record.weight_z)
