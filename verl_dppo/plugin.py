"""The `verl.plugins` entry point: verl imports this module in every process that imports verl.

It must stay light, and a fault in it must not stop runs that never asked for DPPO. verl swallows what a plugin
raises, so faults are kept in `failures`, which `verl-dppo check` prints and which no DPPO run starts with; where the
trainer itself is missing, verl's own "Unknown trainer 'dppo'" stops it.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from verl_dppo.post_import import when_imported

failures: dict[str, Exception] = {}
"""What could not be registered in this process, and why."""


def _attempt(what: str, action: Callable[[], object]) -> None:
    """Run one registration; remember and log a failure instead of raising it into verl's import."""
    try:
        action()
    except Exception as error:
        failures[what] = error
        logging.getLogger(__name__).exception("verl_dppo could not register %s; see `verl-dppo check`", what)


def _import_when(verl_module: str, own_module: str, what: str) -> None:
    """Import a module of ours, which registers itself, once verl has imported the module it registers with."""

    def register(_: ModuleType) -> None:
        _attempt(what, lambda: import_module(own_module))

    when_imported(verl_module, register)


def _enable_cpu_mode() -> None:
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        import_module("verl_dppo.cpu").enable()


def _take_the_place_of_ray_ppo_trainer(main_ppo_v0: ModuleType) -> None:
    def install() -> None:
        import_module("verl_dppo.training.classic_entry").install(main_ppo_v0)

    _attempt("trainer dppo with trainer.use_v1=false", install)


_attempt("CPU mode", _enable_cpu_mode)
_attempt("algorithm=dppo", lambda: import_module("verl_dppo.training.hydra_source").register())
_import_when("verl.trainer.ppo.core_algos", "verl_dppo.training.advantage", "advantage estimator dppo")
_import_when("verl.trainer.ppo.v1", "verl_dppo.training.trainer", "trainer dppo")
when_imported("verl.trainer.main_ppo_v0", _take_the_place_of_ray_ppo_trainer)
