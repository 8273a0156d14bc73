"""Everything that touches verl: the hook points of its trainers, losses and configuration.

verl's trainers load ours as soon as they are imported themselves. If a module of this package is what imports verl in
the first place, that must happen before the module is half there.
"""

from verl_dppo import plugin

if not plugin.registering:
    import verl.trainer.ppo.v1  # noqa: F401
