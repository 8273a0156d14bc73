"""Puts the DPPO trainer in the place of `RayPPOTrainer` in verl's entry point for `trainer.use_v1=false`.

verl names that class in the code of its task runner and has no registry for it. The runner is pickled in the driver
with the globals that its code names, so that the name must be bound anew there, before the runner is sent off.
"""

import inspect
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

NAME = "RayPPOTrainer"


def make_ray_trainer(*args: Any, **kwargs: Any) -> Any:
    """Return the trainer for a configuration: DPPO's where `algorithm.dppo` is there, else verl's own."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    config = kwargs["config"] if "config" in kwargs else args[0]
    if OmegaConf.select(config, "algorithm.dppo") is None:
        return RayPPOTrainer(*args, **kwargs)
    from verl_dppo.training.ray_trainer import DPPORayPPOTrainer

    return DPPORayPPOTrainer(*args, **kwargs)


def install(main_ppo_v0: ModuleType) -> None:
    """Bind the name that verl's task runner looks its trainer up by to `make_ray_trainer`.

    Args:
        main_ppo_v0: verl's module of that name, just imported.

    Raises:
        RuntimeError: the module is not as verl 0.9 has it, so that the runner would not find the new binding.
    """
    if is_installed(main_ppo_v0):
        return
    bound = getattr(main_ppo_v0, NAME, None)
    if getattr(bound, "__module__", None) != "verl.trainer.ppo.ray_trainer":
        raise RuntimeError(f"{main_ppo_v0.__name__}.{NAME} is {bound}, not verl's own class")
    run = inspect.unwrap(main_ppo_v0.TaskRunner.__ray_metadata__.modified_class.run)  # Ray wraps methods to trace them
    if NAME not in run.__code__.co_names or run.__globals__ is not vars(main_ppo_v0):
        raise RuntimeError(f"the task runner of {main_ppo_v0.__name__} does not look {NAME} up in its module")
    setattr(main_ppo_v0, NAME, make_ray_trainer)


def is_installed(main_ppo_v0: ModuleType) -> bool:
    """Whether the task runner of verl's module would get its trainer from `make_ray_trainer`."""
    return getattr(main_ppo_v0, NAME, None) is make_ray_trainer
