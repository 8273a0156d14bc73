"""A packed, balanced and re-ordered step through verl's real engines: the same gradient, the planned micro-batches, and
no sequence that another one sees."""

import numpy as np
import pytest
import torch
from engine.launch import run_on_ranks
from engine.measure_packing import EACH, LOSSES, PACKED, PLANNED, SWAPPED, VERL
from engine.packed_step import CAPACITY, LENGTH, MINI_BATCH, MINI_BATCHES, ROWS, micro_batches, plain, planned

from verl_dppo.packing import PADDING
from verl_dppo.training.passes import LOG_PROB, UPDATE

PLAIN = (VERL, EACH)
LAYOUTS = {
    "fsdp2, 1 rank": ("fsdp2", 1, {}),
    "fsdp2, 2 ranks": ("fsdp2", 2, {}),
    "megatron, 2 data-parallel": ("megatron", 2, {}),
    "megatron, 2 tensor-parallel": ("megatron", 2, {"TENSOR_PARALLEL": "2"}),
    "megatron, 2 pipeline-parallel": ("megatron", 2, {"PIPELINE_PARALLEL": "2"}),
}
FSDP2 = [name for name in LAYOUTS if name.startswith("fsdp2")]
MEGATRON = [
    pytest.param(name, marks=() if "data-parallel" in name else pytest.mark.long)
    for name in LAYOUTS
    if name.startswith("megatron")
]
on_every_layout = pytest.mark.parametrize("layout", [*FSDP2, *MEGATRON])
on_megatron = pytest.mark.parametrize("layout", MEGATRON)
with_every_loss = pytest.mark.parametrize("loss", LOSSES)


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """Return a function that runs a layout once, and gives what each of its processes saw."""
    found = {}

    def run(layout):
        if layout not in found:
            found[layout] = _run(model, tmp_path_factory.mktemp("packing"), *LAYOUTS[layout])
        return found[layout]

    return run


def _run(model, results, engine, processes, environment):
    dtypes = "float64" if engine == "fsdp2" else "float64,bfloat16"
    run_on_ranks("engine.measure_packing", processes, engine, dtypes, model, results, **environment)
    return [torch.load(results / f"rank{rank}.pt") for rank in range(processes)]


def distance(one, other):
    """Return the relative error of the worst mini-batch."""
    return float(((one - other).norm(dim=1) / other.norm(dim=1)).max())


# ---- the gradient ---------------------------------------------------------------------------------------------------


@with_every_loss
@pytest.mark.parametrize("layout", FSDP2)
def test_the_gradient_of_a_planned_step_is_the_plain_one_of_one_rank(measured, layout, loss):
    plain = measured(FSDP2[0])[0]["float64"]["gradients"]
    for process in measured(layout):
        for way in (PLANNED, PACKED):
            gradient = process["float64"]["gradients"][loss, way]
            assert gradient.shape[0] == MINI_BATCHES
            for other in PLAIN:
                assert distance(gradient, plain[loss, other]) < 1e-10, (way, other)


@with_every_loss
@on_megatron
def test_on_megatron_it_is_the_plain_one_to_rounding(measured, layout, loss):
    """Each process has the parameters of its part of the model."""
    for process in measured(layout):
        gradients = process["float64"]["gradients"]
        for other in PLAIN:
            assert distance(gradients[loss, PLANNED], gradients[loss, other]) < 1e-10, other


@with_every_loss
@on_megatron
def test_in_bfloat16_it_is_to_twice_what_micro_batches_alone_change(measured, layout, loss):
    """The noise: what the plain order's gradient changes by between verl's micro-batches and one row in each."""
    for process in measured(layout):
        gradients = process["bfloat16"]["gradients"]
        noise = distance(gradients[loss, EACH], gradients[loss, VERL])
        assert 1e-4 < noise < 0.05
        for other in PLAIN:
            assert distance(gradients[loss, PLANNED], gradients[loss, other]) < 2 * noise, other


@on_every_layout
def test_two_rows_that_change_their_mini_batches_change_the_gradient(measured, layout):
    """Otherwise the tests above would let any order pass."""
    for process in measured(layout):
        gradients, loss = process["float64"]["gradients"], next(iter(LOSSES))
        assert distance(gradients[loss, SWAPPED], gradients[loss, VERL]) > 1e-2


def test_every_loss_has_a_gradient_of_its_own(measured):
    gradients = measured(FSDP2[0])[0]["float64"]["gradients"]
    assert len({round(float(gradients[loss, VERL].norm()), 6) for loss in LOSSES}) == len(LOSSES)


