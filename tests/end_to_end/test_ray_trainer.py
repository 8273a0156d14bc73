"""`trainer.use_v1=false`: the same algorithm on verl's RayPPOTrainer, held against stock verl and our v1 trainer."""

import json
from pathlib import Path

import numpy as np
import pytest
from end_to_end.conftest import COMPLETIONS, DPPO, ONE_ROW_MICRO_BATCHES, PROMPTS, VERLS_ORDER

from verl_dppo.cpu.demo.task import write_parquet

pytestmark = pytest.mark.end_to_end
RAY = "trainer.use_v1=false"
STEPS, HALF = 4, 2
BOTH_LEVELS = (
    *DPPO,
    "algorithm.dppo.completion.keep=0.5",
    "algorithm.dppo.prompt.keep=0.7",
    "algorithm.dppo.completion.probe_every=2",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "trainer.n_gpus_per_node=2",
)
"""Both levels, both passes for log-probs, two mini-batches, two ranks, rows packed and balanced."""
# Of times, memory and rates, and of the width to which RayPPOTrainer pads, which v1 has not.
NOT_REPEATED = ("timing_", "perf/", "actor/perf/", "dppo/time", "dppo/noise", "dppo/seconds", "dppo/balance/measured")
NOT_REPEATED += (
    "dppo/balance/waited",
    "response_length/clip",
    "response_length_non_aborted/clip",
    "prompt_length/clip",
)


@pytest.fixture(scope="module")
def stock_ray(verl_run):
    return verl_run(RAY, *ONE_ROW_MICRO_BATCHES)


@pytest.mark.parametrize(
    "off",
    [
        ("algorithm.dppo.enable=false",),
        pytest.param(
            ("algorithm.dppo.completion.enable=false", "algorithm.dppo.prompt.enable=false", *VERLS_ORDER),
            marks=pytest.mark.long,
        ),
        pytest.param(("algorithm.dppo.anneal_fraction=1", *VERLS_ORDER), marks=pytest.mark.long),
    ],
)
def test_off_it_is_verls_trainer_to_the_bit(verl_run, stock_ray, off):
    run = verl_run(*DPPO, *off, RAY, *ONE_ROW_MICRO_BATCHES)
    assert len(run.updates) == 3
    assert run.updates == stock_ray.updates
    losses = [[m["actor/pg_loss"] for m in of_run.metrics] for of_run in (run, stock_ray)]
    assert losses[0] == losses[1]
    pruned = [n for m in run.metrics for n in m if n.startswith("dppo/") and not n.startswith("dppo/prompts/")]
    assert not pruned


@pytest.mark.long
def test_dropping_rows_without_a_gradient_changes_the_update_by_rounding_only(verl_run, stock_ray):
    """Stock verl sums the rows of a rank by length here, and DPPO as they come."""
    run = verl_run(*DPPO, *VERLS_ORDER, "algorithm.dppo.completion.keep=1", RAY, *ONE_ROW_MICRO_BATCHES)
    assert min(m["dppo/kept_fraction"] for m in run.metrics) < 1, "nothing was dropped: the test is empty"
    for ours, theirs in zip(run.updates, stock_ray.updates, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-9)


@pytest.fixture(scope="module")
def both_levels(tmp_path_factory):
    """Two steps a pass: from the third on prompts are skipped."""
    data = write_parquet(tmp_path_factory.mktemp("data"), train_rows=2 * PROMPTS, validation_rows=16, seed=0)
    return (*BOTH_LEVELS, f"data.train_files={data['train']}")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return tmp_path_factory.mktemp("recorded") / "rollouts.jsonl"


@pytest.fixture(scope="module")
def of_v1(verl_run, both_levels, recorded):
    return verl_run(*both_levels, f"trainer.save_freq={HALF}", steps=STEPS, record=recorded)


