"""A DataProto cut down to a plan's rows: nothing is lost, nothing leaves its row, and idle rows weigh nothing."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from training.generated_protos import (
    OBJECTS,
    OPTIONAL,
    PROMPT,
    RESPONSE,
    images_of,
    make_batch,
    make_plan,
    plain,
    read_row,
    snapshot,
)
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from verl_dppo.pruning import CompletionPlan
from verl_dppo.training.data_proto import (
    MINI_BATCH,
    ROW,
    WEIGHT,
    append_idle_rows,
    lengths,
    prune_data_proto,
    select_rows,
)

ADDED = {WEIGHT, ROW, MINI_BATCH}
ZERO = ("response_mask", "rm_scores", "token_level_rewards", "advantages")


def plan_of(rows, n, padding=(0,), weight=2.0):
    """Return a plan by hand: the rows of each mini-batch."""
    kept = np.concatenate(rows)
    weights = np.zeros(n)
    weights[kept] = weight
    return CompletionPlan(np.full(n, 0.5), weights, np.zeros(n, int), tuple(map(np.array, rows)), padding)


def check_idle(batch, row, template_rows, full_uids):
    """Check that one idle row is the copy of some row, apart from what makes it inert, and inert."""
    found = read_row(batch, row)
    assert found.get(ROW, torch.tensor(-1)) == -1
    for name in {*ZERO, WEIGHT} & found.keys():
        assert not found[name].any(), name
    if "uid" in found:
        assert isinstance(found["uid"], str)
        assert found["uid"] not in full_uids
    changed = {*ZERO, *ADDED, "uid", "attention_mask", "position_ids", "multi_modal_inputs"}
    original = template_rows[found["turns"]]
    same = found.keys() - changed
    assert plain({name: found[name] for name in same}) == {name: original[name] for name in same}
    return found, original


def check_tokens_of_idle(found, original):
    """Check that a padded copy attends to what the engines need and no more, and any other copy to all it did."""
    if "attention_mask" not in found:
        return
    assert not found.get("multi_modal_inputs")
    expected = torch.zeros(PROMPT + RESPONSE, dtype=torch.long)
    expected[PROMPT - 1 : PROMPT + 1] = 1
    assert torch.equal(found["attention_mask"], expected)
    position = compute_position_id_with_mask(expected[None])[0]
    assert (found["position_ids"] == position).all()


def check_engine_round_trip(batch):
    """Check that verl's own conversions give every row its attended tokens, and their values back."""
    needed = ["input_ids", "attention_mask", "prompts", "responses", "response_mask", "position_ids"]
    data = left_right_2_no_padding(batch.select(batch_keys=needed).to_tensordict())
    assert data["input_ids"].offsets().diff().tolist() == lengths(batch).tolist()
    responses = no_padding_2_padding(data["input_ids"].values().roll(-1), data)
    attended = batch.batch["attention_mask"][:, PROMPT:]
    assert torch.equal(responses, batch.batch["input_ids"][:, PROMPT:] * attended)


