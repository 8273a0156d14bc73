"""The code of docs/ray-trainer.md runs as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest
from end_to_end.conftest import PRUNED
from training.generated_protos import make_batch, make_plan

DOCS = Path(__file__).parents[2] / "docs"
RECIPE = DOCS / "ray_trainer" / "recipe.py"


@pytest.fixture(scope="module")
def code():
    return re.findall(r"```python\n(.*?)```", (DOCS / "ray-trainer.md").read_text(), re.DOTALL)


def test_the_page_shows_the_recipe_that_runs(code):
    assert code[0] == RECIPE.read_text()


@pytest.mark.end_to_end
def test_the_recipe_prunes_and_its_hook_sees_what_is_trained_on_and_then_the_full_batch(verl_run):
    run = verl_run(*PRUNED, "trainer.use_v1=false", steps=2, entry=(str(RECIPE),))
    assert [metrics["training/global_step"] for metrics in run.metrics] == [1, 2]
    assert len(run.updates) == 4
    for metrics in run.metrics:
        assert 0 < metrics["dppo/kept_fraction"] < 1
        assert metrics["dppo/weight_max"] > 1.2
        assert metrics["recipe/token_share"] == pytest.approx(metrics["dppo/kept_token_fraction"], rel=1e-6)


def test_rows_pruned_as_the_page_shows_carry_the_denominators_of_their_full_mini_batches(code):
    namespace = {}
    exec(code[1], namespace)
    batch = make_batch(seed=0, groups=4, size=4)
    plan = make_plan(0, batch, groups=4, mini_batches=2, multiple=3, design="poisson")
    pruned = namespace["prune"](batch, plan)
    assert (pruned.batch["dppo_row"] < 0).any(), "no idle row: the test is empty"
    assert len(plan.kept) < len(batch)
    tokens = batch.batch["response_mask"].sum(1).numpy()
    for k in range(2):
        rows = pruned.batch["dppo_mini_batch"] == k
        of_full = plan.mini_batch == k
        assert (pruned.batch["dppo_batch_num_tokens"][rows] == tokens[of_full].sum()).all()
        assert (pruned.batch["dppo_global_batch_size"][rows] == np.count_nonzero(of_full)).all()
