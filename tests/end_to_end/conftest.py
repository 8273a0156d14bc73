"""Runs of real verl on Ray, on the demo's model and task. A run that several tests look at happens once."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.task import write_parquet

PROMPTS, COMPLETIONS = 8, 8
DPPO = ("algorithm=dppo",)
VERLS_ORDER = ("algorithm.dppo.packing.enable=false", "algorithm.dppo.balance.enable=false")
ONE_ROW_MICRO_BATCHES = (
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
)


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    metrics: list[dict]
    updates: list[dict]
    rows: list[dict]
    output: str
    folder: Path
    prompts: list[dict] = field(default_factory=list)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return write_parquet(tmp_path_factory.mktemp("data"), train_rows=64, validation_rows=16, seed=0)


@pytest.fixture(scope="session")
def verl_run(data, tmp_path_factory):
    """Return a function that runs verl's entry point, or another one, and reads what it logged."""
    of_verl = ("-m", "verl.trainer.main_ppo")

    def run(
        *overrides, steps=3, folder=None, record=None, replay=None, check=True, launch=subprocess.run, entry=of_verl
    ):
        folder = folder or tmp_path_factory.mktemp("run")
        names = ("metrics", "updates", "rows", "prompts")
        metrics, updates, rows, prompts = (folder / f"{name}.jsonl" for name in names)
        env = {
            **os.environ,
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_hooks",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "HYDRA_FULL_ERROR": "1",
            "TEST_UPDATES": str(updates),
            "TEST_ROWS": str(rows),
            "TEST_PROMPTS": str(prompts),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        env.update({name: str(path) for name, path in (("TEST_RECORD", record), ("TEST_REPLAY", replay)) if path})
        command = [
            sys.executable,
            *entry,
            "algorithm.adv_estimator=grpo",
            f"data.train_files={data['train']}",
            f"data.val_files={data['validation']}",
            f"data.train_batch_size={PROMPTS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            f"actor_rollout_ref.rollout.n={COMPLETIONS}",
            "data.max_prompt_length=64",
            "data.max_response_length=192",
            f"actor_rollout_ref.model.path={MODEL_FOLDER}",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            "reward.custom_reward_function.path=pkg://verl_dppo.cpu.demo.task",
            "reward.custom_reward_function.name=compute_score",
            "trainer.logger=[console,file]",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=100",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
            f"hydra.run.dir={folder / 'hydra'}",
            *overrides,
        ]
        result = launch(command, capture_output=True, text=True, env=env, timeout=1800)
        output = result.stdout + result.stderr
        (folder / "output.log").write_text(output)
        assert not check or result.returncode == 0, output[-6000:]
        return Run(_lines(metrics, "data"), _lines(updates), _lines(rows), output, folder, _lines(prompts))

    return run


def _lines(path, field=None):
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line[field] if field else line for line in lines]


@pytest.fixture(scope="session")
def stock(verl_run):
    """Stock GRPO, one row in each micro-batch, the rollouts recorded."""
    return verl_run(*ONE_ROW_MICRO_BATCHES)


@pytest.fixture(scope="session")
def pruned(verl_run, tmp_path_factory):
    """DPPO at keep=.5 in two mini-batches, four steps, a checkpoint after the second, all rollouts dumped."""
    folder = tmp_path_factory.mktemp("pruned")
    dump = f"trainer.rollout_data_dir={folder / 'dump'}"
    return verl_run(*PRUNED, dump, "trainer.save_freq=2", steps=4, folder=folder)


PRUNED = (*DPPO, "algorithm.dppo.completion.keep=0.5", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}")
