"""The expected gradient of every optimiser step with prompts and completions pruned: all draws enumerated, through the
trainer's own hooks and verl's real loss in float64."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from training.two_levels_run import Cell, Found, Run, enumerate_steps, every_update

from verl_dppo.pruning import plan_completions
from verl_dppo.training import completion_level
from verl_dppo.training.prompt_level import PromptLevel

BOUND = 1e-10


def passes(rows: int, seed: int = 0) -> tuple[int, ...]:
    rng = np.random.default_rng(seed)
    return tuple(int(row) for _ in range(8) for row in rng.permutation(rows))


# Each with what must occur in it. Nothing is known in the first pass, so that no prompt can be skipped there.
CELLS = {
    "refill": (
        Cell("abcd", passes(4), steps=4, batch_size=2),
        {"pruned", "probabilities that depend on earlier draws"},
    ),
    "refill, some rows alike": (
        Cell("abababcd", (0, 1, 6, 7, 2, 3, 4, 5, *passes(8)), steps=4, batch_size=2, keep=0.5),
        {"seen and unseen", "unseen below 1", "one prompt twice", "probabilities that depend on earlier draws"},
    ),
    "refill, 2 mini-batches": (
        Cell("abcdefg", passes(7), steps=4, batch_size=4, mini_batches=2, keep=0.8),
        {"uneven mini-batches", "one prompt twice"},
    ),
    "shrink": (
        Cell("abcdef", passes(6), steps=4, batch_size=4, schedule="shrink", keep=0.5),
        {"seen and unseen", "probabilities that depend on earlier draws"},
    ),
    "shrink, 2 mini-batches": (
        Cell("abcdef", passes(6), steps=4, batch_size=4, mini_batches=2, schedule="shrink", keep=0.5),
        {"pruned", "probabilities that depend on earlier draws"},
    ),
    "fewer rows than a batch": (
        Cell("abc", passes(3), steps=3, batch_size=4, mini_batches=2, schedule="shrink", keep=0.5),
        {"one prompt twice", "probabilities that depend on earlier draws"},
    ),
}
# Seven candidates of which four are kept, in two mini-batches of four and three.
LARGE = Cell("abcdefg", passes(7), steps=4, batch_size=4, mini_batches=2, keep=0.58)

each_cell = pytest.mark.parametrize("name", CELLS)
each_rule = pytest.mark.parametrize("rule", ["beta", "threshold"])


def enumerated(cell: Cell, monkeypatch, **changes) -> Found:
    found = enumerate_steps(Run(dataclasses.replace(cell, **changes), monkeypatch))
    print(found)
    assert found.compared > 1, "next to nothing has a gradient here"
    return found


@each_rule
@each_cell
def test_with_prompts_pruned_the_expected_gradient_is_that_of_all_candidates(name, rule, monkeypatch):
    cell, features = CELLS[name]
    found = enumerated(cell, monkeypatch, rule=rule, terms=True)
    assert found.error < BOUND
    if rule == "beta":
        assert features <= found.features


@pytest.mark.parametrize(
    ("name", "rule"),
    [*((name, "beta") for name in CELLS), ("refill", "threshold"), ("shrink, 2 mini-batches", "threshold")],
)
def test_with_both_levels_pruned_the_expected_gradient_is_that_of_all_candidates(name, rule, monkeypatch):
    assert enumerated(CELLS[name][0], monkeypatch, rule=rule, completions=0.5).error < BOUND


@pytest.mark.parametrize("name", ["refill", "shrink, 2 mini-batches"])
def test_also_with_kl_and_entropy_terms_where_every_completion_has_a_gradient(name, monkeypatch):
    cell = dataclasses.replace(CELLS[name][0], steps=3)
    assert enumerated(cell, monkeypatch, completions=0.5, terms=True).error < BOUND


@pytest.mark.parametrize("deal", [1])
@pytest.mark.parametrize("name", ["refill", "refill, 2 mini-batches", "shrink, 2 mini-batches"])
def test_whatever_deals_the_mini_batches_and_the_rewards(name, deal, monkeypatch):
    assert enumerated(CELLS[name][0], monkeypatch, terms=True, deal=deal).error < BOUND


def expected_second_weights(run: Run, steps: int) -> dict[bytes, np.ndarray]:
    """Return E[weights of the second mini-batch | those of the first], for each of these, after some steps."""
    node = run.start()
    for number in range(1, steps + 1):
        seed = np.random.default_rng(number)
        node = run.update(run.draw(node, number, seed), seed).node
    chance, expected = defaultdict(float), defaultdict(float)
    for probability, drawn, update in every_update(run, node, steps + 1):
        first = update.weights[0].tobytes()
        second = drawn.plan.mini_batch == 1
        chance[first] += probability
        expected[first] = expected[first] + probability * update.weights[1][second]
    assert len(chance) > 1
    return {first: expected[first] / share for first, share in chance.items()}


@pytest.mark.parametrize("schedule", ["refill", "shrink"])
def test_with_prompts_pruned_the_second_mini_batch_is_exact_whatever_the_first_one_drew(schedule, monkeypatch):
    """The parameters that it meets were moved by the first one: E[weight | weights before] = 1."""
    run = Run(dataclasses.replace(LARGE, schedule=schedule, terms=True), monkeypatch)
    for weights in expected_second_weights(run, 2).values():
        assert weights == pytest.approx(np.ones_like(weights), abs=1e-12)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("refill, 2 mini-batches", {"deal": 1}), ("shrink, 2 mini-batches", {"terms": True})],
    ids=["refill", "shrink"],
)
def test_with_both_levels_pruned_the_second_mini_batch_is_exact_whatever_the_first_one_drew(name, changes, monkeypatch):
    cell = dataclasses.replace(CELLS[name][0], completions=0.5, **changes)
    for weights in expected_second_weights(Run(cell, monkeypatch), 2).values():
        live = weights > 0  # a completion without a gradient is never drawn
        assert live.any()
        assert weights[live] == pytest.approx(np.ones(live.sum()), abs=1e-12)


def test_where_prompts_were_drawn_each_mini_batch_has_rows_and_magnitudes_of_its_own(monkeypatch):
    """Those of the first would tell which prompts were kept in the second."""
    calls = []

    def planned(*arguments, **named):
        calls.append(named["own_rows"])
        return plan_completions(*arguments, **named)

    monkeypatch.setattr(completion_level, "plan_completions", planned)
    run = Run(dataclasses.replace(CELLS["refill, 2 mini-batches"][0], completions=0.5, terms=True), monkeypatch)
    magnitude, parts = run.trainer._completions.magnitude, []

    def measured(full, part):
        found = magnitude(full, part)
        other = dataclasses.replace(full, advantage=np.where(part == 1, 3 * full.advantage, full.advantage))
        assert (found == magnitude(other, part))[part == 0].all()
        parts.append(np.unique(part).size > 1)
        return found

    run.trainer._completions.magnitude = measured
    node = run.start()
    for number in (1, 2, 3):
        seed = np.random.default_rng(number)
        drawn = run.draw(node, number, seed)
        node = run.update(drawn, seed).node
        assert calls[-1] == drawn.plan.pruned == parts[-1]
    assert len(set(calls)) == 2


@pytest.mark.long
@pytest.mark.parametrize("terms", [False, True])
@each_rule
@each_cell
def test_with_both_levels_in_every_cell(name, rule, terms, monkeypatch):
    assert enumerated(CELLS[name][0], monkeypatch, rule=rule, completions=0.5, terms=terms).error < BOUND


@pytest.mark.long
@each_rule
@pytest.mark.parametrize("schedule", ["refill", "shrink"])
@pytest.mark.parametrize("changes", [{"terms": True}, {"completions": 0.5, "steps": 3}], ids=["prompts", "both"])
def test_with_seven_candidates_in_two_mini_batches(schedule, rule, changes, monkeypatch):
    found = enumerated(LARGE, monkeypatch, schedule=schedule, rule=rule, **changes)
    assert found.error < BOUND


# ---- what is wrong shows --------------------------------------------------------------------------------------------


def change_observed(monkeypatch, change) -> None:
    """Replace some of what the prompt level says of the rows."""
    observe = PromptLevel.observe

    def changed(level, step, full, prompt, magnitude):
        of_rows, figures = observe(level, step, full, prompt, magnitude)
        return dataclasses.replace(of_rows, **change(level.submission, of_rows, full, prompt)), figures

    monkeypatch.setattr(PromptLevel, "observe", changed)


def no_prompt_weight(made, of_rows, full, prompt):
    return {"weight": np.ones_like(of_rows.weight)}


def kept_instead_of_drawn(made, of_rows, full, prompt):
    return {"drawn": np.bincount(made.mini_batch)}


def mean_instead_of_own_size(made, of_rows, full, prompt):
    return {"drawn": np.full(of_rows.drawn.size, of_rows.drawn.mean())}


def tokens_of_this_step(made, of_rows, full, prompt):
    return {"tokens_per_prompt": np.bincount(prompt, full.length).mean()}


def estimated_tokens_of_this_step(made, of_rows, full, prompt):
    tokens = np.bincount(prompt, full.length)
    return {"tokens_per_prompt": (tokens / made.pi).sum() / (1 / made.pi).sum()}


def one_weight_for_each_prompt(made, of_rows, full, prompt):
    first = {name: k for k, name in reversed(list(enumerate(made.ids)))}
    return {"weight": 1 / made.pi[[first[made.ids[k]] for k in prompt]]}


def completions_dealt_one_by_one(made, of_rows, full, prompt):
    return {"mini_batch": None}


FAULTS = {
    no_prompt_weight: "refill",
    kept_instead_of_drawn: "refill",
    mean_instead_of_own_size: "refill, 2 mini-batches",
    tokens_of_this_step: "refill",
    estimated_tokens_of_this_step: "refill",
    one_weight_for_each_prompt: "fewer rows than a batch",
    completions_dealt_one_by_one: "refill",
}


@pytest.mark.parametrize(("fault", "name"), FAULTS.items(), ids=[fault.__name__ for fault in FAULTS])
def test_the_enumeration_sees_a_fault(fault, name, monkeypatch):
    change_observed(monkeypatch, fault)
    assert enumerated(CELLS[name][0], monkeypatch, terms=True).error > 1e-3


@pytest.mark.parametrize("schedule", ["refill", "shrink"])
def test_the_enumeration_sees_no_prompt_weight_in_either_schedule_with_both_levels(schedule, monkeypatch):
    change_observed(monkeypatch, no_prompt_weight)
    steps = 4 if schedule == "refill" else 3
    assert enumerated(CELLS[schedule][0], monkeypatch, completions=0.5, steps=steps).error > 1e-3


def test_the_enumeration_sees_probabilities_from_before_they_were_solved_for_the_size(monkeypatch):
    next_batch = PromptLevel.next_batch

    def changed(level, full, deal, sample):
        batch = next_batch(level, full, deal, sample)
        made, settings = level.submission, level.settings
        pi = level.history.inclusion(made.ids, made.keep, settings.floor, settings.rule)
        level.submission = dataclasses.replace(made, pi=pi)
        return batch

    monkeypatch.setattr(PromptLevel, "next_batch", changed)
    assert enumerated(CELLS["refill"][0], monkeypatch, terms=True).error > 1e-3
