"""Enter the CPU rollout and its agent loop into verl's registries.

Each registry waits until verl imports the module that holds it: a process that never generates pays nothing.
"""

from types import ModuleType

from verl_dppo.post_import import when_imported

ROLLOUT = "hf_cpu"
AGENT_LOOP = "dppo_cpu_single_turn"


def register() -> None:
    """Register `actor_rollout_ref.rollout.name=hf_cpu` and its default agent loop."""
    when_imported("verl.workers.rollout.base", _register_adapter)
    when_imported("verl.workers.rollout.replica", _register_replica)
    when_imported("verl.experimental.agent_loop.agent_loop", _register_agent_loop)


def _register_adapter(base: ModuleType) -> None:
    # verl has no function for this registry.
    base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "verl_dppo.cpu.rollout.ServerAdapter"


def _register_replica(replica: ModuleType) -> None:
    def load() -> type:
        from verl_dppo.cpu.rollout import Replica

        return Replica

    replica.RolloutReplicaRegistry.register(ROLLOUT, load)


def _register_agent_loop(agent_loop: ModuleType) -> None:
    # What verl's @register writes, without importing the class (and transformers) now: hydra imports it by this name.
    target = {"_target_": "verl_dppo.cpu.agent_loop.SeededSingleTurnAgentLoop"}
    agent_loop._agent_loop_registry[AGENT_LOOP] = target
