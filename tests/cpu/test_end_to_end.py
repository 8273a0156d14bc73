"""Stock verl, two steps of GRPO, with the one switch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(solution_str[:1].isdigit())
"""


@pytest.mark.end_to_end
@pytest.mark.long
def test_stock_verl_trains_on_a_cpu(tmp_path: Path):
    tiny.save_model(tmp_path / "model")
    tiny.save_sums(tmp_path / "sums.json", 32)
    (tmp_path / "reward.py").write_text(REWARD)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo"),
        *(f"data.train_files={tmp_path}/sums.json", f"data.val_files={tmp_path}/sums.json"),
        *("data.train_batch_size=8", "data.max_prompt_length=64", "data.max_response_length=12"),
        *(f"actor_rollout_ref.model.path={tmp_path}/model", "actor_rollout_ref.actor.optim.lr=1e-3"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        *("trainer.logger=[console]", "trainer.total_training_steps=2", "trainer.val_before_train=False"),
        *("trainer.test_freq=-1", "trainer.resume_mode=disable", f"trainer.default_local_dir={tmp_path}/checkpoints"),
    ]
    switches = ("VERL_PLATFORM", "VERL_ENGINE_DEVICE", "VERL_USE_EXTERNAL_PLUGINS")
    env = {name: value for name, value in os.environ.items() if name not in switches}
    env |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]

    differences = [float(x) for x in re.findall(r"training/rollout_probs_diff_max:([-+.\de]+)", log)]
    assert len(differences) == 2
    assert max(differences) < 1e-5  # at step 2 only if the weights of step 1 arrived
    assert len(re.findall(r"\[hf_cpu\] with the weights of step \d+: 32 completions", log)) == 2
    assert "a request without sample_key" not in log