@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.integers(1, 3),
    size=st.integers(1, 4),
    mini_batches=st.integers(1, 3),
    multiple=st.integers(1, 3),
    design=st.sampled_from(["pivotal", "poisson"]),
    keep=st.sampled_from([0.2, 0.5, 1.0]),
    informative=st.sampled_from([0.0, 0.5, 1.0]),
    layout=st.sampled_from(["padded", "padded", "nested", "none"]),
    columns=st.sets(st.sampled_from([*OPTIONAL, *OBJECTS])),
    mrope=st.booleans(),
    text_share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_surviving_row_is_the_full_batchs_row_in_every_field(
    seed, groups, size, mini_batches, multiple, design, keep, informative, layout, columns, mrope, text_share
):
    batch = make_batch(seed, groups, size, layout, columns, mrope, text_share)
    plan = make_plan(seed, batch, groups, mini_batches, multiple, design, keep, informative)
    before, meta = snapshot(batch)
    keys = {*before[0]}
    pruned = prune_data_proto(batch, plan)

    assert (snapshot(batch), {*read_row(batch, 0)}) == ((before, meta), keys), "the batch given was changed"
    place = {row["turns"]: i for i, row in enumerate(before)}
    idle, kept = sum(plan.padding), len(pruned) - sum(plan.padding)
    found = [read_row(pruned, j) for j in range(len(pruned))]
    survivors = [place[found[j]["turns"]] for j in range(kept)]
    assert survivors == plan.kept.tolist()
    assert {*range(len(batch))} - {*survivors} <= {*np.flatnonzero(plan.weight == 0)}, "a drawn row was lost"
    for row, i in zip(found, survivors, strict=False):
        assert row.keys() == keys | ADDED
        assert plain({name: row[name] for name in keys}) == before[i]
        assert (row[WEIGHT].dtype, row[ROW].dtype, row[MINI_BATCH].dtype) == (torch.float64, torch.int64, torch.int64)
        assert (row[WEIGHT], row[ROW], row[MINI_BATCH]) == (plan.weight[i], i, plan.mini_batch[i])

    uids = {row.get("uid") for row in before}
    for j in range(kept, len(pruned)):
        check_tokens_of_idle(*check_idle(pruned, j, {row["turns"]: row for row in before}, uids))
    assert pruned.batch[MINI_BATCH][kept:].tolist() == np.repeat(np.arange(mini_batches), plan.padding).tolist()
    assert torch.bincount(pruned.batch[MINI_BATCH]).tolist() == [plan.rows_per_mini_batch] * mini_batches
    if "uid" in columns:
        assert len({row["uid"] for row in found[kept:]}) == idle
    check_meta(pruned, plan, meta, found, kept)
    if layout == "padded":
        check_engine_round_trip(pruned)


def check_meta(pruned, plan, meta, found, kept):
    """Check that per-row values follow the rows, and that everything else is as it was."""
    tokens = pruned.meta_info["global_token_num"]
    assert tokens[:kept] == [meta["global_token_num"][i] for i in plan.kept]
    assert len(tokens) == len(pruned)
    if "input_ids" in pruned.batch:
        assert tokens == lengths(pruned).tolist()
    if "images_seqlens" in meta:
        assert pruned.meta_info["images_seqlens"] == [length for row in found for length in images_of(row)]
    of_rows = {"global_token_num", "images_seqlens"}
    rest = {name: value for name, value in pruned.meta_info.items() if name not in of_rows}
    assert plain(rest) == {name: value for name, value in meta.items() if name not in of_rows}
    assert pruned.meta_info.keys() == meta.keys()


def proto(tensors, meta=None, **arrays):
    """Return a DataProto of these columns."""
    n = len(next(iter(arrays.values()))) if arrays else len(next(iter(tensors.values())))
    objects = {name: np.array([*values, None], dtype=object)[:-1] for name, values in arrays.items()}
    return DataProto(TensorDict(tensors, batch_size=[n]), objects, meta or {})


def with_lengths(tokens, meta=None, **arrays):
    """Return a padded batch whose rows have one prompt token and these many in all."""
    n, width = len(tokens), max(tokens)
    mask = (torch.arange(width) < torch.tensor(tokens)[:, None]).long()
    ids = torch.arange(n * width).view(n, width)
    tensors = {"input_ids": ids, "attention_mask": mask, "prompts": ids[:, :1], "responses": ids[:, 1:]}
    tensors |= {"response_mask": mask[:, 1:], "position_ids": compute_position_id_with_mask(mask)}
    return proto(tensors, meta, **arrays)


# Refusals


def test_a_batch_is_pruned_once():
    batch = make_batch(1)
    plan = make_plan(1, batch, 2)
    once = prune_data_proto(batch, plan)
    with pytest.raises(
        ValueError, match=r"\['dppo_weight', 'dppo_row', 'dppo_mini_batch'\] already.*Prune the full batch"
    ):
        prune_data_proto(once, plan_of([range(len(once))], len(once)))


