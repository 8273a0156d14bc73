"""One step of training: its rows, the order and the micro-batches planned for them, and the columns of a rank."""

from dataclasses import dataclass

import numpy as np
import torch
from cpu.tiny import EOS
from engine.batches import VOCABULARY, nested, sequence_columns
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_dppo.packing import PADDING, Schedule, plan_in_order, schedule
from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, WEIGHT
from verl_dppo.training.micro_batches import COLUMNS, FOLLOWED, encode
from verl_dppo.training.passes import LOG_PROB, UPDATE

MINI_BATCHES = 2
ROWS = 22
_rng = np.random.default_rng(5)
PROMPT = _rng.integers(2, 6, ROWS)
RESPONSE = _rng.integers(2, 15, ROWS)
LENGTH = PROMPT + RESPONSE
# An odd number of rows in each, in no order: two ranks need padding, and no mini-batch is a piece of the batch.
MINI_BATCH = _rng.permutation(np.arange(ROWS) % MINI_BATCHES)
WEIGHTS = _rng.uniform(1, 4, ROWS)
ADVANTAGES = _rng.normal(size=ROWS)
CAPACITY = {UPDATE: 30, LOG_PROB: 45}
"""Largest number of tokens of a micro-batch: three and more in a mini-batch of one of two ranks."""
CONSTANTS = {BATCH_NUM_TOKENS: (80.0, 120.0), GLOBAL_BATCH_SIZE: (10.0, 13.0)}
"""What the weighted loss divides by, for each mini-batch."""


@dataclass(frozen=True)
class Rows:
    """Sequences, and a column of the responses for each name; one tensor for each row."""

    sequences: list[torch.Tensor]
    columns: dict[str, list[torch.Tensor]]


def rows_of_the_step(model: torch.nn.Module) -> Rows:
    """Make them: tokens at random, old log-probs so far from the model's that ratios clip on both sides."""
    rng = torch.Generator().manual_seed(7)
    sequences = [torch.randint(3, VOCABULARY, (n,), generator=rng) for n in LENGTH]
    assert len({tuple(s.tolist()) for s in sequences}) == ROWS
    with torch.no_grad():
        logits = [model(s[None]).logits[0, :-1].double() for s in sequences]
    log_probs = [x.log_softmax(-1).gather(1, s[1:, None])[:, 0] for x, s in zip(logits, sequences, strict=True)]
    columns: dict[str, list[torch.Tensor]] = {"old_log_probs": [], "ref_log_prob": [], "advantages": []}
    for own, n, advantage in zip(log_probs, RESPONSE.tolist(), ADVANTAGES.tolist(), strict=True):
        for name, scale in (("old_log_probs", 0.25), ("ref_log_prob", 0.4)):
            columns[name].append(own[-n:] + scale * torch.randn(n, generator=rng, dtype=torch.float64))
        columns["advantages"].append(torch.full((n,), advantage, dtype=torch.float64))
    return Rows(sequences, columns)


@dataclass(frozen=True)
class Order:
    """Rows at the places of all ranks, rank after rank, and what each pass's micro-batches are, if they are planned."""

    row: np.ndarray
    mini_batch: np.ndarray
    passes: dict[str, Schedule]


def plain(ranks: int) -> Order:
    """Mini-batch after mini-batch as the rows come, padded to divide, a contiguous part for every rank."""
    cells, rows = [], np.arange(ROWS)
    for k in range(MINI_BATCHES):
        members = rows[k == MINI_BATCH]
        padded = np.pad(members, (0, -members.size % ranks), constant_values=PADDING)
        cells.append(padded.reshape(ranks, -1))
    row = np.concatenate([cell[rank] for rank in range(ranks) for cell in cells])
    return Order(row, np.tile(np.repeat(np.arange(MINI_BATCHES), cells[0].shape[1]), ranks), {})


def planned(ranks: int, mini_batch: np.ndarray = MINI_BATCH) -> Order:
    """The order of `schedule`, and the log-prob pass cut over all mini-batches of a rank at its own cap."""
    update = schedule(LENGTH, ranks, mini_batch, CAPACITY[UPDATE], cost=lambda n: n + n**2 / 16.0)
    log_prob = plan_in_order(update.length, ranks, 1, CAPACITY[LOG_PROB])
    return Order(update.row, update.mini_batch, {UPDATE: update, LOG_PROB: log_prob})


def micro_batches(order: Order, name: str, ranks: int) -> list[list[list[int]]]:
    """Return for each rank the rows of its micro-batches, in the order in which a pass is to run them."""
    plan, found = order.passes[name], []
    for rank in range(ranks):
        mine = plan.rank == rank
        key = plan.mini_batch[mine] * ROWS + plan.micro_batch[mine]
        found.append([order.row[mine][key == k].tolist() for k in np.unique(key)])
    return found


def batch(rows: Rows, order: Order, rank: int, ranks: int, weighted: bool) -> TensorDict:
    """Build what verl's worker of one rank gets for a pass over the step."""
    here = np.array_split(np.arange(order.row.size), ranks)[rank]
    mine = order.row[here].tolist()
    nothing, pad = torch.zeros(1, dtype=torch.float64), torch.tensor([EOS])
    prompts = [pad if r == PADDING else rows.sequences[r][: PROMPT[r]] for r in mine]
    responses = [pad if r == PADDING else rows.sequences[r][PROMPT[r] :] for r in mine]
    mask = [torch.full((r.numel(),), int(row != PADDING)) for row, r in zip(mine, responses, strict=True)]
    columns = {
        **sequence_columns(prompts, responses, mask),
        **{k: nested([nothing if r == PADDING else c[r] for r in mine]) for k, c in rows.columns.items()},
        **{COLUMNS[k]: encode(p.mini_batch, p.micro_batch)[here] for k, p in order.passes.items()},
    }
    if weighted:
        columns[WEIGHT] = torch.tensor([0.0 if r == PADDING else WEIGHTS[r] for r in mine], dtype=torch.float64)
        for name, of_mini_batch in CONSTANTS.items():
            columns[name] = torch.tensor(of_mini_batch, dtype=torch.float64)[order.mini_batch[here]]
    return TensorDict(columns, batch_size=[len(mine)])


def for_pass(data: TensorDict, name: str, order: Order, **changes: object) -> TensorDict:
    """Add verl's settings of a pass: micro-batches by tokens, and planned where the order has a plan."""
    settings = {
        "calculate_entropy": True,
        "temperature": 1.0,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": CAPACITY[name],
        "compute_loss": name == UPDATE,
        **({FOLLOWED: COLUMNS[name]} if name in order.passes else {}),
    }
    if name == UPDATE:
        settings |= {
            "global_batch_size": ROWS // MINI_BATCHES,
            "mini_batch_size": order.row.size // MINI_BATCHES,
            "epochs": 1,
            "seed": 1,
            "dataloader_kwargs": {"shuffle": False},
        }
    tu.assign_non_tensor(data, **(settings | changes))
    return data
