"""The one place where verl has no hook: its task runner for `trainer.use_v1=false` names its trainer's class."""

import os
import pickle
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf
from training.test_refusals import CLASSIC, config
from verl.trainer import main_ppo_v0
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import Role
from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_dppo.settings import RefusedSettingError
from verl_dppo.training.classic_entry import ChosenRayPPOTrainer, install, is_installed
from verl_dppo.training.ray_trainer import DPPORayPPOTrainer, _with_own_worker
from verl_dppo.training.refusals import RefuseBeforeStart
from verl_dppo.training.worker import DPPOWorker

VERLS_SOURCE = Path(main_ppo_v0.__file__).read_text()


def second_copy(source=VERLS_SOURCE):
    """Return verl's module executed once more, which the plugin has not seen."""
    module = module_from_spec(spec_from_loader("second_main_ppo_v0", loader=None))
    exec(compile(source, main_ppo_v0.__file__, "exec"), vars(module))
    return module


def changed(old, new):
    assert VERLS_SOURCE.count(old) == 1
    return second_copy(VERLS_SOURCE.replace(old, new))


def test_importing_verls_entry_point_is_enough():
    code = (
        "from verl.trainer import main_ppo_v0; from verl_dppo import plugin; "
        "print(main_ppo_v0.RayPPOTrainer.__module__, plugin.failures)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "verl_dppo.training.classic_entry {}", result.stderr


RECEIVE = """
import inspect, pickle, sys
for sent in pickle.load(sys.stdin.buffer):
    print(inspect.unwrap(pickle.loads(sent).run).__globals__["RayPPOTrainer"].__name__)
"""


def sent_off(module):
    """Pickle the task runner as Ray does."""
    return ray.cloudpickle.dumps(module.TaskRunner.__ray_metadata__.modified_class)


def test_the_runner_that_ray_sends_off_carries_the_new_name_once_it_is_installed():
    """Where it arrives the plugin is not even loaded."""
    module = second_copy()
    assert not is_installed(module)
    sent = [sent_off(main_ppo_v0), sent_off(module)]
    install(module)
    install(module)  # a second time it changes nothing
    assert is_installed(module)
    sent.append(sent_off(module))
    env = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-c", RECEIVE]
    received = subprocess.run(command, input=pickle.dumps(sent), capture_output=True, env=env, timeout=120)
    found = received.stdout.decode().split()[-3:]
    assert found == ["ChosenRayPPOTrainer", "RayPPOTrainer", "ChosenRayPPOTrainer"], received.stderr


IMPORT = "from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n"
BUILT = "trainer = RayPPOTrainer("


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (IMPORT, "RayPPOTrainer = dict\n", "RayPPOTrainer is <class 'dict'>, not verl's own class"),
        (IMPORT, "", "RayPPOTrainer is None, not verl's own class"),
        (BUILT, "trainer = get_trainer_cls(", "does not look RayPPOTrainer up in its module"),
        (BUILT, f"from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n        {BUILT}", "does not look"),
    ],
    ids=["another class", "no such name", "another name", "its own import"],
)
def test_a_verl_that_builds_its_trainer_otherwise_is_not_patched(old, new, message):
    module = changed(old, new)
    bound = getattr(module, "RayPPOTrainer", None)
    with pytest.raises(RuntimeError, match=message):
        install(module)
    assert not is_installed(module)
    assert getattr(module, "RayPPOTrainer", None) is bound


FAULT = """
import sys
sys.modules["verl_dppo.training.classic_entry"] = None
from verl.trainer import main_ppo_v0
from verl_dppo import plugin
print(main_ppo_v0.RayPPOTrainer.__module__, list(plugin.failures))
"""