@pytest.mark.parametrize("column", [WEIGHT, ROW])
@pytest.mark.parametrize("objects", [False, True])
def test_one_column_of_an_earlier_pruning_is_enough_to_refuse(column, objects):
    batch = with_lengths([2, 3], uid="ab")
    if objects:
        batch.non_tensor_batch[column] = np.ones(2)
    else:
        batch.batch[column] = torch.ones(2)
    with pytest.raises(ValueError, match=column):
        prune_data_proto(batch, plan_of([[0]], 2))


@pytest.mark.parametrize("rows", [5, 7])
def test_a_plan_for_another_number_of_rows_is_refused(rows):
    with pytest.raises(ValueError, match=f"plan is for {rows} rows, the batch has 6"):
        prune_data_proto(make_batch(1), plan_of([[0, 1]], rows))


@pytest.mark.parametrize("layout", ["padded", "none"])
@pytest.mark.parametrize("column", [np.zeros(5), np.zeros(7), [0] * 6])
def test_columns_of_other_lengths_are_refused(layout, column):
    """verl checks when the DataProto is made; its own code puts columns in later, lists among them."""
    batch = make_batch(1, layout=layout)
    batch.non_tensor_batch["processing_times"] = column
    for refuse in (lambda: prune_data_proto(batch, plan_of([[0]], 6)), lambda: append_idle_rows(batch, 1)):
        with pytest.raises(ValueError, match=r"'processing_times'\] must be an array of the batch's 6 rows"):
            refuse()


@pytest.mark.parametrize("rows", [[], [[0, 1]], [0.0], [True, False], np.zeros(0, int), 3])
def test_what_is_no_list_of_rows_is_refused(rows):
    with pytest.raises(ValueError, match=r"rows must be \(m,\) integers"):
        select_rows(make_batch(1), rows)


@pytest.mark.parametrize("row", [-1, 6])
def test_rows_that_are_not_there_are_refused(row):
    with pytest.raises(ValueError, match=rf"rows must be in \[0, 6\), got \[{row}\]"):
        select_rows(make_batch(1), [0, row])


@pytest.mark.parametrize("count", [-1, 1.0, True, None])
def test_what_is_no_count_of_rows_is_refused(count):
    with pytest.raises(ValueError, match="count must be an integer >= 0"):
        append_idle_rows(make_batch(1), count)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="m >= 1"):
        append_idle_rows(DataProto(), 1)


def test_token_numbers_of_another_batch_are_refused():
    batch = make_batch(1)
    batch.meta_info["global_token_num"].append(3)
    with pytest.raises(ValueError, match=r"global_token_num'\] has 7 entries for 6 rows"):
        select_rows(batch, [0])


def test_images_of_unknown_rows_are_refused():
    batch = with_lengths([2, 3], {"images_seqlens": [4, 4]}, uid="ab")
    with pytest.raises(ValueError, match="no column 'multi_modal_inputs'"):
        select_rows(batch, [0])
    batch.meta_info["images_seqlens"] = []
    assert select_rows(batch, [0]).meta_info["images_seqlens"] == []


def test_tokens_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match=r"no attention_mask.*\['input_ids'\]"):
        lengths(proto({"input_ids": torch.ones(2, 3)}))
    with pytest.raises(ValueError, match=r"tensors: \[\]"):
        lengths(make_batch(1, layout="none"))


# Rows


@pytest.mark.parametrize("layout", ["padded", "nested", "none"])
def test_rows_come_in_any_order_and_repeated(layout):
    batch = make_batch(2, layout=layout)
    rows = [5, 0, 0, 3, 5]
    chosen = select_rows(batch, rows)
    assert snapshot(chosen)[0] == [snapshot(batch)[0][i] for i in rows]
    assert plain(read_row(select_rows(batch, torch.tensor(rows)), 3)) == snapshot(batch)[0][3]


def test_tensors_of_the_result_are_its_own():
    batch = with_lengths([2, 3], uid="ab")
    chosen = select_rows(batch, [0, 1])
    chosen.batch["input_ids"].zero_()
    chosen.non_tensor_batch["uid"][:] = "c"
    chosen.meta_info["new"] = 1
    assert batch.batch["input_ids"].any()
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert batch.meta_info == {}


