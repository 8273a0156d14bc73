import os
import subprocess
import sys

import pytest


def python(code, **environment):
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


REGISTERED = """
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
print(get_trainer_cls("dppo").__name__, get_adv_estimator_fn("dppo").__module__)
"""


def test_verl_finds_trainer_and_estimator_through_the_entry_point():
    assert python(REGISTERED).stdout.split() == ["DPPOTrainer", "verl_dppo.training.advantage"]


def test_plain_verl_is_left_alone_until_its_trainers_are_imported():
    code = "import sys, verl; print('verl_dppo.plugin' in sys.modules, 'verl_dppo.training.trainer' in sys.modules)"
    assert python(code).stdout.split() == ["True", "False"]


def test_without_the_plugin_the_trainer_is_unknown_and_verl_says_so():
    result = python(REGISTERED, VERL_USE_EXTERNAL_PLUGINS="none")
    assert "Unknown trainer 'dppo'" in result.stderr


def test_a_fault_in_the_trainer_neither_stops_verl_nor_goes_unheard():
    """A module of ours that cannot be imported stands for any fault; verl's own trainers must be there all the same."""
    code = """
import sys
sys.modules["verl_dppo.training.metrics"] = None
from verl.trainer.ppo.v1 import get_trainer_cls
from verl_dppo import plugin
print(get_trainer_cls("sync").__name__, list(plugin.failures))
get_trainer_cls("dppo")
"""
    result = python(code)
    assert "PPOTrainerSync ['trainer dppo']" in result.stdout
    assert "verl_dppo could not register trainer dppo" in result.stderr
    assert "Unknown trainer 'dppo'" in result.stderr


NAMED = """
import sys
import verl_dppo
print([module for module in ("torch", "verl", "ray") if module in sys.modules])
from verl_dppo import DPPORayPPOTrainer, DPPOTrainer, dppo_loss, prune_data_proto
print(*(named.__module__ for named in (DPPORayPPOTrainer, DPPOTrainer, dppo_loss, prune_data_proto)))
try:
    verl_dppo.DPPOTrainr
except AttributeError as error:
    print(error)
"""


def test_the_public_names_are_imported_when_they_are_asked_for():
    light, modules, error = python(NAMED).stdout.splitlines()
    assert light == "[]"
    named = ("ray_trainer", "trainer", "loss", "data_proto")
    assert modules.split() == [f"verl_dppo.training.{name}" for name in named]
    assert error == "module 'verl_dppo' has no attribute 'DPPOTrainr'"


def check(**environment):
    env = {**os.environ, **environment}
    command = [sys.executable, "-c", "import sys; from verl_dppo.cli import main; sys.exit(main(['check']))"]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_check_names_what_is_registered_and_in_which_versions():
    result = check()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok    trainer.v1.trainer_mode=dppo: verl_dppo.training.trainer.DPPOTrainer" in result.stdout
    assert "ok    trainer.use_v1=false: verl_dppo.training.ray_trainer.DPPORayPPOTrainer" in result.stdout
    assert "ok    algorithm=dppo: dppo, dppo_dapo, dppo_dr_grpo, dppo_gspo, dppo_rloo compose" in result.stdout
    assert "\nverl 0.9" in result.stdout


def test_check_reads_the_policy_as_verl_does():
    assert check(VERL_USE_EXTERNAL_PLUGINS="other, DPPO").returncode == 0


@pytest.mark.parametrize("policy", ["none", "other"])
def test_check_says_why_it_is_not_registered(policy):
    result = check(VERL_USE_EXTERNAL_PLUGINS=policy)
    assert result.returncode == 1
    assert f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading it" in result.stdout
    assert "FAIL  trainer.v1.trainer_mode=dppo: ValueError: Unknown trainer 'dppo'" in result.stdout
    assert "FAIL  trainer.use_v1=false: RuntimeError: verl's task runner would build its own RayPPO" in result.stdout
