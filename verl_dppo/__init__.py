"""Dynamic Pruning Policy Optimization (arXiv 2603.04135) as a plugin of verl.

Importing this package imports neither torch nor verl: verl loads it in every process it starts.
"""

from verl_dppo._version import __version__

__all__ = ["__version__"]