def test_values_beside_the_tensors_follow_their_rows_and_what_all_rows_share_stays():
    batch = with_lengths([3, 2, 4])
    tu.assign_non_tensor(batch.batch, shared="of all", of_row=[["a", 1], {"b": 2}, None])
    chosen = select_rows(batch, [2, 1, 1, 0])
    assert chosen.batch.get("of_row").tolist() == [None, {"b": 2}, {"b": 2}, ["a", 1]]
    assert isinstance(chosen.batch.get("shared"), NonTensorData)
    assert tu.get_non_tensor_data(chosen.batch, "shared", None) == "of all"


def rope(rows):
    return [torch.arange(4 * tokens).view(4, tokens) + 100 * i for i, tokens in enumerate(rows)]


def test_padded_positions_of_four_axes_follow_their_rows():
    positions = torch.arange(3 * 4 * 5).view(3, 4, 5)
    chosen = select_rows(proto({"position_ids": positions}), [2, 0])
    assert torch.equal(chosen.batch["position_ids"], positions[[2, 0]])


@pytest.mark.parametrize(
    "nest", [tu.nested_tensor_from_tensor_list, lambda r: torch.nested.as_nested_tensor(r, layout=torch.jagged)]
)
@pytest.mark.parametrize("pickled", [False, True])
def test_nested_positions_of_four_axes_follow_their_rows(nest, pickled):
    """However they were nested, and after the pickling of a DataProto, which forgets along which dimension."""
    rows = rope([3, 5, 1])
    batch = proto({"position_ids": nest(rows)})
    batch = pickle.loads(pickle.dumps(batch)) if pickled else batch
    found = select_rows(batch, [2, 0, 2]).batch["position_ids"]
    assert [row.tolist() for row in found.unbind()] == [rows[i].tolist() for i in (2, 0, 2)]


def test_where_tokens_are_as_many_as_axes_the_ragged_dimension_is_what_the_tensor_says():
    rows = rope([3, 1])
    found = select_rows(proto({"position_ids": tu.nested_tensor_from_tensor_list(rows)}), [1, 0])
    assert [row.tolist() for row in found.batch["position_ids"].unbind()] == [rows[1].tolist(), rows[0].tolist()]


def test_a_nested_view_with_holes_follows_its_rows():
    base = torch.arange(12).view(3, 4)
    view = torch.nested.narrow(base, 1, torch.tensor([1, 0, 2]), torch.tensor([2, 4, 1]), layout=torch.jagged)
    found = select_rows(proto({"responses": view}), [2, 0, 1]).batch["responses"]
    assert [row.tolist() for row in found.unbind()] == [[10], [1, 2], [4, 5, 6, 7]]


def test_tokens_of_rows_are_counted_in_either_layout():
    assert lengths(with_lengths([2, 5, 3])).tolist() == [2, 5, 3]
    ids = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(0), torch.ones(3)], layout=torch.jagged)
    nested = proto({"input_ids": ids, "attention_mask": torch.ones(3, 9)})
    assert lengths(nested).tolist() == [2, 0, 3]
    assert lengths(nested).dtype == lengths(with_lengths([2])).dtype == np.int64


# Meta


def test_only_what_is_known_to_be_of_rows_is_cut_from_the_meta_information():
    meta = {"global_token_num": [2, 3, 4], "reward_extra_keys": ["a", "b", "c"], "steps": np.arange(3), "none": None}
    batch = with_lengths([2, 3, 4], meta, uid="abc")
    pruned = prune_data_proto(batch, plan_of([[2], [1]], 3, (1, 1)))
    assert pruned.meta_info["global_token_num"] == [4, 3, 2, 2]
    assert all(pruned.meta_info[name] is meta[name] for name in ("reward_extra_keys", "steps", "none"))
    assert batch.meta_info is meta
    assert meta["global_token_num"] == [2, 3, 4]