@pytest.fixture(scope="module")
def of_ray(verl_run, both_levels, of_v1, recorded, tmp_path_factory):
    """The same rollouts; a checkpoint half-way, rollouts dumped, and a data set that looks at every batch."""
    folder = tmp_path_factory.mktemp("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_ON_BATCH_END", str(folder / "batches.jsonl"))
        return verl_run(
            *both_levels,
            RAY,
            f"trainer.save_freq={HALF}",
            f"trainer.rollout_data_dir={folder / 'dump'}",
            f"data.custom_cls.path={Path(__file__).parent / 'watching_dataset.py'}",
            "data.custom_cls.name=WatchingDataset",
            steps=STEPS,
            folder=folder,
            replay=recorded,
        )


def by_rank(rows):
    """Return the rows that reached the loss, rank after rank; those of two ranks are logged as they come."""
    columns = ("rank", "weight", "advantage", "tokens", "size")
    # Padding rows are made of other tokens here than there.
    lines = [(*(row[name] for name in columns), row["sequence"] if len(row["sequence"]) > 2 else None) for row in rows]
    return sorted(lines, key=lambda line: line[0])


def test_the_same_rollouts_give_the_same_rows_weights_and_losses_as_v1(of_ray, of_v1):
    assert sum(m["dppo/prompts/skipped"] for m in of_v1.metrics) > 0, "no prompt was skipped: the test is empty"
    assert max(m["dppo/kept_fraction"] for m in of_v1.metrics) < 0.8
    assert len(of_ray.rows) == len(of_v1.rows)
    assert by_rank(of_ray.rows) == by_rank(of_v1.rows)
    assert len(of_ray.prompts) == STEPS
    assert of_ray.prompts == of_v1.prompts
    for ours, theirs in zip(of_ray.updates, of_v1.updates, strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-9)
    for ours, theirs in zip(of_ray.metrics, of_v1.metrics, strict=True):
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name


def test_every_metric_that_v1_reports_is_the_same(of_ray, of_v1):
    for ours, theirs in zip(of_ray.metrics, of_v1.metrics, strict=True):
        assert {n for n in theirs if n.startswith("dppo/")} == {n for n in ours if n.startswith("dppo/")}
        for name in set(ours) & set(theirs):
            if not name.startswith(NOT_REPEATED):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
        for name in ("dppo/time_ratio", "timing_s/dppo_prune", "timing_s/dppo_order", "perf/total_num_tokens"):
            assert ours[name] > 0, name
        assert ours["perf/total_num_tokens"] == theirs["perf/total_num_tokens"]


def test_after_the_update_verl_has_the_full_batch_again(of_ray):
    batches = [json.loads(line) for line in (of_ray.folder / "batches.jsonl").read_text().splitlines()]
    assert len(batches) >= STEPS - 1, "verl does not show the last one"
    for step, metrics in enumerate(of_ray.metrics, start=1):
        dump = [json.loads(line) for line in (of_ray.folder / "dump" / f"{step}.jsonl").read_text().splitlines()]
        assert len(dump) == PROMPTS * COMPLETIONS == metrics["dppo/completions"]
        score = np.array([line["score"] for line in dump])
        if step <= len(batches):
            shown = batches[step - 1]
            assert (shown["rows"], shown["prompts"]) == (PROMPTS * COMPLETIONS, PROMPTS)
            assert shown["score"] == pytest.approx(score)
            groups = score.reshape(PROMPTS, COMPLETIONS)
            advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
            assert shown["advantage"] == pytest.approx(advantage.ravel(), abs=1e-4)


@pytest.mark.parametrize("source", ["of_ray", pytest.param("of_v1", marks=pytest.mark.long)])
def test_a_resumed_run_continues_from_a_checkpoint_of_either_trainer(
    request, source, verl_run, both_levels, recorded, tmp_path
):
    whole = request.getfixturevalue(source)
    run = verl_run(
        *both_levels,
        RAY,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={whole.folder / 'checkpoints' / f'global_step_{HALF}'}",
        steps=STEPS,
        folder=tmp_path,
        replay=recorded,
    )
    assert [m["training/global_step"] for m in run.metrics] == [3, 4]
    assert run.prompts == whole.prompts[HALF:]
    for ours, theirs in zip(run.updates[-4:], whole.updates[-4:], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-9)
