"""Each thing of verl or torch that CPU mode changes is still there to be changed, and the change does what it says."""

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp

from verl_dppo.cpu import platform, polling


def in_cpu_mode(code: str) -> str:
    """Run `code` in a fresh process with the one switch on, and return what it prints last."""
    env = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    env["VERL_USE_EXTERNAL_MODULES"] = "verl_dppo_enable_cpu"
    lines = ["import sys, types, verl_dppo.cpu", "m = types.ModuleType('verl_dppo_enable_cpu')"]
    lines += ["sys.modules[m.__name__] = m", "import verl", "verl_dppo.cpu.enable()", "verl_dppo.cpu.enable()", code]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_importing_the_package_does_nothing():
    code = (
        "import sys, os, verl_dppo.cpu; "
        "print('torch' in sys.modules, 'verl' in sys.modules, 'VERL_ENGINE_DEVICE' in os.environ)"
    )
    env = {k: v for k, v in os.environ.items() if k != "VERL_ENGINE_DEVICE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "False"]


def test_enabling_imports_neither_trainer_nor_rollout():
    waiting = (
        "('verl.trainer.ppo.v1.replay_buffer', 'verl.experimental.agent_loop.agent_loop', 'verl_dppo.cpu.rollout')"
    )
    assert in_cpu_mode(f"print([name for name in {waiting} if name in sys.modules])") == "[]"


def test_verl_finds_the_platform_and_the_engine_override():
    code = (
        "import os; from verl.utils.device import get_device_name, get_nccl_backend; "
        "print(get_device_name(), get_nccl_backend(), os.environ['VERL_ENGINE_DEVICE'])"
    )
    assert in_cpu_mode(code) == "cpu gloo cuda"


def test_verl_finds_the_training_engine():
    code = (
        "from verl.workers.engine.base import EngineRegistry; import verl.workers.engine; "
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)"
    )
    assert in_cpu_mode(code) == "FSDPEngineWithLMHead"


def test_verl_finds_the_rollout():
    code = (
        "from verl.workers.rollout.base import get_rollout_class; "
        "from verl.workers.rollout.replica import get_rollout_replica_class; "
        "print(get_rollout_class('hf_cpu').__module__, get_rollout_replica_class('hf_cpu').__module__)"
    )
    assert in_cpu_mode(code) == "verl_dppo.cpu.rollout verl_dppo.cpu.rollout"


def test_verl_finds_the_agent_loop():
    code = (
        "from verl.experimental.agent_loop.agent_loop import _agent_loop_registry; import hydra; "
        "print(hydra.utils.get_class(_agent_loop_registry['dppo_cpu_single_turn']['_target_']).__name__)"
    )
    assert in_cpu_mode(code) == "SeededSingleTurnAgentLoop"


def test_the_registered_agent_loop_reads_as_verls_own_decorator_writes_it():
    from verl.experimental.agent_loop import agent_loop

    from verl_dppo.cpu import registration
    from verl_dppo.cpu.agent_loop import SeededSingleTurnAgentLoop

    agent_loop.register("written by verl")(SeededSingleTurnAgentLoop)
    registration._register_agent_loop(agent_loop)
    written = agent_loop._agent_loop_registry.pop("written by verl")
    assert agent_loop._agent_loop_registry[registration.AGENT_LOOP] == written


def test_the_poll_interval_is_still_a_default_that_verl_does_not_set():
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    init = replay_buffer.ReplayBuffer.__init__
    others = {k: p.default for k, p in inspect.signature(init).parameters.items() if k != "poll_interval"}
    before = init.__defaults__
    try:
        polling.shorten_poll_interval(replay_buffer)
        polling.shorten_poll_interval(replay_buffer)
        after = {k: p.default for k, p in inspect.signature(init).parameters.items()}
        assert after.pop("poll_interval") == polling.POLL_SECONDS
        assert after == others
    finally:
        init.__defaults__ = before
    assert "poll_interval" not in inspect.getsource(trainer_base.PPOTrainer._build_replay_buffer)
    assert "time.sleep(self.poll_interval)" in inspect.getsource(replay_buffer.ReplayBuffer._wait_for_next_poll)


def test_torch_still_refuses_the_backend_that_verl_asks_for_and_the_patch_repairs_it(monkeypatch, tmp_path):
    from verl.utils import distributed

    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in inspect.getsource(distributed)
    monkeypatch.setattr(dist, "init_process_group", dist.init_process_group)
    threads = torch.get_num_threads()
    where = {"init_method": f"file://{tmp_path}/group", "rank": 0, "world_size": 1}
    if not getattr(dist.init_process_group, "_verl_dppo", False):
        with pytest.raises(ValueError, match=r"[Dd]uplicate"):
            dist.init_process_group("cpu:gloo,cpu:gloo", **where)
    platform.patch_init_process_group()
    try:
        dist.init_process_group("cpu:gloo,cpu:gloo", **where)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 1
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def test_verl_still_pins_the_offloaded_reference_and_the_patch_does_not(monkeypatch):
    from verl.workers.engine.fsdp import transformer_impl

    assert "CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(transformer_impl)
    monkeypatch.setattr(fsdp.CPUOffloadPolicy, "__init__", fsdp.CPUOffloadPolicy.__init__)
    platform.patch_offload_policy(SimpleNamespace(CPUOffloadPolicy=fsdp.CPUOffloadPolicy))
    assert fsdp.CPUOffloadPolicy(pin_memory=True).pin_memory is False


def test_the_patches_do_not_stack(monkeypatch):
    monkeypatch.setattr(dist, "init_process_group", dist.init_process_group)
    platform.patch_init_process_group()
    once = dist.init_process_group
    platform.patch_init_process_group()
    assert dist.init_process_group is once


def test_torch_cpu_answers_what_verl_asks_its_device_module():
    platform.patch_torch_cpu()
    torch.cpu.empty_cache()
    state = torch.cpu.get_rng_state()
    first = torch.rand(3)
    torch.cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert torch.cpu.max_memory_allocated() > 2**20


def test_every_method_of_verls_platform_is_answered():
    made = platform.PlatformCPU()
    assert made.is_available()
    assert made.current_device() == torch.device("cpu")
    assert made.ray_resource_options(1) == {"num_gpus": 1}
