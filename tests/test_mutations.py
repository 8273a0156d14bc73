"""Each thing that keeps the estimate unbiased, taken away from a copy of the package, makes a named test fail."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """One edit of the source, and the test that must notice it."""

    file: str
    original: str
    mutant: str
    test: str


ENUMERATION = "tests/training/test_loss.py::test_the_expected_gradient_is_that_of_the_full_mini_batch"
WHAT_ARRIVES = (
    "tests/end_to_end/test_pruned.py::test_the_loss_is_handed_the_weights_advantages_and_denominators_of_the_full_batch"
)
EXACT_WEIGHTS = (
    "tests/pruning/test_plan.py::test_the_expected_weight_of_every_completion_is_one_in_every_mini_batch_exactly"
)
HALF_RIGHT = "tests/pruning/test_inclusion.py::test_half_right_is_not_below_its_own_mean"
BOTH_LEVELS = (
    "tests/training/test_two_levels.py::"
    "test_with_both_levels_pruned_the_expected_gradient_is_that_of_all_candidates[refill-beta]"
)
FULL_GROUPS = "tests/training/test_advantage.py::test_survivors_keep_the_advantage_of_the_full_group"
RAY_TRAINER = (
    "tests/training/test_ray_enumeration.py::"
    "test_the_expected_gradient_of_each_mini_batch_is_that_of_the_full_batch[2-grpo]"
)

MUTATIONS = {
    "the weight on KL": Mutation(
        "verl_dppo/training/loss.py",
        "return aggregate(loss_mat * weighting.weight.to(loss_mat)[:, None], *args, **kwargs)",
        "first = weighting.calls == 1  # the policy term comes first\n"
        "        weight = weighting.weight.to(loss_mat)[:, None] if first else 1.0\n"
        "        return aggregate(loss_mat * weight, *args, **kwargs)",
        ENUMERATION,
    ),
    "the un-pruned token count, in the loss": Mutation(
        "verl_dppo/training/loss.py", "batch_num_tokens=float(tokens[0]), ", "", ENUMERATION
    ),
    "the un-pruned number of completions, in the loss": Mutation(
        "verl_dppo/training/loss.py", ", global_batch_size=float(size[0])", "", ENUMERATION
    ),
    "the un-pruned token count, in the trainer": Mutation(
        "verl_dppo/training/completion_level.py",
        "        return plan, tokens, size\n",
        "        return plan, np.bincount(mini_batch, full.length * (plan.weight > 0)), size\n",
        WHAT_ARRIVES,
    ),
    "the un-pruned number of completions, in the trainer": Mutation(
        "verl_dppo/training/completion_level.py",
        "        return plan, tokens, size\n",
        "        return plan, tokens, np.bincount(mini_batch, plan.weight > 0).astype(np.float64)\n",
        WHAT_ARRIVES,
    ),
    "the weight of the prompt": Mutation(
        "verl_dppo/training/completion_level.py",
        "        plan = replace(plan, weight=plan.weight * prompts.weight)\n",
        "",
        BOTH_LEVELS,
    ),
    "the candidates that were skipped, in the denominators": Mutation(
        "verl_dppo/training/completion_level.py",
        "            drawn = prompts.drawn.astype(np.float64)\n",
        "            drawn = np.bincount(mini_batch[np.unique(full.group, return_index=True)[1]]).astype(np.float64)\n",
        BOTH_LEVELS,
    ),
    "full-group advantages, in the estimator": Mutation(
        "verl_dppo/training/advantage.py",
        "    statistics = [_full_groups.get(group, (0.0, 1.0)) for group in index]",
        "    remember_full_groups(token_level_rewards, index)\n"
        "    statistics = [_full_groups.get(group, (0.0, 1.0)) for group in index]",
        FULL_GROUPS,
    ),
    "full-group advantages, in the trainer": Mutation(
        "verl_dppo/training/trainer.py",
        '            "advantages": nested,\n            "returns": nested.clone(),\n',
        "",
        WHAT_ARRIVES,
    ),
    "the weights, on RayPPOTrainer": Mutation(
        "verl_dppo/training/data_proto.py",
        "np.concatenate([plan.weight[plan.kept], np.zeros(idle)])",
        "np.concatenate([(plan.weight[plan.kept] > 0) * 1.0, np.zeros(idle)])",
        RAY_TRAINER,
    ),
    "full-group advantages, on RayPPOTrainer": Mutation(
        "verl_dppo/training/ray_trainer.py",
        "            self._use_estimator(pruned=step is not None)\n",
        "            self._check_advantages = lambda batch: None\n            self._use_estimator(pruned=False)\n",
        RAY_TRAINER,
    ),
    "the un-pruned token count, on RayPPOTrainer": Mutation(
        "verl_dppo/training/ray_trainer.py",
        "torch.tensor(step.tokens[mini_batch], dtype=torch.float64)",
        'torch.bincount(kept.batch[MINI_BATCH], kept.batch["response_mask"].sum(1).double())[mini_batch]',
        RAY_TRAINER,
    ),
    "the exact m/(m-k)": Mutation(
        "verl_dppo/pruning/plan.py", "weight[d] = 1 / pi[d]", "weight[d] = 1 / target_pi[d]", EXACT_WEIGHTS
    ),
    "the tie tolerance": Mutation(
        "verl_dppo/pruning/inclusion.py", "mean[index] * (1 - rtol)", "mean[index]", HALF_RIGHT
    ),
}


@pytest.fixture
def copy(tmp_path):
    for name in ("verl_dppo", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def outcome(folder, test):
    """Run a test against the package in `folder`, also in the processes that it starts."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutant_is_caught_by_its_test(name, copy):
    mutation = MUTATIONS[name]
    source = copy / mutation.file
    text = source.read_text()
    assert text.count(mutation.original) == 1, "the line to take away is no longer there, or there twice"
    source.write_text(text.replace(mutation.original, mutation.mutant))
    result = outcome(copy, mutation.test)
    assert result.returncode == 1, result.stdout[-3000:] + result.stderr[-1000:]
    assert " failed" in result.stdout
    assert "ImportError" not in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("test", sorted({mutation.test for mutation in MUTATIONS.values()}))
def test_the_unchanged_copy_passes(test, copy):
    result = outcome(copy, test)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
