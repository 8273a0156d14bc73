"""Run verl on a CPU: FSDP2 over gloo, and a rollout on transformers. For demos, tests and CI.

`VERL_PLATFORM=cpu` is the one switch: the plugin calls `enable()` when it is set and never loads this package
otherwise. Importing the package does nothing.
"""

import os


def enable() -> None:
    """Teach this process's verl the platform `cpu` and the rollout `hf_cpu`. Safe to call again.

    verl loads its plugins in every process it starts, so every process comes through here.
    """
    # verl picks a training engine by device and knows `cuda` and `npu` only. Its FSDP engine is device-agnostic (it
    # asks the platform), so the `cuda` entry is the right one; this variable is verl's own override for that look-up.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")

    # Ray's workers inherit this. OpenMP threads spin at a barrier by default, which costs several times the work itself
    # where processes share few cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from verl_dppo.cpu import megatron, platform, polling, registration

    platform.register()
    registration.register()
    polling.register()
    megatron.register()
