"""verl's worker for the actor, which follows planned micro-batches, tells how long it worked, and can be probed."""

import time
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_dppo.training.micro_batches import install_planned_micro_batches
from verl_dppo.training.probe import NORM, gradient_norms

BUSY_SECONDS = "dppo_busy_seconds"
"""Metric of an update on CPUs: [data-parallel rank][mini-batch], processor seconds."""

WALL_SECONDS = "dppo_wall_seconds"
"""The same in seconds, waiting for other ranks included. Only where every rank has one thread: processor seconds are
those of all threads."""


class TimedTrainingWorker(TrainingWorker):
    """`TrainingWorker` that remembers how long its mini-batches took."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: list[tuple[float, float]] = []
        """Of each mini-batch since the list was emptied: processor seconds, and seconds."""

    def train_batch(self, data: TensorDict) -> TensorDict | None:
        """Let verl train on a mini-batch."""
        busy, wall = time.process_time(), time.perf_counter()
        output = super().train_batch(data)
        self.seconds.append((time.process_time() - busy, time.perf_counter() - wall))
        return output


class DPPOWorker(ActorRolloutRefWorker):
    """`ActorRolloutRefWorker` with what DPPO adds to it."""

    actor_worker_cls = TimedTrainingWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install_planned_micro_batches()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict | None:
        """Let verl update the actor, and on CPUs add the seconds of all ranks to its metrics.

        Processor time leaves out what a rank waits for. A GPU has no such clock: ranks of FSDP wait inside kernels.
        """
        self.actor.seconds.clear()
        output = super().update_actor(data)
        if get_device_name() != "cpu":
            return output
        group = self.actor.engine.get_data_parallel_group()
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, (torch.get_num_threads(), self.actor.seconds), group=group)
        if output is not None:
            names = (BUSY_SECONDS, WALL_SECONDS) if all(threads == 1 for threads, _ in of_ranks) else (BUSY_SECONDS,)
            seconds = {
                name: [[of_mini_batch[k] for of_mini_batch in rank] for _, rank in of_ranks]
                for k, name in enumerate(names)
            }
            tu.assign_non_tensor(output, metrics={**tu.get(output, "metrics"), **seconds})
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def probe_gradient_norms(self, data: TensorDict) -> TensorDict | None:
        """Write the column NORM for rows that are ready for an update; see `gradient_norms`."""
        norms = gradient_norms(self.actor, data)
        if not self.actor.engine.is_mp_src_rank_with_outputs():
            return None
        return TensorDict({NORM: norms}, batch_size=len(data))
