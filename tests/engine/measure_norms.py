"""One rank of a probe: `python -m engine.measure_norms ENGINE DTYPE MODEL RESULT`, six completions over the ranks."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from engine.batches import batch, completions
from engine.cases import MEMBERS, ROWS, Case
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, WEIGHT, dppo_loss
from verl_dppo.training.probe import MEASURED, gradient_norms

CASES = (Case(), Case("gspo", kl=False, entropy=False), Case("rloo", kl=False))


def parameters(worker):
    chunks = worker.engine.module if isinstance(worker.engine.module, list) else [worker.engine.module]
    found = [p.detach() for chunk in chunks for p in chunk.parameters()]
    return torch.cat([(p.full_tensor() if hasattr(p, "full_tensor") else p).flatten().clone() for p in found])


def one_by_one(engine, worker, data, rows):
    """The norm of each row of rank 0 from the gradient itself; the other ranks have theirs at weight 0."""
    norms = []
    for row in range(rows):
        one = tu.index_select_tensor_dict(data, [row])
        one[WEIGHT] = torch.tensor([float(dist.get_rank() == 0)], dtype=torch.float64)
        one[BATCH_NUM_TOKENS] = one[GLOBAL_BATCH_SIZE] = torch.ones(1, dtype=torch.float64)
        tu.assign_non_tensor(one, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        worker.engine.optimizer_zero_grad()
        with worker.engine.train_mode():
            worker.engine.forward_backward_batch(one, worker.loss_fn)
            norms.append(float(engine.gradient(worker.engine).norm()))
    return norms


def main(engine_name, dtype, model, result):
    engine = import_module(f"engine.{engine_name}")
    torch.manual_seed(0)
    rows = completions(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64))
    worker = engine.worker(Path(model), dtype)
    for group in worker.engine.optimizer.param_groups:
        group["lr"] = 1.0  # a step would show
    ranks, rank = worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank()
    before, optimizer = parameters(worker), worker.engine.optimizer
    measured = {}
    for case in CASES:
        places = [(row, 0) for row in range(rank, ROWS, ranks)]  # turn i of the probe is row i
        data = batch(places, rows, case, ROWS, [tuple(MEMBERS[1][0])])
        worker.set_loss_fn(partial(dppo_loss, config=engine.actor_config(**case.actor_settings())))
        tu.assign_non_tensor(data, **{MEASURED: 5})
        norms = gradient_norms(worker, data).tolist()
        gathered = [None] * ranks
        dist.all_gather_object(gathered, norms)
        turns = [gathered[turn % ranks][turn // ranks] for turn in range(ROWS)]
        expected = one_by_one(engine, worker, data, len(places))
        measured[case.name] = {"turns": turns, "of_rank_0": expected}
        worker.engine.optimizer_zero_grad()
    moved = float((parameters(worker) - before).abs().max())
    same = worker.engine.optimizer is optimizer
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"cases": measured, "moved": moved, "same": same}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