def test_where_the_place_cannot_be_taken_verls_own_runs_go_on_and_ours_are_refused(monkeypatch):
    result = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120)
    expected = "verl.trainer.ppo.ray_trainer ['trainer dppo with trainer.use_v1=false']"
    assert result.stdout.splitlines()[-1] == expected
    assert "verl_dppo could not register trainer dppo with trainer.use_v1=false" in result.stderr
    monkeypatch.setattr(main_ppo_v0, "RayPPOTrainer", RayPPOTrainer)
    with pytest.raises(SystemExit, match=r"trainer.use_v1=False is refused: verl would build its own RayPPOTrainer"):
        RefuseBeforeStart().on_job_start(config(CLASSIC))
    RefuseBeforeStart().on_job_start(config())


def test_the_real_runs_of_verls_entry_point_are_let_through():
    RefuseBeforeStart().on_job_start(config(CLASSIC))


# ---- which class is built -------------------------------------------------------------------------------------------


class BuiltError(Exception):
    """Stops a constructor of the real trainers where it is known which one it is."""


@pytest.fixture
def stops_at_the_constructor(monkeypatch):
    def stop(self, config, *args, **kwargs):
        raise BuiltError(type(self).__name__)

    monkeypatch.setattr(RayPPOTrainer, "__init__", stop)


@pytest.mark.parametrize("named", [True, False], ids=["as verl passes it", "by place"])
@pytest.mark.usefixtures("stops_at_the_constructor")
def test_the_configuration_chooses_the_trainer(named):
    def build(made):
        rest = {"tokenizer": None, "role_worker_mapping": {}}
        return ChosenRayPPOTrainer(config=made, **rest) if named else ChosenRayPPOTrainer(made, *rest.values())

    with pytest.raises(BuiltError, match=r"^DPPORayPPOTrainer$"):
        build(config(CLASSIC))
    plain = config(CLASSIC)
    with pytest.raises(BuiltError, match=r"^ChosenRayPPOTrainer$"):
        build(OmegaConf.create({**plain, "algorithm": {k: v for k, v in plain.algorithm.items() if k != "dppo"}}))


@pytest.mark.usefixtures("stops_at_the_constructor")
def test_a_class_derived_from_the_name_in_verls_module_stays_itself():
    class Mine(main_ppo_v0.RayPPOTrainer):
        pass

    with pytest.raises(BuiltError, match=r"^Mine$"):
        Mine(config=config(CLASSIC))
    assert issubclass(Mine, RayPPOTrainer)
    assert issubclass(DPPORayPPOTrainer, RayPPOTrainer)


# ---- the workers of a task runner -----------------------------------------------------------------------------------


def made_by(remote):
    return remote.__ray_metadata__.modified_class.__mro__[1]


@pytest.mark.parametrize("role", [Role.ActorRollout, Role.ActorRolloutRef])
def test_verls_worker_becomes_ours_with_its_options_and_other_roles_stay(role):
    options = {"num_cpus": 3, "max_concurrency": 7}
    critic = ray.remote(ActorRolloutRefWorker)
    mapping = {role: ray.remote(**options)(ActorRolloutRefWorker), Role.Critic: critic}
    found = _with_own_worker(mapping)
    assert made_by(found[role]) is DPPOWorker
    assert options.items() <= found[role]._default_options.items()
    assert found[Role.Critic] is critic
    assert made_by(mapping[role]) is ActorRolloutRefWorker  # the task runner's own mapping is left alone


def test_without_options_too():
    assert made_by(_with_own_worker({Role.ActorRollout: ray.remote(ActorRolloutRefWorker)})[Role.ActorRollout]) is (
        DPPOWorker
    )


def test_a_worker_derived_from_ours_stays():
    class Mine(DPPOWorker):
        pass

    mine = ray.remote(Mine)
    assert _with_own_worker({Role.ActorRollout: mine})[Role.ActorRollout] is mine


@pytest.mark.parametrize("name", ["Mine", "ActorRolloutRefWorker"])
def test_a_worker_that_would_not_follow_the_plan_is_refused_whatever_its_name(name):
    other = type(name, (ActorRolloutRefWorker,), {})
    with pytest.raises(RefusedSettingError, match=rf"worker of .*{name} is refused.*DPPOWorker, or switch packing"):
        _with_own_worker({Role.ActorRollout: ray.remote(other)})