# ---- the micro-batches ----------------------------------------------------------------------------------------------


def ways(process):
    return [way for way in (PLANNED, PACKED) if ("log-probs", way) in process["executed"]]


@on_every_layout
def test_the_engine_updates_on_exactly_the_planned_micro_batches(measured, layout):
    for process in measured(layout):
        found = process["float64"]
        plan = micro_batches(planned(found["ranks"]), UPDATE, found["ranks"])[found["rank"]]
        for way in ways(found):
            for loss in LOSSES:
                assert found["executed"][loss, way] == plan


@on_every_layout
def test_the_engine_takes_log_probs_in_exactly_the_planned_micro_batches(measured, layout):
    for process in measured(layout):
        found = process["float64"]
        plan = micro_batches(planned(found["ranks"]), LOG_PROB, found["ranks"])[found["rank"]]
        for way in ways(found):
            assert found["executed"]["log-probs", way] == plan


@on_every_layout
def test_verl_would_have_run_others(measured, layout):
    for process in measured(layout):
        executed = process["float64"]["executed"]
        for loss in LOSSES:
            assert sorted(map(sorted, executed[loss, VERL])) != sorted(map(sorted, executed[loss, PLANNED]))


@on_every_layout
def test_what_ran_is_every_row_once_in_three_and_more_micro_batches_under_the_cap(measured, layout):
    """Said of the engine's log alone, whatever the plan says of itself."""
    processes = {process["float64"]["rank"]: process["float64"] for process in measured(layout)}
    for name, capacity in ((next(iter(LOSSES)), CAPACITY[UPDATE]), ("log-probs", CAPACITY[LOG_PROB])):
        ran = [found["executed"][name, PLANNED] for found in processes.values()]
        rows = [row for bins in ran for one in bins for row in one if row != PADDING]
        assert sorted(rows) == list(range(ROWS))
        for bins in ran:
            assert len(bins) == len(ran[0])
            assert all(sum(2 if row == PADDING else LENGTH[row] for row in one) <= capacity for one in bins)
            assert max(map(len, bins)) > 1
        if name == "log-probs":
            continue
        for bins in ran:
            mini_batches = [{int(MINI_BATCH[row]) for row in one if row != PADDING} for one in bins]
            assert all(len(one) == 1 for one in mini_batches)
            order = [one.pop() for one in mini_batches]
            assert order == sorted(order)
            assert min(np.bincount(order)) >= 3


@on_every_layout
def test_log_probs_come_back_in_the_order_of_the_rows(measured, layout):
    """They are those of the plain order with one row in each micro-batch, where verl moves nothing."""
    plain_rows = log_probs_of_rows(measured(layout), EACH)
    for way in ways(measured(layout)[0]["float64"]):
        planned_rows = log_probs_of_rows(measured(layout), way)
        assert sorted(planned_rows) == sorted(plain_rows) == list(range(ROWS))
        for row, log_probs in planned_rows.items():
            torch.testing.assert_close(log_probs, plain_rows[row], rtol=0, atol=1e-10)


def log_probs_of_rows(processes, way):
    """Return the log-probs of each row, without the last entry, which is for a token of the row that follows."""
    found = {}
    for process in (p["float64"] for p in processes):
        if process["log_probs"][way] is not None:  # else a process without outputs: the first stage of a pipeline
            order = plain(process["ranks"]) if way == EACH else planned(process["ranks"])
            rows = np.array_split(order.row, process["ranks"])[process["rank"]].tolist()
            found |= dict(zip(rows, (of[:-1] for of in process["log_probs"][way]), strict=True))
    found.pop(PADDING, None)
    return found


@on_every_layout
def test_the_worker_timed_every_mini_batch(measured, layout):
    for process in measured(layout):
        seconds = process["float64"]["seconds"]
        assert len(seconds) == MINI_BATCHES
        assert all(busy > 0 and wall > 0 for busy, wall in seconds)


# ---- attention ------------------------------------------------------------------------------------------------------


def test_no_packed_sequence_sees_another(measured):
    """Other tokens in a sequence move its own log-probs by a lot, and those of the others by not even a bit."""
    of_others, own = measured(FSDP2[0])[0]["leak"]
    assert own > 0.1
    assert of_others <= 1e-12


def test_with_position_ids_that_go_on_packed_sequences_would_see_each_other(measured):
    """The control: rotary angles are relative, so that nothing but the mask changes."""
    of_others, _ = measured(FSDP2[0])[0]["leak of a fault"]
    assert of_others > 0.1
