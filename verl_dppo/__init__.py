"""Dynamic Pruning Policy Optimization (arXiv 2603.04135) as a plugin of verl.

Importing this package imports neither torch nor verl: verl loads it in every process it starts. The names below that
need them are imported when they are asked for.
"""

from importlib import import_module
from typing import Any

from verl_dppo._version import __version__

__all__ = ["DPPORayPPOTrainer", "DPPOTrainer", "__version__", "dppo_loss", "prune_data_proto"]

_MODULES = {
    "DPPOTrainer": "verl_dppo.training.trainer",
    "DPPORayPPOTrainer": "verl_dppo.training.ray_trainer",
    "dppo_loss": "verl_dppo.training.loss",
    "prune_data_proto": "verl_dppo.training.data_proto",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
