"""Puts the DPPO trainer in the place of `RayPPOTrainer` in verl's entry point for `trainer.use_v1=false`.

verl names that class in the code of its task runner and has no registry for it. The runner is pickled in the driver
with the globals that its code names, so that the name must be bound anew there, before the runner is sent off.
"""

import dis
import inspect
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

NAME = "RayPPOTrainer"


class ChosenRayPPOTrainer(RayPPOTrainer):
    """verl's own trainer, to build and to derive from; but building it makes DPPO's where `algorithm.dppo` is there."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build DPPO's trainer, unless the class is derived from, or the configuration has no `algorithm.dppo`."""
        config = kwargs["config"] if "config" in kwargs else args[0]
        if cls is not ChosenRayPPOTrainer or OmegaConf.select(config, "algorithm.dppo") is None:
            return super().__new__(cls)
        from verl_dppo.training.ray_trainer import DPPORayPPOTrainer

        return DPPORayPPOTrainer(*args, **kwargs)


def install(main_ppo_v0: ModuleType) -> None:
    """Bind the name that verl's task runner looks its trainer up by to `ChosenRayPPOTrainer`.

    Args:
        main_ppo_v0: verl's module of that name, just imported.

    Raises:
        RuntimeError: the module is not as verl 0.9 has it, so that the runner would not find the new binding.
    """
    if is_installed(main_ppo_v0):
        return
    bound = getattr(main_ppo_v0, NAME, None)
    if bound is not RayPPOTrainer:
        raise RuntimeError(f"{main_ppo_v0.__name__}.{NAME} is {bound}, not verl's own class")
    # Ray wraps methods to trace them.
    run = inspect.unwrap(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class.run)
    looked_up = any(step.opname == "LOAD_GLOBAL" and step.argval == NAME for step in dis.get_instructions(run))
    if not looked_up or run.__globals__ is not vars(main_ppo_v0):
        raise RuntimeError(f"the task runner of {main_ppo_v0.__name__} does not look {NAME} up in its module")
    setattr(main_ppo_v0, NAME, ChosenRayPPOTrainer)


def is_installed(main_ppo_v0: ModuleType) -> bool:
    """Whether the task runner of verl's module would get its trainer from `ChosenRayPPOTrainer`."""
    return getattr(main_ppo_v0, NAME, None) is ChosenRayPPOTrainer
