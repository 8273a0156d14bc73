"""The function that stands in verl's place for cutting micro-batches, and what of verl it stands on."""

import ast
import inspect
import multiprocessing
import queue
import textwrap
from functools import wraps
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import verl
from tensordict import TensorDict
from training.fake_queue import jagged
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.workers.engine import utils as engine_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_dppo.training import micro_batches, worker
from verl_dppo.training.micro_batches import COLUMNS, FOLLOWED, encode, install_planned_micro_batches
from verl_dppo.training.passes import UPDATE

COLUMN = COLUMNS[UPDATE]
ENGINES = Path(verl.__file__).parent / "workers" / "engine"
LENGTH = [5, 3, 8, 2, 4, 6]
PLAN = [2, 0, 1, 2, 0, 1]
BINS = [[1, 4], [2, 5], [0, 3]]
CAP = 14


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Put the function in its place, and verl's back after each test."""
    monkeypatch.setattr(engine_utils, "rearrange_micro_batches", seqlen_balancing.rearrange_micro_batches)
    install_planned_micro_batches()
    return engine_utils.rearrange_micro_batches


def batch(plan=PLAN, mini_batch=3, length=LENGTH, cap=CAP, nested=True, **non_tensors):
    """Rows of tokens that are all different, with the plan in its column and named as the one to follow."""
    tokens = torch.arange(sum(length)).split(list(length))
    columns = {"row": torch.arange(len(length))}
    if nested:
        columns["input_ids"] = jagged(tokens)
    else:
        columns["attention_mask"] = torch.tensor([[1] * n + [0] * (max(length) - n) for n in length])
        columns["input_ids"] = columns["attention_mask"] * 9
    if plan is not None:
        columns[COLUMN] = encode(np.broadcast_to(mini_batch, len(plan)), np.array(plan))
    data = TensorDict(columns, batch_size=[len(length)])
    tu.assign_non_tensor(
        data, **{FOLLOWED: COLUMN, "max_token_len_per_gpu": cap, "use_dynamic_bsz": True, **non_tensors}
    )
    return data


# ---- following ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [True, False])
def test_micro_batches_are_the_planned_ones_in_their_order_and_say_where_rows_came_from(nested):
    made, indices = engine_utils.prepare_micro_batches(batch(nested=nested))
    assert indices == BINS
    assert [one["row"].tolist() for one in made] == BINS
    if nested:
        tokens = torch.arange(sum(LENGTH)).split(LENGTH)
        for one, rows in zip(made, BINS, strict=True):
            assert [t.tolist() for t in one["input_ids"].unbind()] == [tokens[row].tolist() for row in rows]


def test_what_verl_hands_to_the_engine_besides_rows_reaches_every_micro_batch():
    made, _ = engine_utils.prepare_micro_batches(batch(temperature=0.7))
    assert [tu.get_non_tensor_data(one, "temperature", None) for one in made] == [0.7] * len(BINS)


def test_outputs_return_to_the_order_of_the_rows():
    made, indices = engine_utils.prepare_micro_batches(batch())
    outputs = jagged([row for one in made for row in one["input_ids"].unbind()])
    restored = seqlen_balancing.restore_dynamic_batch(outputs, indices)
    assert torch.equal(restored.values(), torch.arange(sum(LENGTH)))


def test_a_micro_batch_may_be_as_large_as_the_cap_over_all_devices_of_a_sequence():
    _, indices = engine_utils.prepare_micro_batches(batch(cap=7, sp_size=2))
    assert indices == BINS


def test_as_many_as_the_pipeline_needs_are_run():
    _, indices = engine_utils.rearrange_micro_batches(batch(), CAP, num_batches_divided_by=3)
    assert indices == BINS


# ---- not following --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_without_a_column_to_follow_micro_batches_are_verls(named):
    plain = batch(**{FOLLOWED: None})
    if not named:
        tu.pop(plain, FOLLOWED)
    expected, expected_indices = seqlen_balancing.rearrange_micro_batches(batch(), CAP)
    assert expected_indices != BINS
    made, indices = engine_utils.prepare_micro_batches(plain)
    assert indices == expected_indices
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one["input_ids"].values(), other["input_ids"].values())


