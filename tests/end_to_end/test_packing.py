"""Balanced and packed runs through verl's real entry point: workers run the micro-batches that the driver planned."""

import json
from itertools import chain, groupby

import numpy as np
import pytest
from end_to_end.conftest import DPPO, PROMPTS, PRUNED

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.platform import share_of_cores
from verl_dppo.packing import SequenceCost

pytestmark = pytest.mark.end_to_end

ACTOR, ROLLOUT, REFERENCE = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
NO_PRUNING = (*DPPO, "algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false")
MINI_BATCHES = 4
FOUR_MINI_BATCHES = f"{ACTOR}.ppo_mini_batch_size={PROMPTS // MINI_BATCHES}"
# Other limits in each pass, so that none can be taken for another.
LIMITS = {"update": 400, "log_prob": 600, "reference": 500}
TWO_RANKS = (
    "trainer.n_gpus_per_node=2",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu={LIMITS['update']}",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu={LIMITS['log_prob']}",
    f"{REFERENCE}.log_prob_max_token_len_per_gpu={LIMITS['reference']}",
)


def watched(verl_run, folder, *overrides, steps):
    """Return a run on two ranks, its orders as the driver wrote them down, and what each rank ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_ORDERS", str(folder / "orders.jsonl"))
        patch.setenv("TEST_BATCHES", str(folder / "batches.jsonl"))
        run = verl_run(*TWO_RANKS, *overrides, steps=steps, folder=folder)
    orders, lines = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("orders.jsonl", "batches.jsonl")
    )
    return run, orders, [[line for line in lines if line["rank"] == rank] for rank in range(2)]


def planned(order, name, rank):
    """Return [mini-batch][micro-batch][row] that a rank is to run in a pass."""
    rows = len(order["after"]) // order["ranks"]
    mine = range(rank * rows, (rank + 1) * rows)
    places = [(*divmod(order["plans"][name][place], 1 << 32), order["after"][place]) for place in mine]
    assert places == sorted(places, key=lambda place: place[0]), "mini-batches are not side by side"
    of_mini_batches = [list(of_one) for _, of_one in groupby(places, key=lambda place: place[0])]
    return [
        [[row for _, micro, row in of_one if micro == k] for k in range(1 + max(micro for _, micro, _ in of_one))]
        for of_one in of_mini_batches
    ]


def passes_of_steps(lines):
    """Return for each step its passes over the rows: [mini-batch][micro-batch][row] of each."""
    found = []
    for kind, of_kind in groupby(lines, key=lambda line: line["pass"]):
        micro_batches = [line["micro_batches"] for line in of_kind]
        if kind == "update":
            found[-1]["update"] = micro_batches
        else:
            old, reference = micro_batches
            found.append({"log_prob": [old], "reference": [reference]})
    return found


def assert_workers_ran_the_plans(orders, ranks, steps):
    assert len(orders) == steps
    for rank, lines in enumerate(ranks):
        ran = passes_of_steps(lines)
        assert len(ran) == steps
        for order, of_step in zip(orders, ran, strict=True):
            assert set(order["plans"]) == set(LIMITS)
            for name, limit in LIMITS.items():
                assert of_step[name] == planned(order, name, rank), name
                tokens = [sum(length for _, length in rows) for one in of_step[name] for rows in one]
                assert max(tokens) <= limit
                assert len(tokens) > len(of_step[name]), "each was one micro-batch: the test is empty"


def makespan_over_mean(cost_of_ranks):
    cost = np.array(cost_of_ranks)
    return cost.max(axis=0).sum() / cost.mean(axis=0).sum()


@pytest.fixture(scope="module")
def balanced(verl_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    return watched(verl_run, folder, *NO_PRUNING, FOUR_MINI_BATCHES, steps=2)


def test_without_pruning_a_run_trains_and_reports_its_balance_and_density(balanced):
    run, _, _ = balanced
    assert len(run.updates) == 2 * MINI_BATCHES == len({update["hash"] for update in run.updates})
    expected = {
        *(f"balance/{unit}_{kind}" for unit in ("mini_batch", "micro_step") for kind in ("cost", "tokens")),
        "balance/measured",
        "packing/density",
        "packing/micro_batches",
        "packing/padding_rows",
    }
    if share_of_cores(2) == 1:
        expected.add("balance/waited")
    for metrics in run.metrics:
        reported = {name.removeprefix("dppo/"): m for name, m in metrics.items() if name.startswith("dppo/")}
        assert set(reported) == expected, "a switched-off level reports something, or a figure is missing"
        assert all(m >= 1 for name, m in reported.items() if name.startswith("balance/") and "waited" not in name)
        assert 0 < reported["packing/density"] <= 1
        assert 0 < reported.get("balance/waited", 0.5) < 1
        assert reported["packing/padding_rows"] == 0


def test_workers_run_exactly_the_planned_micro_batches_in_every_pass(balanced):
    _, orders, ranks = balanced
    assert_workers_ran_the_plans(orders, ranks, steps=2)


def test_mini_batches_keep_their_rows_and_are_better_balanced_than_in_verls_order(balanced):
    """Over the rows that each rank ran in each mini-batch, against an even split of the order before."""
    run, orders, ranks = balanced
    cost = SequenceCost.from_config(json.loads((MODEL_FOLDER / "config.json").read_text()))
    ran = [[of_step["update"] for of_step in passes_of_steps(lines)] for lines in ranks]
    for step, (order, metrics) in enumerate(zip(orders, run.metrics, strict=True)):
        rows = [[list(chain.from_iterable(micro_batches)) for micro_batches in of_rank[step]] for of_rank in ran]
        before = np.array_split(np.arange(len(order["before"])), 2 * MINI_BATCHES)
        of_verl = [[order["before"][place] for place in places] for places in before]
        of_verl = [of_verl[:MINI_BATCHES], of_verl[MINI_BATCHES:]]
        for k in range(MINI_BATCHES):
            assert sorted(rows[0][k] + rows[1][k]) == sorted(of_verl[0][k] + of_verl[1][k])
        ours, theirs = (
            makespan_over_mean([[cost([length for _, length in cell]).sum() for cell in of_rank] for of_rank in cells])
            for cells in (rows, of_verl)
        )
        assert ours == pytest.approx(metrics["dppo/balance/mini_batch_cost"])
        assert ours - 1 < (theirs - 1) / 2


@pytest.mark.long
def test_workers_run_exactly_the_planned_micro_batches_of_a_pruned_batch(verl_run, tmp_path):
    run, orders, ranks = watched(verl_run, tmp_path, *PRUNED, steps=3)
    assert all(metrics["dppo/kept_fraction"] < 1 for metrics in run.metrics)
    assert_workers_ran_the_plans(orders, ranks, steps=3)
    for order, metrics in zip(orders, run.metrics, strict=True):
        assert len(order["before"]) == metrics["dppo/kept_completions"] + metrics["dppo/padding_rows"]
        assert len(order["after"]) == metrics["dppo/kept_completions"] + metrics["dppo/packing/padding_rows"]


@pytest.fixture(scope="module")
def on_one_rank(verl_run, tmp_path_factory):
    """Stock GRPO with verl's own micro-batches, and the same rollouts packed, with a checkpoint after step 2."""
    folder = tmp_path_factory.mktemp("one-rank")
    limits = (FOUR_MINI_BATCHES, f"{ACTOR}.ppo_max_token_len_per_gpu=600")
    rollouts = folder / "rollouts.jsonl"
    stock = verl_run(*limits, record=rollouts)
    packed = verl_run(*NO_PRUNING, *limits, "trainer.save_freq=2", folder=folder, replay=rollouts)
    return stock, packed, limits, rollouts


@pytest.mark.long
def test_packing_leaves_losses_and_gradient_norms_of_stock_grpo(on_one_rank):
    stock, packed, _, _ = on_one_rank
    assert len(packed.updates) == len(stock.updates) == 3 * MINI_BATCHES
    for ours, theirs in zip(packed.updates, stock.updates, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
    for ours, theirs in zip(packed.metrics, stock.metrics, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.mark.long
def test_a_resumed_packed_run_continues_to_the_bit(on_one_rank, verl_run):
    _, packed, limits, rollouts = on_one_rank
    resume = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={packed.folder / 'checkpoints' / 'global_step_2'}",
    )
    run = verl_run(*NO_PRUNING, *limits, *resume, replay=rollouts)
    assert [metrics["training/global_step"] for metrics in run.metrics] == [3]
    assert run.updates == packed.updates[2 * MINI_BATCHES :]
    measured = ("dppo/balance/measured", "dppo/balance/waited")
    reported = {name: m for name, m in run.metrics[0].items() if name.startswith("dppo/") and name not in measured}
    assert reported == {name: packed.metrics[2][name] for name in reported}