def images(*of_image):
    sizes = torch.tensor(of_image)
    return {
        "image_grid_thw": torch.stack([torch.ones_like(sizes), sizes, torch.ones_like(sizes)], 1),
        "images_seqlens": sizes,
    }


def test_lengths_of_images_are_those_of_the_rows_in_their_order():
    """As verl's trainer takes them: of rows with a grid only; an idle copy is text."""
    inputs = [images(4, 6), {}, images(8), {"pixel_values_videos": 1, "images_seqlens": torch.tensor([9])}]
    batch = with_lengths([3, 4, 2, 5], {"images_seqlens": [4, 6, 8]}, multi_modal_inputs=inputs)
    assert select_rows(batch, [2, 1, 3, 0]).meta_info["images_seqlens"] == [8, 4, 6]
    assert prune_data_proto(batch, plan_of([[2, 0]], 4, (1,))).meta_info["images_seqlens"] == [8, 4, 6]
    assert prune_data_proto(batch, plan_of([[1, 2]], 4, (1,))).meta_info["images_seqlens"] == [8]


# Idle rows


def test_an_idle_row_copies_the_shortest_row_kept_without_images():
    inputs = [images(4), {}, None, images(2), {}]
    batch = with_lengths([3, 5, 4, 2, 2], uid="abcde", multi_modal_inputs=inputs)
    pruned = prune_data_proto(batch, plan_of([[0, 1], [2, 3]], 5, (1, 2)))
    assert pruned.batch["input_ids"][4:].tolist() == [batch.batch["input_ids"][2].tolist()] * 3
    assert pruned.batch["attention_mask"][4:].tolist() == [[1, 1, 0, 0, 0]] * 3
    assert pruned.batch[MINI_BATCH].tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert pruned.batch[WEIGHT].tolist() == [2, 2, 2, 2, 0, 0, 0]
    assert pruned.batch[ROW].tolist() == [0, 1, 2, 3, -1, -1, -1]


def test_where_all_rows_have_images_an_idle_row_is_text_all_the_same():
    inputs = [images(4), images(2)]
    batch = with_lengths([3, 5], {"images_seqlens": [4, 2]}, multi_modal_inputs=inputs)
    extended = append_idle_rows(batch, 1)
    idle = read_row(extended, 2)
    assert idle["multi_modal_inputs"] == {}
    assert idle["attention_mask"].tolist() == [1, 1, 0, 0, 0]
    assert not idle["response_mask"].any()
    assert extended.meta_info["images_seqlens"] == [4, 2]
    assert batch.non_tensor_batch["multi_modal_inputs"].tolist() == inputs


def test_a_nested_idle_row_keeps_its_tokens_but_no_mask():
    batch = make_batch(4, layout="nested", text_share=1.0)
    shortest = int(lengths(batch).argmin())
    idle, original = read_row(append_idle_rows(batch, 2), 7), read_row(batch, shortest)
    for name in ("input_ids", "position_ids", "responses"):
        assert torch.equal(idle[name], original[name])
    for name in ZERO:
        assert not idle[name].any()
        assert idle[name].shape == original[name].shape
    assert plain(read_row(append_idle_rows(batch, 2), 5)) == plain(read_row(batch, 5))


def test_positions_of_an_idle_row_start_from_0_on_all_axes():
    """Attention over packed rows takes a position of 0 for the start of a row: others would join the row before."""
    batch = make_batch(3, text_share=1.0)
    batch.batch["position_ids"] += 9
    idle = append_idle_rows(batch, 1).batch["position_ids"][-1]
    assert idle[:, PROMPT - 1 : PROMPT + 1].tolist() == [[0, 1]] * 4


def test_an_idle_row_has_a_uid_that_no_completion_has_or_had():
    batch = with_lengths([2, 3, 4], uid=["dppo_idle_1", "a", "dppo_idle_0"])
    pruned = prune_data_proto(batch, plan_of([[0, 1]], 3, (2,)))
    assert pruned.non_tensor_batch["uid"].tolist() == ["dppo_idle_1", "a", "dppo_idle_2", "dppo_idle_3"]
    again = append_idle_rows(pruned, 1)
    assert len({*again.non_tensor_batch["uid"]}) == 5


