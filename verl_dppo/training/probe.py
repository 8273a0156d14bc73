"""Measures the gradient norm of single completions through the real engine, without an optimiser step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_dppo.training.loss import BATCH_NUM_TOKENS, GLOBAL_BATCH_SIZE, WEIGHT

NORM = "dppo_gradient_norm"
"""Column that the probe writes: (rows,) float64, gradient norm of the completion's loss term with denominators of 1."""

MEASURED = "dppo_measured"
"""Number of rows, over all ranks, that the probe is asked to measure; the others only keep the ranks in step."""


class _HeldOptimizer:
    """The optimiser of an engine, whose step computes and clips as ever but moves no parameter."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self) -> Any:
        if not hasattr(self._optimizer, "get_grad_norm"):
            return None  # a torch optimiser: the engine has taken the norm itself
        self._optimizer.prepare_grads()
        return True, self._optimizer.get_grad_norm(), None


@contextmanager
def _held(engine: Any) -> Iterator[None]:
    optimizer, scaler = engine.optimizer, getattr(engine, "scaler", None)
    engine.optimizer = _HeldOptimizer(optimizer)
    if scaler is not None:
        engine.scaler = None
    try:
        yield
    finally:
        engine.optimizer = optimizer
        if scaler is not None:
            engine.scaler = scaler
        engine.optimizer_zero_grad()


def gradient_norms(worker: TrainingWorker, data: TensorDict) -> torch.Tensor:
    """Return (rows,) float64 gradient norms of this rank's rows under the worker's loss; NaN where not measured.

    Rows are measured one after another, first row of every rank, second row of every rank, and so on, until MEASURED
    rows are done. All ranks of an engine work on one gradient, so that while the row of one is measured the others
    run theirs with weight 0.

    Args:
        worker: verl's training worker, its loss being `dppo_loss`.
        data: this rank's rows, with the columns of an update. Ranks hold the same number of rows.
    """
    engine, measured = worker.engine, int(tu.pop(data, key=MEASURED))
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    tu.assign_non_tensor(
        data,
        global_batch_size=1,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        max_token_len_per_gpu=worker.engine_config.max_token_len_per_gpu,
        use_remove_padding=worker.model_config.get("use_remove_padding", False),
        use_fused_kernels=worker.engine_config.use_fused_kernels,
    )
    norms = torch.full((len(data),), torch.nan, dtype=torch.float64)
    with engine.train_mode(), _held(engine):
        for turn in range(min(measured, len(data) * ranks)):
            row, owner = divmod(turn, ranks)
            one = tu.index_select_tensor_dict(data, [row])
            one[WEIGHT] = torch.tensor([float(owner == rank)], dtype=torch.float64)
            one[BATCH_NUM_TOKENS] = one[GLOBAL_BATCH_SIZE] = torch.ones(1, dtype=torch.float64)
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(one, worker.loss_fn, forward_only=False)
            norm = float(engine.optimizer_step())
            if owner == rank:
                norms[row] = norm
    return norms
