"""A worker of verl whose gradients are read where its optimiser would step, so that every run meets the same
parameters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine.cases import Case
from tensordict import TensorDict


class GradientReader:
    """A worker of one precision, and the gradients that it gives."""

    def __init__(self, engine: Any, model: Path, dtype: str) -> None:
        self.engine = engine
        self.worker = engine.worker(model, dtype)
        self.ranks = self.worker.engine.get_data_parallel_size()
        self.rank = self.worker.engine.get_data_parallel_rank()
        self.worker.engine.optimizer_step = self._read
        self.gradients: list[torch.Tensor] = []

    def _read(self) -> float:
        self.gradients.append(self.engine.gradient(self.worker.engine))
        return 0.0

    def train(self, data: TensorDict, loss: Callable[..., Any], case: Case) -> torch.Tensor:
        """Return (mini-batches, parameters): the gradients of an update under a loss with the settings of a case."""
        self.gradients.clear()
        self.worker.set_loss_fn(partial(loss, config=self.engine.actor_config(**case.actor_settings())))
        self.worker.train_mini_batch(data)
        return torch.stack(self.gradients)
