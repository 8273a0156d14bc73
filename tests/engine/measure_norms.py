"""One rank of a probe: `python -m engine.measure_norms MODEL RESULT`, six completions spread over the ranks."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from engine import fsdp2
from engine.batches import batch, completions
from engine.cases import MEMBERS, ROWS, Case
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from verl_dppo.training.loss import BATCH_NUM_TOKENS, WEIGHT, dppo_loss
from verl_dppo.training.probe import MEASURED, gradient_norms

CASES = (Case(), Case("gspo", kl=False, entropy=False), Case("rloo", kl=False))


def parameters(worker):
    return torch.cat([p.detach().full_tensor().flatten() for p in worker.engine.module.parameters()])


def one_by_one(worker, data, rows):
    """The norm of each row of rank 0 from the gradient itself; the other ranks have theirs at weight 0."""
    norms = []
    for row in range(rows):
        one = tu.index_select_tensor_dict(data, [row])
        one[WEIGHT] = torch.tensor([float(dist.get_rank() == 0)], dtype=torch.float64)
        one[BATCH_NUM_TOKENS] = torch.ones(1, dtype=torch.float64)
        tu.assign_non_tensor(one, global_batch_size=1, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
        worker.engine.optimizer_zero_grad()
        with worker.engine.train_mode():
            worker.engine.forward_backward_batch(one, worker.loss_fn)
            norms.append(float(fsdp2.gradient(worker.engine).norm()))
    return norms


def main(model, result):
    torch.manual_seed(0)
    rows = completions(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64))
    worker = fsdp2.worker(Path(model), "float64")
    ranks, rank = worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank()
    before, optimizer = parameters(worker), worker.engine.optimizer
    measured = {}
    for case in CASES:
        places = [(row, 0) for row in range(rank, ROWS, ranks)]  # turn i of the probe is row i
        data = batch(places, rows, case, ROWS, [tuple(MEMBERS[1][0])])
        worker.set_loss_fn(partial(dppo_loss, config=fsdp2.actor_config(**case.actor_settings())))
        tu.assign_non_tensor(data, **{MEASURED: 5})
        norms = gradient_norms(worker, data).tolist()
        gathered = [None] * ranks
        dist.all_gather_object(gathered, norms)
        turns = [gathered[turn % ranks][turn // ranks] for turn in range(ROWS)]
        expected = one_by_one(worker, data, len(places))
        measured[case.name] = {"turns": turns, "of_rank_0": expected}
        worker.engine.optimizer_zero_grad()
    moved = float((parameters(worker) - before).abs().max())
    left = any(p.grad is not None and bool(p.grad.full_tensor().any()) for p in worker.engine.module.parameters())
    state = len(optimizer.state)
    same = worker.engine.optimizer is optimizer
    if dist.get_rank() == 0:
        Path(result).write_text(
            json.dumps(
                {"cases": measured, "moved": moved, "gradient_left": left, "optimizer_state": state, "same": same}
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