@pytest.mark.parametrize("by_name", [True, False])
def test_verl_then_gets_every_argument(by_name):
    seen = []

    def of_verl(*args, **kwargs):
        seen.append(inspect.signature(seqlen_balancing.rearrange_micro_batches).bind(*args, **kwargs).arguments)
        return "what verl returns"

    ours = micro_batches._planned(of_verl)
    values = [batch(**{FOLLOWED: None}), 11, "group", 4, False, 2, False, 3]
    given = dict(zip(inspect.signature(ours).parameters, values, strict=True))
    assert (ours(**given) if by_name else ours(*values)) == "what verl returns"
    assert seen == [given]


# ---- faults ---------------------------------------------------------------------------------------------------------


FAULTS = {
    "two mini-batches": ({"mini_batch": [0, 0, 0, 1, 0, 0]}, {}, r"rows of mini-batches \[0, 1\] came together"),
    "an empty micro-batch": ({"plan": [3, 0, 1, 3, 0, 1]}, {}, r"4 micro-batches, of which some are empty"),
    "far more than rows": ({"plan": [9**9, 0, 1, 2, 0, 1]}, {}, r"387420490 micro-batches, of which some are empty"),
    "above the cap": ({"cap": 13}, {}, r"a micro-batch of 14 tokens, where the engine takes 13"),
    "padded, above the cap": ({"nested": False, "cap": 13}, {}, r"of 14 tokens, where the engine takes 13"),
    "not a multiple": ({}, {"num_batches_divided_by": 2}, r"3 micro-batches, where.* a multiple of 2"),
    "groups": ({}, {"force_group_size": 2}, r"together in groups of 2, which a plan does not promise"),
    "no column": ({"plan": None}, {}, rf"column '{COLUMN}' did not reach the worker"),
}
WAY_OUT = r".*Way out: algorithm\.dppo\.packing\.enable=false"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_cannot_be_run_is_refused_with_a_way_out(fault):
    of_batch, arguments, message = FAULTS[fault]
    data = batch(**of_batch)
    with pytest.raises(RuntimeError, match=message + WAY_OUT):
        engine_utils.rearrange_micro_batches(data, data["max_token_len_per_gpu"], **arguments)


def in_step(rank, folder, answers):
    """Meet another rank over several batches, some of which one of them cannot run."""
    micro_batches.get_device_name = lambda: "cpu"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    batches = {
        "fine": batch(),
        "above the cap on rank 1": batch(cap=13 if rank else CAP),
        "no column on rank 0": batch(plan=PLAN if rank else None),
        "fewer on rank 1": batch(plan=[0, 0, 1, 1, 0, 1] if rank else PLAN, cap=99),
        "both faulty": batch(mini_batch=[0, 0, 1, 1, 1, 1], plan=PLAN if rank else [0] * 6, cap=99),
        "fine after all": batch(),
    }
    for name, data in batches.items():
        try:
            _, found = engine_utils.prepare_micro_batches(data, dp_group=dist.group.WORLD)
        except RuntimeError as error:
            found = str(error)
        answers.put((name, rank, found))
    dist.destroy_process_group()


def test_where_one_rank_cannot_run_its_part_all_raise_and_none_waits(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=in_step, args=(rank, tmp_path, answers), daemon=True) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    found = {}
    try:
        for _ in range(12):
            name, rank, answer = answers.get(timeout=60)
            found[name, rank] = answer
    except queue.Empty:
        pytest.fail(f"a rank waits: {found}")
    finally:
        for rank in ranks:
            rank.join(timeout=10)
            rank.kill()
    assert found["fine", 0] == found["fine", 1] == BINS
    assert found["fine after all", 0] == found["fine after all", 1] == BINS
    assert "another rank cannot run its part" in found["above the cap on rank 1", 0]
    assert "14 tokens, where the engine takes 13" in found["above the cap on rank 1", 1]
    assert "did not reach the worker" in found["no column on rank 0", 0]
    assert "another rank cannot run its part" in found["no column on rank 0", 1]
    for rank in (0, 1):
        assert "ranks have 2 to 3 micro-batches, where all need the same number" in found["fewer on rank 1", rank]
        assert "rows of mini-batches [0, 1] came together" in found["both faulty", rank]
    assert all("packing.enable=false" in answer for answer in found.values() if isinstance(answer, str))


# ---- what of verl it stands on --------------------------------------------------------------------------------------


