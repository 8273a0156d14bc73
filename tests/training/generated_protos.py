"""DataProtos as verl's rollout hands them over, generated row by row, and their rows read back."""

import numpy as np
import torch
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu

from verl_dppo.pruning import deal_mini_batches, neyman_inclusion, plan_completions

PROMPT, RESPONSE = 3, 4
# Where the tokens of a column are; the first are what every batch has.
REGION = {
    "id": None,
    "input_ids": "sequence",
    "attention_mask": "sequence",
    "prompts": "prompt",
    "responses": "response",
    "response_mask": "response",
    "position_ids": "sequence",
    "rollout_log_probs": "response",
    "rm_scores": "response",
    "token_level_rewards": "response",
    "advantages": "response",
    "routed_experts": "sequence",
    "old_weight": None,
}
NEEDED = tuple(REGION)[:7]
OPTIONAL = tuple(REGION)[7:]
OBJECTS = ("uid", "multi_modal_inputs", "raw_prompt", "acc", "turns", "reward_tuple")


def image_inputs(rng):
    """Return what verl's agent loop says of one or two images."""
    grid = torch.tensor([[1, 2, int(rng.integers(1, 9))] for _ in range(rng.integers(1, 3))])
    return {"image_grid_thw": grid, "images_seqlens": grid[:, 1] * grid[:, 2], "pixel_values": torch.zeros(len(grid))}


def make_row(rng, name, group, text, mrope):
    """Return the columns of a completion with that id: tensors without padding, numbers and objects."""
    prompt, response = int(rng.integers(1, PROMPT + 1)), int(rng.integers(0, RESPONSE + 1))
    ids = torch.from_numpy(rng.integers(1, 99, prompt + response))
    position = torch.arange(prompt + response)
    return {
        "id": torch.tensor(name),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "response_mask": torch.from_numpy(rng.integers(0, 2, response)),
        "position_ids": position + torch.tensor([[0], [4], [5], [6]]) * (not text) if mrope else position,
        "rollout_log_probs": torch.from_numpy(-rng.random(response)),
        "rm_scores": torch.from_numpy(rng.random(response)).float(),
        "token_level_rewards": torch.from_numpy(rng.random(response)).to(torch.bfloat16),
        "advantages": torch.from_numpy(rng.standard_normal(response)).float(),
        "routed_experts": torch.from_numpy(rng.integers(0, 8, (prompt + response, 2, 2))).to(torch.uint8),
        "old_weight": torch.tensor(rng.random()),
        "uid": f"group-{group}",
        "multi_modal_inputs": [{}, None][name % 2] if text else image_inputs(rng),
        "raw_prompt": [{"role": "user", "content": str(name)}] * int(rng.integers(0, 3)),
        "acc": float(rng.random()),
        "turns": name,
        "reward_tuple": (name,),
    }


def padded(row, column):
    """Return a row's tensor with prompts padded on the left and responses on the right."""
    value, region = row[column], REGION[column]
    dim = 1 if column == "position_ids" and value.dim() == 2 else 0
    left = PROMPT - row["prompts"].numel() if region != "response" else 0
    right = RESPONSE - row["responses"].numel() if region != "prompt" else 0
    blank = value.new_zeros([*value.shape[:dim], left + right, *value.shape[dim + 1 :]])
    return torch.cat([blank.narrow(dim, 0, left), value, blank.narrow(dim, left, right)], dim)


def column_of(rows, column, layout):
    """Return a column's tensor: one value for each row, padded, or nested as verl's own helper nests."""
    values = [row[column] for row in rows]
    if REGION[column] is None:
        return torch.stack(values)
    if layout == "padded":
        return torch.stack([padded(row, column) for row in rows])
    if column == "routed_experts":
        return tu.nested_tensor_from_tensor_list(values, ragged_idx=1)
    return tu.nested_tensor_from_tensor_list(values)


def array_of(values):
    """Return the array that verl keeps: of numbers, or of objects."""
    if isinstance(values[0], int | float):
        return np.array(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def make_batch(seed, groups=2, size=3, layout="padded", columns=(*OPTIONAL, *OBJECTS), mrope=True, text_share=0.5):
    """Return n = groups * size completions; their ids are in no order. Layout `none` has no tensors."""
    rng = np.random.default_rng(seed)
    n = groups * size
    text = rng.random(n) < text_share
    names = (100 + rng.permutation(n)).tolist()
    rows = [make_row(rng, name, i // size, text[i], mrope) for i, name in enumerate(names)]
    tensors = {c: column_of(rows, c, layout) for c in REGION if c in (*NEEDED, *columns)} if layout != "none" else {}
    if layout == "nested":
        del tensors["attention_mask"]
    meta = {"temperature": 0.7, "reward_extra_keys": ["acc"], "as_long_as_the_batch": list(range(n)), "timing": {}}
    meta["global_token_num"] = [row["input_ids"].numel() for row in rows]
    if "multi_modal_inputs" in columns:
        meta["images_seqlens"] = [length for row in rows for length in images_of(row)]
    return DataProto(
        batch=TensorDict(tensors, batch_size=[n]) if tensors else None,
        non_tensor_batch={c: array_of([row[c] for row in rows]) for c in OBJECTS if c in ("turns", *columns)},
        meta_info=meta,
    )


def images_of(row):
    """Return the lengths of the images of a row."""
    inputs = row.get("multi_modal_inputs")
    return inputs["images_seqlens"].tolist() if inputs else []


def make_plan(seed, batch, groups, mini_batches=1, multiple=1, design="pivotal", keep=0.5, informative=0.7):
    """Return a plan of the batch from magnitudes at random, of which a share is zero."""
    rng = np.random.default_rng([seed, 1])
    n = len(batch)
    group = np.arange(n) // (n // groups)
    magnitude = rng.lognormal(size=n) * (rng.random(n) < informative)
    length = rng.integers(1, 9, n).astype(float)
    mini_batch = deal_mini_batches(magnitude > 0, group, mini_batches, rng)
    target = np.zeros(n)
    for k in range(mini_batches):
        target[mini_batch == k] = neyman_inclusion(magnitude[mini_batch == k], length[mini_batch == k], keep)
    slope, order = magnitude / np.sqrt(length), np.lexsort((length, group))
    return plan_completions(
        slope, target, mini_batch, order, length, magnitude, mini_batches, multiple, keep / 4, design, rng
    )


def read_row(batch, row, columns=None):
    """Return one row of every column; of a nested one straight from its values."""
    found = {}
    for name, value in {} if batch.batch is None else batch.batch.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value.tolist()[row]
        elif value.is_nested:
            start, end = value.offsets()[row : row + 2].tolist()
            flat = name == "position_ids" and value.values().dim() == 2
            found[name] = value.values()[:, start:end] if flat else value.values()[start:end]
        else:
            found[name] = value[row]
    found.update({name: array[row] for name, array in batch.non_tensor_batch.items()})
    return {name: found[name] for name in columns} if columns else found


def plain(value):
    """Return a value with all arrays and tensors in it as their types and lists, so that == compares everything."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(of_name) for name, of_name in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def snapshot(batch):
    """Return everything that a DataProto holds, as a value of its own."""
    return [plain(read_row(batch, i)) for i in range(len(batch))], plain(batch.meta_info)
