"""Answer for CUDA with the CPU, for code that names CUDA where it means "the device": megatron-core.

Installed in a process at the moment that verl builds a Megatron engine in CPU mode, never before: until then torch
keeps saying the truth. Each `patch_*` changes one thing; all are safe to apply twice.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def install() -> None:
    """Apply all patches of this file."""
    if getattr(torch.Tensor.to, "_verl_dppo", False):
        return
    patch_device_calls()
    patch_factories()
    patch_moves()
    patch_type_names()


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


def patch_device_calls() -> None:
    """Let `torch.cuda` speak of the CPU: its device, its random state, its memory (none is counted)."""
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        # Not torch.manual_seed, which calls torch.cuda's in turn.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": torch.default_generator.manual_seed,
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), _nothing),
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            _zero,
        ),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing


def _on_cpu(device: Any) -> Any:
    """Return the CPU for a CUDA device by name, and anything else as it is."""
    return CPU if isinstance(device, str | torch.device) and str(device).startswith("cuda") else device


def _with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)

    return call


def patch_factories() -> None:
    """Make `torch.zeros(..., device="cuda")` and its like make a tensor on the CPU."""
    for name in FACTORIES:
        setattr(torch, name, _with_device_on_cpu(getattr(torch, name)))


def patch_moves() -> None:
    """Let tensors and modules stay where they are when sent to CUDA."""
    move = torch.Tensor.to

    @functools.wraps(move)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return move(self, *map(_on_cpu, args), **kwargs)

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    to._verl_dppo = True  # type: ignore[attr-defined]
    torch.Tensor.to = to  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = stay  # type: ignore[method-assign]
    torch.nn.Module.cuda = stay  # type: ignore[method-assign]


def patch_type_names() -> None:
    """Call a `torch.FloatTensor` a `torch.cuda.FloatTensor`: megatron-core's optimizers compare the name."""
    name_of = torch.Tensor.type

    @functools.wraps(name_of)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = name_of(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
