"""Say what of this plugin is registered with the installed verl, in which versions, and why not where it is not.

verl loads plugins silently and goes on without those that fail. This command looks at what has arrived in verl's own
registries, in a process like those that verl starts, and ends with status 1 when anything is missing.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.resources import files

PACKAGES = ("verl-dppo", "verl", "torch", "ray", "hydra-core", "TransferQueue", "tensordict", "transformers")
OPTIONAL = ("vllm", "megatron-core", "mbridge", "flash-attn", "reasoning-gym")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""
    parser.set_defaults(command="check")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _entry_point() -> str:
    found = [point.value for point in entry_points(group="verl.plugins") if point.name == "dppo"]
    if not found:
        raise RuntimeError("pip install this package: its entry point in the group verl.plugins is not there")
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and "dppo" not in {name.strip() for name in policy.split(",")}:
        raise RuntimeError(f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading it; unset it or add dppo")
    return found[0]


def _verl_version() -> str:
    from verl_dppo.training.refusals import SUPPORTED_VERL, check_verl_version

    check_verl_version(version("verl"))
    return f"{version('verl')} is in {SUPPORTED_VERL}"


def _trainer() -> str:
    from verl.trainer.ppo.v1 import get_trainer_cls

    found = get_trainer_cls("dppo")
    return f"{found.__module__}.{found.__name__}"


def _ray_trainer() -> str:
    from verl.trainer import main_ppo_v0

    from verl_dppo.training.classic_entry import is_installed

    if not is_installed(main_ppo_v0):
        raise RuntimeError("verl's task runner would build its own RayPPOTrainer")
    found = import_module("verl_dppo.training.ray_trainer").DPPORayPPOTrainer
    return f"{found.__module__}.{found.__name__}"


def _estimator() -> str:
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    found = get_adv_estimator_fn("dppo")
    return f"{found.__module__}.{found.__name__}"


def _choice() -> str:
    from hydra import compose, initialize_config_module

    names = sorted(file.name[: -len(".yaml")] for file in files("verl_dppo.config").joinpath("algorithm").iterdir())
    with initialize_config_module("verl.trainer.config", version_base=None):
        for name in names:
            compose("ppo_trainer", overrides=[f"algorithm={name}"])
    return f"{', '.join(names)} compose"


def _cpu_mode() -> str:
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return "off (VERL_PLATFORM=cpu switches it on)"
    from verl.utils.device import get_device_name

    if get_device_name() != "cpu":
        raise RuntimeError(f"VERL_PLATFORM=cpu, but verl runs on {get_device_name()}")
    return "on"


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("entry point verl.plugins: dppo", _entry_point),
    ("verl version", _verl_version),
    ("trainer.v1.trainer_mode=dppo", _trainer),
    ("trainer.use_v1=false", _ray_trainer),
    ("adv_estimator=dppo", _estimator),
    ("algorithm=dppo", _choice),
    ("CPU mode", _cpu_mode),
)


def run(_: argparse.Namespace) -> int:
    """Print versions and the state of each registration; return 0 if all are there, else 1."""
    print(f"python {platform.python_version()}")
    for package in (*PACKAGES, *OPTIONAL):
        print(f"{package} {_version(package)}")
    failed = 0
    for name, check in CHECKS:
        try:
            state = f"ok    {name}: {check()}"
        except Exception as error:
            failed += 1
            state = f"FAIL  {name}: {type(error).__name__}: {error}"
        print(state)
    # Not imported here: that would register what verl was told not to load.
    for what, failure in getattr(sys.modules.get("verl_dppo.plugin"), "failures", {}).items():
        failed += 1
        print(f"FAIL  {what} could not be registered: {type(failure).__name__}: {failure}")
    return 1 if failed else 0
