"""One rank of a planned step: `python -m engine.measure_packing ENGINE DTYPE MODEL RESULTS`.

Every step goes through verl's own training worker, in the plain order with verl's own micro-batches or one row in each,
and as planned. In place of the optimizer's step the gradient is read. Each rank writes what it saw into RESULTS.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine import packed_step
from engine.cases import Case
from engine.packed_step import MINI_BATCH, Order, Rows, plain, planned
from engine.reading import GradientReader
from transformers import AutoModelForCausalLM
from verl.workers.utils.losses import ppo_loss

from verl_dppo.packing import PADDING
from verl_dppo.training.loss import dppo_loss
from verl_dppo.training.micro_batches import install_planned_micro_batches
from verl_dppo.training.passes import LOG_PROB, UPDATE
from verl_dppo.training.worker import TimedTrainingWorker

LOSSES = {
    "weighted token-mean": (dppo_loss, Case("dapo")),
    "weighted sequence-mean": (dppo_loss, Case("gspo")),
    "stock token-mean": (ppo_loss, Case("dapo")),
    "stock sequence-sum": (ppo_loss, Case("rloo")),
}
VERL, EACH, PLANNED, PACKED, SWAPPED = "verl's micro-batches", "one row each", "planned", "planned, packed", "swapped"


class Step(GradientReader):
    """A worker of one precision, and what it does with the rows of a step."""

    def __init__(self, engine: Any, model: Path, dtype: str, rows: Rows) -> None:
        super().__init__(engine, model, dtype)
        self.rows = rows
        self.executed: list[list[int]] = []
        self._row = {tuple(s.tolist()): row for row, s in enumerate(rows.sequences)}
        self._log_micro_batches()

    def _log_micro_batches(self) -> None:
        """Note the rows of every micro-batch where the engine runs it."""
        of_verl = self.worker.engine.forward_step

        def forward_step(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
            given = hasattr(micro_batch, "batch_size")
            here = micro_batch if given else next(micro_batch)  # Megatron draws it from an iterator
            rows = [self._row.get(tuple(s.tolist()), PADDING) for s in here["input_ids"].unbind()]
            self.executed.append(rows)
            return of_verl(here if given else iter([here]), *args, **kwargs)

        self.worker.engine.forward_step = forward_step

    def gradient(self, order: Order, loss: Callable[..., Any], case: Case, **changes: Any) -> torch.Tensor:
        """Return (mini-batches, parameters); `executed` then holds the micro-batches."""
        data = packed_step.batch(self.rows, order, self.rank, self.ranks, weighted=loss is dppo_loss)
        self.executed.clear()
        self.worker.seconds.clear()
        return self.train(packed_step.for_pass(data, UPDATE, order, **changes), loss, case)

    def log_probs(self, order: Order, changed: int | None = None, reset: bool = True, **changes: Any) -> Any:
        """Return the log-probs of the rank's rows, in the order that they come back in; None where verl gives none.

        Args:
            order: that of the rows.
            changed: a place whose tokens are replaced by others.
            reset: whether each row's position ids start at 0; else they go on from the row before in its micro-batch.
            changes: settings of verl.
        """
        data = packed_step.batch(self.rows, order, self.rank, self.ranks, weighted=False)
        if changed is not None:
            sequences = list(data["input_ids"].unbind())
            sequences[changed] = 3 + (sequences[changed] + 5) % 29
            data["input_ids"] = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
        if not reset:
            data["position_ids"] = _going_on(order, self.rank, self.ranks)
        self.executed.clear()
        output = self.worker.infer_batch(packed_step.for_pass(data, LOG_PROB, order, **changes))
        return None if output is None else list(output["log_probs"].unbind())


def _going_on(order: Order, rank: int, ranks: int) -> torch.Tensor:
    """Return position ids as if each micro-batch of the log-prob pass were one sequence."""
    here = np.array_split(np.arange(order.row.size), ranks)[rank]
    plan, ids = order.passes[LOG_PROB], []
    for place, k in enumerate(plan.micro_batch[here]):
        start = int(plan.length[here][:place][plan.micro_batch[here][:place] == k].sum())
        ids.append(start + torch.arange(int(plan.length[here][place])))
    return torch.nested.as_nested_tensor(ids, layout=torch.jagged)


def leaks(step: Step, order: Order, places: Sequence[int], reset: bool) -> tuple[float, float]:
    """Change one place in turn. Return by how much any other's log-probs move, and the least that its own do.

    A row's last entry is left out: it is for the token that verl's labels take from the row that follows.
    """
    before = step.log_probs(order, reset=reset, use_remove_padding=True)
    of_others, own = 0.0, []
    for place in places:
        after = step.log_probs(order, place, reset, use_remove_padding=True)
        moved = [float((a - b)[:-1].abs().max()) for a, b in zip(after, before, strict=True)]
        own.append(moved.pop(place))
        of_others = max(of_others, *moved)
    return of_others, min(own)


def swapped(ranks: int) -> Order:
    """A plan that lets two rows change their mini-batches."""
    mini_batch = MINI_BATCH.copy()
    pair = [int(np.flatnonzero(mini_batch == k)[0]) for k in (0, 1)]
    mini_batch[pair] = mini_batch[pair[::-1]]
    return planned(ranks, mini_batch)


def measure(step: Step, packs: bool) -> dict[str, Any]:
    """Return gradients of all losses and orders, the micro-batches executed and planned, and log-probs by row."""
    order, found = planned(step.ranks), {"rank": step.rank, "ranks": step.ranks, "gradients": {}, "executed": {}}
    padded = {"use_remove_padding": False}
    ways = {
        VERL: (plain(step.ranks), padded),
        EACH: (plain(step.ranks), padded | {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}),
        PLANNED: (order, padded),
        SWAPPED: (swapped(step.ranks), padded),
    }
    if packs:
        ways[PACKED] = (order, {"use_remove_padding": True})
    for name, (loss, case) in LOSSES.items():
        for way, (arranged, changes) in ways.items():
            if way == SWAPPED and name != next(iter(LOSSES)):
                continue
            found["gradients"][name, way] = step.gradient(arranged, loss, case, **changes)
            found["executed"][name, way] = list(step.executed)
    found["seconds"] = list(step.worker.seconds)
    found["log_probs"] = {}
    for way in (EACH, PLANNED, PACKED)[: 2 + packs]:
        arranged, changes = ways[way]
        found["log_probs"][way] = step.log_probs(arranged, **changes)
        found["executed"]["log-probs", way] = list(step.executed)
    return found


def main(engine_name: str, dtypes: str, model: str, results: str) -> None:
    engine = import_module(f"engine.{engine_name}")
    packs = engine_name == "fsdp2"  # verl's Megatron engine takes padded rows only, on a CPU
    engine.TrainingWorker = TimedTrainingWorker
    if packs:
        of_verl = engine.HFModelConfig
        engine.HFModelConfig = lambda **settings: of_verl(**{**settings, "use_remove_padding": True})
    install_planned_micro_batches()
    torch.manual_seed(0)
    rows = packed_step.rows_of_the_step(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64))
    measured: dict[str, Any] = {}
    for dtype in dtypes.split(","):
        step = Step(engine, Path(model), dtype, rows)
        measured[dtype] = measure(step, packs)
        if packs and step.ranks == 1:
            order = planned(1)
            measured["leak"] = leaks(step, order, range(order.row.size), reset=True)
            measured["leak of a fault"] = leaks(step, order, range(4), reset=False)
    torch.save(measured, Path(results) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