def test_it_takes_the_arguments_of_verls(installed):
    of_verl = inspect.signature(seqlen_balancing.rearrange_micro_batches).parameters.values()
    ours = inspect.signature(installed).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in of_verl]


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_engines_run_it_where_it_was_put_after_they_were_imported(engine):
    """They have verl's `prepare_micro_batches` by name, which must look our function up when it is called."""
    implementation = import_module(f"verl.workers.engine.{engine}.transformer_impl")
    _, indices = implementation.prepare_micro_batches(batch())
    assert indices == BINS


def functions_of(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def calls(function, name):
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in found if getattr(call.func, "id", getattr(call.func, "attr", None)) == name]


def test_every_engine_of_verl_cuts_through_prepare_micro_batches_and_asks_for_no_least_number():
    """The function that stands in its place knows nothing of a least number, which no engine gives."""
    engines = 0
    for path in sorted(ENGINES.rglob("transformer_impl.py")):
        for function in functions_of(path):
            if function.name != "forward_backward_batch":
                continue
            made = calls(function, "prepare_micro_batches")
            assert len(made) == 1, path
            least = [k.value for k in made[0].keywords if k.arg == "min_num_micro_batch"]
            assert all(isinstance(value, ast.Constant) and value.value is None for value in least), path
            assert len(made[0].args) <= 1, path
            engines += 1
    assert engines >= 5


def test_nothing_else_of_the_engines_cuts_by_tokens():
    callers = [
        (path.name, function.name)
        for path in (ENGINES.parent).rglob("*.py")
        for function in functions_of(path)
        if calls(function, "rearrange_micro_batches") or calls(function, "prepare_dynamic_batch")
    ]
    assert callers == [("utils.py", "prepare_micro_batches")]


def test_installing_twice_is_installing_once(installed):
    install_planned_micro_batches()
    assert engine_utils.rearrange_micro_batches is installed
    assert installed.verl_original is seqlen_balancing.rearrange_micro_batches


def of_another(*args, **kwargs):
    return None


@wraps(seqlen_balancing.rearrange_micro_batches)
def around_verls(*args, **kwargs):
    return seqlen_balancing.rearrange_micro_batches(*args, **kwargs)


@pytest.mark.parametrize("replaced", [of_another, around_verls])
def test_a_function_that_someone_else_put_there_is_not_replaced(monkeypatch, replaced):
    monkeypatch.setattr(engine_utils, "rearrange_micro_batches", replaced)
    with pytest.raises(RuntimeError, match="another plugin has replaced it"):
        install_planned_micro_batches()
    assert engine_utils.rearrange_micro_batches is replaced


def test_nor_is_one_that_stood_there_before_verls_engines_were_imported(monkeypatch):
    """It then stands in both modules."""
    for module in (engine_utils, seqlen_balancing):
        monkeypatch.setattr(module, "rearrange_micro_batches", of_another)
    with pytest.raises(RuntimeError, match="another plugin has replaced it"):
        install_planned_micro_batches()
    assert engine_utils.rearrange_micro_batches is of_another


def test_the_worker_installs_it_before_verl_starts(monkeypatch):
    seen = []
    of_verl = seqlen_balancing.rearrange_micro_batches
    monkeypatch.setattr(engine_utils, "rearrange_micro_batches", of_verl)
    there = lambda *_, **__: seen.append(engine_utils.rearrange_micro_batches is not of_verl)  # noqa: E731
    monkeypatch.setattr(ActorRolloutRefWorker, "__init__", there)
    worker.DPPOWorker(config=None, role="actor")
    assert seen == [True]


def test_verls_worker_builds_its_actor_from_the_class_that_is_named():
    """`TimedTrainingWorker` comes in through this name, and times each mini-batch through that of `train_batch`."""
    assert ActorRolloutRefWorker.actor_worker_cls is TrainingWorker
    assert worker.DPPOWorker.actor_worker_cls is worker.TimedTrainingWorker
    for caller, called in (
        (ActorRolloutRefWorker.init_model, "actor_worker_cls"),
        (ActorRolloutRefWorker.update_actor, "train_mini_batch"),
        (TrainingWorker.train_mini_batch, "train_batch"),
    ):
        assert len(calls(parsed(caller), called)) == 1
    assert list(inspect.signature(TrainingWorker.train_batch).parameters) == ["self", "data"]


def parsed(function):
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