def test_short_string_arrays_take_long_uids():
    batch = with_lengths([2, 3])
    batch.non_tensor_batch["uid"] = np.array(["a", "b"])
    assert append_idle_rows(batch, 1).non_tensor_batch["uid"].tolist() == ["a", "b", "dppo_idle_0"]


def test_uids_and_inputs_beside_the_tensors_are_heeded_too():
    batch = with_lengths([2, 3, 4])
    tu.assign_non_tensor(batch.batch, uid=["a", "a", "b"], multi_modal_inputs=[images(4), {}, {}])
    extended = append_idle_rows(batch, 2)
    assert extended.batch.get("uid").tolist() == ["a", "a", "b", "dppo_idle_0", "dppo_idle_1"]
    assert torch.equal(extended.batch["input_ids"][3], batch.batch["input_ids"][1])
    assert extended.batch.get("multi_modal_inputs").tolist()[3:] == [{}, {}]


def test_idle_rows_of_a_pruned_batch_level_its_mini_batches():
    batch = with_lengths([2, 3, 4, 5], uid="abcd")
    pruned = prune_data_proto(batch, plan_of([[0], [1, 2]], 4, (0, 0)))
    extended = append_idle_rows(pruned, 3)
    assert extended.batch[MINI_BATCH].tolist() == [0, 1, 1, 0, 0, 1]
    assert extended.batch[WEIGHT].tolist() == [2, 2, 2, 0, 0, 0]
    assert extended.batch[ROW].tolist() == [0, 1, 2, -1, -1, -1]


@pytest.mark.parametrize("layout", ["padded", "nested", "none"])
def test_no_idle_rows_leave_the_batch_as_it_is(layout):
    batch = make_batch(5, layout=layout)
    assert snapshot(append_idle_rows(batch, 0)) == snapshot(batch)
    assert not ADDED & {*read_row(append_idle_rows(batch, 1), 0)}


def test_a_batch_that_says_nothing_of_tokens_is_padded_all_the_same():
    batch = proto({"input_ids": torch.arange(6).view(2, 3), "rm_scores": torch.ones(2)}, uid="ab")
    pruned = prune_data_proto(batch, plan_of([[1, 0]], 2, (1,)))
    assert pruned.batch["input_ids"].tolist() == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert pruned.batch["rm_scores"].tolist() == [1, 1, 0]


# verl's own operations on the result


def test_verl_joins_splits_and_pickles_the_result():
    batch = make_batch(6, groups=3, size=4)
    pruned = prune_data_proto(batch, make_plan(6, batch, 3, mini_batches=2, multiple=2))
    whole = snapshot(pruned)[0]
    halves = pruned.chunk(2)
    assert [row for half in halves for row in snapshot(half)[0]] == whole
    assert snapshot(DataProto.concat(halves))[0] == whole
    assert snapshot(pickle.loads(pickle.dumps(pruned)))[0] == whole
    log_probs = DataProto.from_dict({"old_log_probs": torch.rand(len(pruned), RESPONSE)})
    joined = pruned.union(log_probs)
    assert torch.equal(joined.batch["old_log_probs"], log_probs.batch["old_log_probs"])
    assert joined.batch[WEIGHT].shape == (len(whole),)


def test_verl_joins_and_splits_a_nested_result():
    batch = make_batch(6, groups=2, size=4, layout="nested")
    pruned = prune_data_proto(batch, plan_of([[5, 1, 2]], 8, (1,)))
    whole = [plain(read_row(pruned, i)["position_ids"]) for i in range(4)]
    scores = DataProto.from_dict({"values": torch.rand(4)})
    data = pruned.union(scores).to_tensordict()
    parts = tu.chunk_tensordict(data, 2)
    assert [plain(row) for part in parts for row in part["position_ids"].unbind()] == whole
    assert torch.cat([part[WEIGHT] for part in parts]).tolist() == [2, 2, 2, 0]
