"""The platform `cpu` for verl, and what torch lacks on a CPU for verl to run unchanged.

Each `patch_*` changes one thing and says why. None touches verl's own code; all are safe to apply twice.
"""

import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_dppo.post_import import when_imported


class PlatformCPU(PlatformBase):
    """verl's view of a machine without an accelerator: `n_gpus_per_node` counts processes."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        """A CPU is always there."""
        return True

    def current_device(self) -> Any:
        """Return the device, not its index: an int means cuda:<int> to `Tensor.to`."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One device for each process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch: there is one generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The allocator is the C library's."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """No compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return torch's backend for CPU tensors."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Ray sets this one for the logical GPUs; nothing reads it."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler ranges."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        """verl's resource pools count Ray's `GPU` or `NPU` only, so a process books a logical GPU."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Ray may set what it likes: there is no device to hide."""
        return []

    def is_ipc_supported(self) -> bool:
        """No device memory to share."""
        return False

    def cudart(self) -> None:
        """No CUDA runtime."""
        return None


def register() -> None:
    """Register the platform and apply the patches."""
    if PlatformRegistry.get("cpu") is not PlatformCPU:
        PlatformRegistry.register(platform="cpu")(PlatformCPU)
    patch_torch_cpu()
    patch_init_process_group()
    when_imported("torch.distributed.fsdp", patch_offload_policy)


def _peak_memory(*_: Any, **__: Any) -> int:
    """Peak resident bytes of this process, for verl's memory metrics."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _nothing(*_: Any, **__: Any) -> None:
    return None


def patch_torch_cpu() -> None:
    """Give `torch.cpu` the calls of `torch.cuda` that verl makes on its device module."""
    stand_ins: dict[str, Callable[..., Any]] = {
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "reset_peak_memory_stats": _nothing,
        "reset_accumulated_memory_stats": _nothing,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "memory_allocated": _peak_memory,
        "memory_reserved": _peak_memory,
        "max_memory_allocated": _peak_memory,
        "max_memory_reserved": _peak_memory,
        "mem_get_info": lambda *_: (0, 0),
        "get_device_name": lambda *_: "CPU",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    for name, stand_in in stand_ins.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, stand_in)


def share_of_cores(processes: int) -> int:
    """Return how many threads each of `processes` on this machine gets, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, processes))


def patch_init_process_group() -> None:
    """Let a trainer process join its group over gloo, with its share of the cores.

    verl asks for "cpu:gloo,<device>:<backend>", here "cpu:gloo,cpu:gloo", which torch refuses as a duplicate. And Ray
    starts every worker with OMP_NUM_THREADS=1, which would train on one core; only trainer processes come this way.
    """
    original = dist.init_process_group
    if getattr(original, "_verl_dppo", False):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str):
            backend = ",".join(dict.fromkeys(backend.split(",")))
        torch.set_num_threads(share_of_cores(int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1"))))
        return original(backend, *args, **kwargs)

    init_process_group._verl_dppo = True  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group


def patch_offload_policy(fsdp: ModuleType) -> None:
    """Build `CPUOffloadPolicy` without pinned memory.

    verl offloads the reference policy with `pin_memory=True`, and pinning needs an accelerator.
    """
    policy = fsdp.CPUOffloadPolicy
    if getattr(policy.__init__, "_verl_dppo", False):
        return

    def init(self: Any, pin_memory: bool = False) -> None:
        object.__setattr__(self, "pin_memory", False)

    init._verl_dppo = True  # type: ignore[attr-defined]
    policy.__init__ = init
