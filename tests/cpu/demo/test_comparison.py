import sys

import pytest

from verl_dppo.cli import main
from verl_dppo.cpu.demo.comparison import PASS_RATE, Training, describe, table, train


def step(seconds, update, share=None, rate=None):
    metrics = {
        "timing_s/step": seconds,
        "timing_s/gen": 2.0,
        "timing_s/old_log_prob": update / 4,
        "timing_s/update_actor": update * 3 / 4,
        "perf/total_num_tokens": 1000,
        "critic/score/mean": 0.5,
    }
    if share is not None:
        metrics |= {
            "dppo/trained_sequence_token_fraction": share,
            "dppo/kept_token_fraction": share,
            "dppo/variance_inflation": 0.1,
        }
    if rate is not None:
        metrics[f"{PASS_RATE}mean@4"] = rate
    return metrics


def training(name, seed, seconds, update, share, after):
    warm_up = step(99.0, 50.0, share)
    return Training(name, seed, {f"{PASS_RATE}mean@4": 0.4}, (warm_up, step(seconds, update, share, after)))


def test_the_table_compares_steps_after_the_first_and_pays_for_the_noise():
    text = table([training("GRPO", 0, 10.0, 8.0, None, 0.5)], [training("DPPO", 0, 6.0, 4.0, 0.5, 0.6)])
    assert "| seconds per step: log-probs + update | 8.000 | 4.000 | 0.50 |" in text
    assert "| tokens trained on per step | 1,000 | 500 | 0.50 |" in text
    assert "| validation pass rate after | 0.500 | 0.600 |  |" in text
    assert "takes 0.60 of GRPO's (1.67 times as fast), training on 50%" in text
    # 10 s against 6 s and a tenth of the 6 s that are rollout, log-probs and update.
    assert "it is 1.52 times as fast" in text


def test_over_several_seeds_the_table_gives_means_and_spread():
    grpo = [training("GRPO", seed, 10.0, 8.0, None, rate) for seed, rate in enumerate((0.5, 0.6))]
    dppo = [training("DPPO", seed, 6.0, 4.0, 0.5, rate) for seed, rate in enumerate((0.5, 0.7))]
    assert "| validation pass rate after | 0.550 ± 0.071 | 0.600 ± 0.141 |  |" in table(grpo, dppo)


def test_progress_names_step_speed_and_what_was_kept():
    line = describe({"step": 3, "data": step(6.0, 4.0, 0.5)}, 20)
    assert "step 3/20" in line
    assert "6.0 s (rollout 2.0, log-probs and update 4.0), kept 50%" in line


def test_a_run_that_fails_says_so_with_the_end_of_its_output(tmp_path):
    """verl refuses the setting; the demo must not go on to a table."""
    files = {"train": tmp_path / "none.parquet", "validation": tmp_path / "none.parquet"}
    lines = []
    with pytest.raises(RuntimeError, match=r"DPPO ended with status 1(.|\n)*keep=0 is refused"):
        train("DPPO", 0, files, ["algorithm.dppo.completion.keep=0"], 1, tmp_path / "run", lines.append)
    assert "python -m verl.trainer.main_ppo" in lines[0]
    assert sys.executable not in lines[0]


def test_the_command_refuses_to_compare_nothing(capsys):
    assert main(["demo", "--steps", "0"]) == 1
    assert "--steps=0 is refused" in capsys.readouterr().out
