"""Every recipe composes on verl's own config and passes its validation; every launch script runs up to training."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import verl.trainer
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

import verl_dppo
from verl_dppo.training.refusals import check_run

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "trainer_configs" / "recipe").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "run_scripts").glob("*.sh"))
SMALL_GSM8K = ROOT / "tests" / "data" / "gsm8k"
ALGORITHMS = sorted((Path(verl_dppo.__path__[0]) / "config" / "algorithm").glob("dppo*.yaml"))

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda path: path.stem)
each_recipe = pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def execute(command: list[str], folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {
        key: value for key, value in os.environ.items() if key not in ("GSM8K_DIR", "GSM8K_JSONL_DIR", "MODEL_PATH")
    }
    return subprocess.run(command, cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=300)


def job_config(stdout: str) -> DictConfig:
    """Return what `--cfg job` printed, without what was printed before it."""
    config = OmegaConf.create(stdout[stdout.index("model_engine:") :])
    assert isinstance(config, DictConfig)
    return config


@functools.cache
def composed(recipe: str, *overrides: str) -> DictConfig:
    """Return the config of the real command line."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", "trainer_configs"]
    done = execute([*command, *overrides, f"+recipe={recipe}", "--cfg", "job"])
    assert done.returncode == 0, done.stderr
    return job_config(done.stdout)


@functools.cache
def verl_config() -> DictConfig:
    """Return verl's own default config, without any recipe."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.trainer.__path__[0]) / "config"), version_base=None):
        return compose("ppo_trainer")


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, node


def recipe_leaves(recipe: str) -> dict[str, Any]:
    """Return the settings of a recipe by dotted key."""
    loaded = OmegaConf.load(ROOT / "trainer_configs" / "recipe" / f"{recipe}.yaml")
    return dict(leaves(OmegaConf.to_container(loaded, resolve=False)))


def knows(config: DictConfig, key: str) -> bool:
    """Tell whether verl has this key: by name, or inside a mapping that verl leaves empty for free-form arguments."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent)
    return isinstance(node, DictConfig) and (name in node.keys() or len(node) == 0)  # noqa: SIM118  `in` is False for `???`


def test_there_are_recipes_and_scripts() -> None:
    assert RECIPES
    assert SCRIPTS


@each_recipe
def test_sets_only_keys_that_verl_has(recipe: str) -> None:
    unknown = [
        key for key in recipe_leaves(recipe) if not key.startswith("algorithm.dppo.") and not knows(verl_config(), key)
    ]
    assert unknown == []


def test_a_key_that_verl_lacks_would_be_noticed() -> None:
    assert knows(verl_config(), "actor_rollout_ref.rollout.n")
    assert knows(verl_config(), "data.apply_chat_template_kwargs.enable_thinking")
    assert not knows(verl_config(), "actor_rollout_ref.rollout.number")
    assert not knows(verl_config(), "actor.rollout.n")


@each_recipe
def test_gives_a_reason_with_every_block_of_settings(recipe: str) -> None:
    text = (ROOT / "trainer_configs" / "recipe" / f"{recipe}.yaml").read_text()
    assert [block for block in text.split("\n\n") if "#" not in block] == []


@each_recipe
def test_holds_on_top_of_the_algorithm(recipe: str) -> None:
    config = composed(recipe, "algorithm=dppo")
    assert "dppo" in config.algorithm
    found = dict(leaves(OmegaConf.to_container(config, resolve=False)))
    wanted = recipe_leaves(recipe)
    assert {key: found.get(key) for key in wanted} == wanted


