"""`algorithm=dppo` on verl's real entry point and through Hydra's compose API."""

import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf


def main_ppo(*arguments, **environment):
    env = {**os.environ, **environment}
    env.pop("VERL_PLATFORM", None) if "VERL_PLATFORM" not in environment else None
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=180)


def composed(*overrides, name="ppo_trainer"):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=list(overrides))


@pytest.mark.parametrize("engine", [(), ("model_engine=megatron",)])
def test_without_the_choice_the_config_is_verls_to_the_byte(engine):
    with_plugin = main_ppo(*engine, "--cfg", "job")
    without = main_ppo(*engine, "--cfg", "job", VERL_USE_EXTERNAL_PLUGINS="none")
    assert with_plugin.stdout == without.stdout
    assert len(with_plugin.stdout) > 10_000


@pytest.mark.parametrize("engine", [(), ("model_engine=megatron",)])
def test_the_literal_command_line(engine):
    result = main_ppo(
        "algorithm=dppo", *engine, "algorithm.dppo.completion.keep=0.4", "trainer.total_epochs=3", "--cfg", "job"
    )
    config = OmegaConf.create(result.stdout)
    assert config.algorithm.dppo.completion.keep == 0.4
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.v1.trainer_mode == "dppo"
    assert config.trainer.total_epochs == 3
    assert config.actor_rollout_ref.actor.strategy == ("megatron" if engine else "fsdp")


def test_nothing_else_of_verls_config_changes_with_the_choice():
    def leaves(config):
        flat = {}

        def walk(node, prefix):
            for key, value in node.items():
                if isinstance(value, dict):
                    walk(value, f"{prefix}{key}.")
                else:
                    flat[prefix + str(key)] = value

        walk(OmegaConf.to_container(config, resolve=False), "")
        return flat

    stock, ours = leaves(composed()), leaves(composed("algorithm=dppo"))
    changed = {k for k in ours if ours[k] != stock.get(k) and not k.startswith("algorithm.dppo.")}
    assert changed == {"algorithm.adv_estimator", "trainer.v1.trainer_mode"}
    assert ours["actor_rollout_ref.rollout.calculate_log_probs"], "verl's own default, which dppo.yaml must not rely on"
    assert set(stock) <= set(ours)


def test_multirun_sweeps_a_setting_of_ours(tmp_path):
    """Each job of the sweep is refused at once, for a reason of its own, and none of them starts Ray."""
    result = main_ppo(
        "-m",
        "algorithm=dppo",
        "algorithm.dppo.completion.keep=0.5,0.7",
        "actor_rollout_ref.actor.shuffle=true",
        f"hydra.sweep.dir={tmp_path}",
    )
    assert "algorithm.dppo.completion.keep=0.5" in result.stdout
    assert "actor_rollout_ref.actor.shuffle=True is refused" in result.stderr


def test_a_config_of_ones_own_takes_the_choice_with_a_plus(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "hydra:\n  searchpath: [pkg://verl.trainer.config]\ndefaults: [ppo_trainer, _self_]\n"
        "trainer: {project_name: mine}\n"
    )
    result = main_ppo("--config-path", str(tmp_path), "--config-name", "mine", "+algorithm=dppo", "--cfg", "job")
    config = OmegaConf.create(result.stdout)
    assert config.trainer.project_name == "mine"
    assert config.algorithm.dppo.completion.keep == "auto"
    with initialize_config_dir(str(tmp_path), version_base=None):
        assert compose("mine", overrides=["+algorithm=dppo"]).trainer.v1.trainer_mode == "dppo"


def test_an_unknown_setting_is_refused_by_hydra_itself():
    result = main_ppo("algorithm=dppo", "algorithm.dppo.packing.capacity=8", "--cfg", "job")
    assert result.returncode != 0
    assert "capacity" in result.stderr


def test_with_the_cpu_switch_the_config_ends_in_settings_for_a_cpu():
    result = main_ppo("algorithm=dppo", "--cfg", "job", VERL_PLATFORM="cpu")
    config = OmegaConf.create(result.stdout)
    assert config.trainer.device == "cpu"
    assert config.trainer.v1.trainer_mode == "dppo"