@each_recipe
@each_algorithm
def test_leaves_every_algorithm_what_it_chose(recipe: str, algorithm: Path) -> None:
    """A recipe is merged after the algorithm: a clip range or aggregation of its own would train something else."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(verl.trainer.__path__[0]) / "config"), version_base=None):
        search = f"hydra.searchpath=[file://{ROOT / 'trainer_configs'}]"
        config = compose("ppo_trainer", overrides=[f"algorithm={algorithm.stem}", f"+recipe={recipe}", search])
    chosen = OmegaConf.load(algorithm)
    chosen.pop("defaults", None)
    chosen.pop("hydra", None)
    wanted = dict(leaves(OmegaConf.to_container(chosen, resolve=False)))
    found = dict(leaves(OmegaConf.to_container(config, resolve=False)))
    assert wanted
    assert {key: found.get(key) for key in wanted} == wanted
    check_run(config)


@each_recipe
def test_another_algorithm_is_chosen_on_the_real_command_line(recipe: str) -> None:
    config = composed(recipe, "algorithm=dppo_gspo")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"
    assert config.actor_rollout_ref.actor.clip_ratio_high == 4e-4
    check_run(config)


@each_recipe
def test_reads_data_and_model_from_the_environment(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed(recipe, "algorithm=dppo")
    for name in ("GSM8K_DIR", "MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert config.data.train_files == "data/gsm8k/train.parquet"
    assert config.actor_rollout_ref.model.path == "Qwen/Qwen3-4B"
    monkeypatch.setenv("GSM8K_DIR", "/elsewhere")
    monkeypatch.setenv("MODEL_PATH", "/models/mine")
    assert config.data.val_files == "/elsewhere/test.parquet"
    assert config.actor_rollout_ref.model.path == "/models/mine"


@each_recipe
def test_batch_divides_into_mini_batches_and_ranks(recipe: str) -> None:
    config = composed(recipe, "algorithm=dppo")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % ranks == 0
    assert ranks % rollout.tensor_model_parallel_size == 0


@each_recipe
def test_token_limits_take_the_longest_row_everywhere(recipe: str) -> None:
    config = composed(recipe, "algorithm=dppo")
    longest = config.data.max_prompt_length + config.data.max_response_length
    node = config.actor_rollout_ref
    for part, limit in (
        (node.actor.use_dynamic_bsz, node.actor.ppo_max_token_len_per_gpu),
        (node.ref.log_prob_use_dynamic_bsz, node.ref.log_prob_max_token_len_per_gpu),
        (node.rollout.log_prob_use_dynamic_bsz, node.rollout.log_prob_max_token_len_per_gpu),
    ):
        assert part is True
        assert limit >= longest


@pytest.mark.filterwarnings("ignore:Disabled critic")
@each_recipe
@pytest.mark.parametrize("overrides", [("algorithm=dppo",), ("algorithm.adv_estimator=grpo",)], ids=["dppo", "grpo"])
def test_passes_verls_validation_and_the_plugins(recipe: str, overrides: tuple[str, ...]) -> None:
    config = composed(recipe, *overrides)
    assert ("dppo" in config.algorithm) == (overrides == ("algorithm=dppo",))
    assert not need_critic(config)
    assert not need_reference_policy(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    if "dppo" in config.algorithm:
        check_run(config)
    for part in ("actor", "rollout"):
        omega_conf_to_dataclass(config.actor_rollout_ref[part])


@each_script
def test_script_is_sound_bash(script: Path) -> None:
    assert execute(["bash", "-n", str(script)]).returncode == 0
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()


@each_script
def test_script_is_in_the_index(script: Path) -> None:
    assert f"({script.name})" in (ROOT / "run_scripts" / "README.md").read_text()


@each_script
def test_script_prepares_its_data_and_hands_on_its_arguments(script: Path, tmp_path: Path) -> None:
    data = tmp_path / "with space" / "gsm8k"
    environment = {"PYTHON": sys.executable, "GSM8K_DIR": str(data), "GSM8K_JSONL_DIR": str(SMALL_GSM8K)}
    done = execute(["bash", str(script), "trainer.total_epochs=3", "--cfg", "job"], tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert f"{data}/train.parquet: 64 rows" in done.stderr
    config = job_config(done.stdout)
    assert "dppo" in config.algorithm
    assert config.trainer.total_epochs == 3
    assert config.data.train_files == f"{data}/train.parquet"
    assert config.data.val_files == f"{data}/test.parquet"
    assert (data / "test.parquet").is_file()


@each_script
def test_script_leaves_data_that_is_there(script: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").write_text(split)
    done = execute(["bash", str(script), "--cfg", "job"], tmp_path, PYTHON=sys.executable, GSM8K_DIR=".")
    assert done.returncode == 0, done.stderr
    assert job_config(done.stdout).data.train_files == f"{tmp_path}/train.parquet"
    assert (tmp_path / "train.parquet").read_text() == "train"


@each_script
@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("PYTHON", "no-such-python", "no interpreter 'no-such-python'"),
        ("MODEL_PATH", "./no-such-model", "MODEL_PATH=./no-such-model has no config.json"),
        ("GSM8K_JSONL_DIR", "no-such-folder", "GSM8K_JSONL_DIR=no-such-folder is no folder"),
    ],
)
def test_script_refuses_an_input_that_is_not_there(
    script: Path, tmp_path: Path, variable: str, value: str, complaint: str
) -> None:
    environment = {"PYTHON": sys.executable, "GSM8K_DIR": str(tmp_path / "data")} | {variable: value}
    done = execute(["bash", str(script), "--cfg", "job"], tmp_path, **environment)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not (tmp_path / "data").exists()


@each_script
def test_script_names_a_package_that_is_not_installed(script: Path, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    bare.chmod(0o755)
    done = execute(["bash", str(script)], tmp_path, PYTHON=str(bare))
    assert done.returncode == 2
    assert "has no package 'verl'" in done.stderr
