"""Runs with prompts pruned before rollout: what reaches the loss, what is drawn when, and how a run continues."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from end_to_end.conftest import COMPLETIONS, DPPO, PROMPTS
from transformers import AutoTokenizer

from verl_dppo.cpu.demo import MODEL_FOLDER
from verl_dppo.cpu.demo.task import write_parquet
from verl_dppo.pruning import deal_mini_batches

pytestmark = pytest.mark.end_to_end

MINI_BATCHES = 2
TWO_MINI_BATCHES = f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // MINI_BATCHES}"
LONGEST = 192
VALIDATION_ROWS = 16
# Of a prompt's response tokens the mean over past steps is remembered, each step counting this much less.
FORGETTING = 0.9
FLOOR, REMEMBERED = 0.3, 0.5
PRUNED = (
    *DPPO,
    "algorithm.dppo.prompt.keep=0.7",
    f"algorithm.dppo.prompt.floor={FLOOR}",
    f"algorithm.dppo.prompt.forgetting={REMEMBERED}",
    "algorithm.dppo.completion.keep=0.5",
    TWO_MINI_BATCHES,
)
ALL_PASSES = "trainer.total_training_steps=null"


def data_of(folder, rows, **columns):
    """Write a data set of so many prompts, with more columns where they are given; return the overrides that use it."""
    paths = write_parquet(folder, train_rows=rows, validation_rows=VALIDATION_ROWS, seed=0)
    if columns:
        table = pq.read_table(paths["train"])
        for name, values in columns.items():
            table = table.append_column(name, pa.array(values))
        pq.write_table(table, paths["train"])
    return f"data.train_files={paths['train']}", f"data.val_files={paths['validation']}"


def run_logged(verl_run, folder, *overrides, **options):
    """Run with a log of every plan and a dump of all rollouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_PLANS", str(folder / "plans.jsonl"))
        return verl_run(*overrides, f"trainer.rollout_data_dir={folder / 'dump'}", folder=folder, **options)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def checkpoint(run, step):
    return run.folder / "checkpoints" / f"global_step_{step}"


class Rollouts:
    """All rollouts of one step, from verl's dump, in the order of prompts as they were submitted.

    Attributes:
        place: (n,) which of the step's candidates each completion belongs to.
        score, tokens: (n,) of each completion.
        text: (n,) its response as it can be shown.
    """

    def __init__(self, run, line):
        lines = lines_of(run.folder / "dump" / f"{line['step']}.jsonl")
        keys = [row["uid"].rsplit("_", 2) for row in lines]
        order = sorted(range(len(lines)), key=lambda i: (keys[i][0], int(keys[i][1]), int(keys[i][2])))
        uids = sorted({key[0] for key in keys})
        kept = np.flatnonzero(line["kept"])
        assert len(uids) == len(kept), "as many prompts were rolled out as were kept, each with a uid of its own"
        self.place = np.array([kept[uids.index(keys[i][0])] for i in order])
        self.score = np.array([lines[i]["score"] for i in order])
        self.text = [lines[i]["output"] for i in order]
        self.prompt = [lines[i]["input"] for i in order]
        # One byte is one token, and every response but a cut one ends in a token that the text does not show.
        self.tokens = np.array([min(len(text.encode()) + 1, LONGEST) for text in self.text], dtype=float)

    def advantage(self):
        """GRPO's, by hand, of groups that are all there."""
        score = self.score.reshape(-1, COMPLETIONS)
        std = score.std(1, ddof=1, keepdims=True)
        return ((score - score.mean(1, keepdims=True)) / (std + 1e-6)).ravel()


def tokens_per_prompt(run):
    """Yield, for each step, its line of the prompt level, its rollouts, and the mean tokens of a group before it."""
    tokens = prompts = 0.0
    for line in run.prompts:
        rollouts = Rollouts(run, line)
        yield line, rollouts, tokens / prompts if prompts else None
        pi = np.array(line["pi"])
        places = np.unique(rollouts.place)
        tokens = FORGETTING * tokens + (rollouts.tokens / pi[rollouts.place]).sum()
        prompts = FORGETTING * prompts + (1 / pi[places]).sum()


def by_mini_batch(rows, rows_per_mini_batch):
    """Yield the rows of one step, as they reached the loss, with the mini-batch that they were updated in."""
    ranks = {row["rank"] for row in rows}
    for rank in ranks:
        mine = [row for row in rows if row["rank"] == rank]
        assert len(mine) == rows_per_mini_batch * MINI_BATCHES // len(ranks)
        for i, row in enumerate(mine):
            yield i * MINI_BATCHES // len(mine), row


def check_what_the_loss_received(run):
    """Weights, advantages and denominators are computed again from the dump and compared with what reached the loss.

    Returns:
        The weights in steps that could skip prompts.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    received, plans = list(run.rows), iter(lines_of(run.folder / "plans.jsonl"))
    weights_of_pruned_steps = []
    for (line, rollouts, mean), metrics in zip(tokens_per_prompt(run), run.metrics, strict=True):
        assert line["step"] == metrics["training/global_step"]
        prunes_prompts = min(line["pi"]) < 1
        if "dppo/rows_per_mini_batch" not in metrics:
            assert not prunes_prompts
            continue
        plan = next(plans)
        advantage = rollouts.advantage()
        if prunes_prompts:
            mini_batch = np.array(line["mini_batch"])[rollouts.place]
            drawn = np.bincount(line["mini_batch"], minlength=MINI_BATCHES)
            tokens, size = drawn * mean, drawn * COMPLETIONS
        else:
            rng = np.random.default_rng([0, line["step"], 0, 0])
            mini_batch = deal_mini_batches(np.abs(advantage) > 0.01, rollouts.place, MINI_BATCHES, rng)
            tokens = np.bincount(mini_batch, rollouts.tokens)
            size = np.full(MINI_BATCHES, PROMPTS // MINI_BATCHES * COMPLETIONS)
        assert plan["arguments"]["length"] == rollouts.tokens.tolist()
        expected = {}
        for i, sequence in enumerate(plan["sequences"]):
            assert rollouts.text[i] in tokenizer.decode(sequence, skip_special_tokens=True)
            pi = line["pi"][rollouts.place[i]] * plan["pi"][i]
            expected.setdefault((mini_batch[i], *sequence), []).append((1 / pi if pi else 0.0, advantage[i]))
        rows_per_mini_batch = round(metrics["dppo/rows_per_mini_batch"])
        mine, received = received[: rows_per_mini_batch * MINI_BATCHES], received[rows_per_mini_batch * MINI_BATCHES :]
        for k, row in by_mini_batch(mine, rows_per_mini_batch):
            assert row["tokens"] == pytest.approx(tokens[k], rel=1e-12)
            assert row["size"] == size[k]
            if len(row["response"]) == 1 and not row["weight"]:
                continue  # padding
            same = expected.get((k, *row["sequence"]))
            assert same, "a row in a mini-batch that is not its prompt's"
            if row["weight"]:
                weight, of_full = min(same, key=lambda pair: abs(pair[0] - row["weight"]))
                assert row["weight"] == pytest.approx(weight, rel=1e-12)
                assert row["advantage"] == pytest.approx(of_full, abs=1e-4)
        weights = [row["weight"] for row in mine if row["weight"]]
        informative = np.array(plan["pi"]) > 0
        whole = (informative / np.array(line["pi"])[rollouts.place]).sum()
        assert sum(weights) == pytest.approx(metrics["dppo/weight_sum_ratio"] * whole, rel=1e-6)
        assert max(weights) == pytest.approx(metrics["dppo/weight_max"], rel=1e-9)
        if prunes_prompts:
            weights_of_pruned_steps += weights
    assert not received
    return weights_of_pruned_steps


# ---- refill: what is kept fills the batch ----------------------------------------------------------------------------

FEW = 19
PASSES = 4
REFILL = (
    *PRUNED,
    ALL_PASSES,
    f"trainer.total_epochs={PASSES}",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
# Passes of 19 prompts: three steps that draw 8 of them, the third of which reaches into the second pass; then 11 each.
DRAWN = (8, 8, 8, 11, 11, 11, 11, 11)
AT_PASS_END = 6


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return data_of(tmp_path_factory.mktemp("few"), FEW)


@pytest.fixture(scope="module")
def refill(verl_run, few, tmp_path_factory):
    """Four passes over 19 prompts, to their end; a checkpoint after every second step."""
    folder = tmp_path_factory.mktemp("refill")
    watched = (
        "trainer.save_freq=2",
        f"trainer.test_freq={len(DRAWN)}",
        f"trainer.validation_data_dir={folder / 'validation'}",
    )
    return run_logged(verl_run, folder, *REFILL, *few, *watched)


def test_the_loss_is_handed_weights_of_both_levels_and_denominators_of_all_drawn_prompts(refill):
    weights = check_what_the_loss_received(refill)
    assert max(weights) > 2 / 0.7, "no row has a weight of both levels: the test is empty"


def test_every_prompt_is_drawn_once_in_every_pass(refill):
    rows = [row for line in refill.prompts for row in line["rows"]]
    assert len(rows) == sum(DRAWN)
    for k in range(PASSES):
        assert sorted(rows[k * FEW : (k + 1) * FEW]) == list(range(FEW))
    assert refill.prompts[AT_PASS_END - 1]["to"] % FEW == 0


def test_each_mini_batch_keeps_its_share_of_the_batch_and_the_rest_of_the_plan_follows_from_history(refill):
    """What is remembered of each prompt is computed again from the dump; only then could the next steps use it."""
    count, mean, visits = (dict.fromkeys(range(FEW), 0.0) for _ in range(3))
    for line, size in zip(refill.prompts, DRAWN, strict=True):
        pi, mini_batch = np.array(line["pi"]), np.array(line["mini_batch"])
        assert pi.size == size
        assert sum(line["kept"]) == PROMPTS
        for k in range(MINI_BATCHES):
            assert pi[mini_batch == k].sum() == pytest.approx(PROMPTS / MINI_BATCHES)
            assert sum(np.array(line["kept"])[mini_batch == k]) == PROMPTS / MINI_BATCHES
        if size > PROMPTS:
            assert pi.min() >= FLOOR
            p = np.array([(count[row] * mean[row] + 1) / (count[row] + 2) for row in line["rows"]])
            spread = np.sqrt(p * (1 - p))
            for k in range(MINI_BATCHES):
                free = (mini_batch == k) & (pi < 1) & (pi > FLOOR)
                ratio = pi[free] / spread[free]
                assert ratio == pytest.approx(np.full(free.sum(), ratio.mean()), rel=1e-3)
        rollouts = Rollouts(refill, line)
        for place in np.unique(rollouts.place):
            row, score = line["rows"][place], rollouts.score[rollouts.place == place]
            old = REMEMBERED * count[row]
            count[row] = old + score.size
            mean[row] = (old * mean[row] + score.sum()) / count[row]
            visits[row] += 1
        assert line["visits"] == [visits[row] for row in line["rows"]]
        assert line["mean"] == pytest.approx([mean[row] for row in line["rows"]], abs=1e-3)


def test_drawn_kept_and_skipped_prompts_passes_and_epochs_are_counted(refill):
    drawn, seen = 0, set()
    for step, (metrics, line, size) in enumerate(zip(refill.metrics, refill.prompts, DRAWN, strict=True), start=1):
        assert metrics["training/global_step"] == step
        assert metrics["training/epoch"] == drawn // FEW
        drawn += size
        figures = {
            "drawn": size,
            "kept": PROMPTS,
            "skipped": size - PROMPTS,
            "total_drawn": drawn,
            "total_kept": PROMPTS * step,
            "total_skipped": drawn - PROMPTS * step,
            "passes": drawn / FEW,
            "unseen": sum(row not in seen for row in line["rows"]),
            "keep": 0.7,
        }
        seen.update(line["rows"])
        for name, value in figures.items():
            assert metrics[f"dppo/prompts/{name}"] == pytest.approx(value), name
        assert metrics["dppo/prompts_drawn"] == size
        assert metrics["dppo/completions"] == PROMPTS * COMPLETIONS


def test_the_passes_alone_end_the_run_and_the_schedule_of_the_learning_rate(refill):
    steps = len(DRAWN)
    assert len(refill.metrics) == steps
    assert f"{steps}/{steps} [" in refill.output, "the progress bar counts to another total"
    for step, metrics in enumerate(refill.metrics, start=1):
        assert metrics["actor/lr"] == pytest.approx(1e-4 * (1 + np.cos(np.pi * step / steps)) / 2, abs=1e-12)


def test_validation_sees_every_prompt(refill):
    scores = [line["score"] for line in lines_of(refill.folder / "validation" / f"{len(DRAWN)}.jsonl")]
    assert len(scores) == VALIDATION_ROWS
    (mean,) = (v for name, v in refill.metrics[-1].items() if name.startswith("val-core/") and "mean@1" in name)
    assert mean == pytest.approx(np.mean(scores))


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.long), AT_PASS_END])
def test_a_resumed_run_continues_to_the_bit(refill, few, verl_run, tmp_path, step):
    """From the middle of a pass, and from the very end of one."""
    run = verl_run(
        *REFILL,
        *few,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint(refill, step)}",
        folder=tmp_path,
    )
    assert [m["training/global_step"] for m in run.metrics] == list(range(step + 1, len(DRAWN) + 1))
    assert run.prompts == refill.prompts[step:]
    assert run.updates == refill.updates[MINI_BATCHES * step :]
    for ours, theirs in zip(run.metrics, refill.metrics[step:], strict=True):
        for name in ("actor/lr", "training/epoch", "dppo/prompts/passes", "dppo/prompts/total_kept"):
            assert ours[name] == theirs[name], name


# ---- shrink: the batch is what is drawn ------------------------------------------------------------------------------


def test_shrink_keeps_fewer_prompts_on_two_ranks(verl_run, tmp_path):
    """With every completion of them trained on: the level works alone."""
    run = run_logged(
        verl_run,
        tmp_path,
        *PRUNED,
        "algorithm.dppo.prompt.schedule=shrink",
        "algorithm.dppo.completion.enable=false",
        "trainer.n_gpus_per_node=2",
        *data_of(tmp_path / "data", PROMPTS),
        steps=3,
    )
    assert [sum(line["kept"]) for line in run.prompts] == [8, 6, 6]
    assert [len(line["kept"]) for line in run.prompts] == [8, 8, 8]
    assert [m["dppo/completions"] for m in run.metrics[1:]] == [48, 48]
    assert len(run.updates) == 6
    # The first step is verl's own: nothing is pruned in it.
    weights = check_what_the_loss_received(run)
    assert max(weights) > 1.2, "no weight differs from 1: the test is empty"


# ---- fewer prompts than a batch --------------------------------------------------------------------------------------


def test_a_data_set_smaller_than_the_batch_ends_by_itself_after_its_passes(verl_run, tmp_path):
    """A prompt that a step draws twice has a uid and a weight each time."""
    rows, passes = 5, 5
    over = (ALL_PASSES, f"trainer.total_epochs={passes}")
    run = run_logged(verl_run, tmp_path, *PRUNED, *over, *data_of(tmp_path / "data", rows))
    assert [len(line["rows"]) for line in run.prompts] == [8, 11, 11]
    assert run.prompts[-1]["to"] >= rows * passes > run.prompts[-2]["to"]
    check_what_the_loss_received(run)
    visits, twice = Counter(), []
    for line in run.prompts:
        weights = {}
        for row, weight in zip(line["rows"], line["weight"], strict=True):
            if weight:
                weights.setdefault(row, []).append(weight)
        visits.update({row: len(of_row) for row, of_row in weights.items()})
        twice += [of_row for of_row in weights.values() if len(set(of_row)) > 1]
        assert line["visits"] == [visits[row] for row in line["rows"]]
    assert twice, "no prompt has two weights in a step: the test is empty"


# ---- agent loops, and prompts unlike each other ----------------------------------------------------------------------


def agent(folder, name):
    """Register an agent loop of `agent_loops` and make it the default."""
    path = folder / "agents.yaml"
    path.write_text(f"- name: tested\n  _target_: agent_loops.{name}\n")
    return (
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tested",
    )


def check_constants(run):
    """In every step that could skip prompts, both denominators count the drawn prompts by means of past steps."""
    received, plans = list(run.rows), lines_of(run.folder / "plans.jsonl")
    tokens = prompts = completions = 0.0
    pruned_steps = 0
    for line, plan, metrics in zip(run.prompts, plans, run.metrics, strict=True):
        count = round(metrics["dppo/rows_per_mini_batch"])
        mine, received = received[: count * MINI_BATCHES], received[count * MINI_BATCHES :]
        pi = np.array(line["pi"])
        place = Rollouts(run, line).place
        drawn = np.bincount(line["mini_batch"])
        for k, row in by_mini_batch(mine, count) if pi.min() < 1 else ():
            assert row["size"] == pytest.approx(drawn[k] * completions / prompts, rel=1e-12)
            assert row["tokens"] == pytest.approx(drawn[k] * tokens / prompts, rel=1e-12)
        if pi.min() < 1:
            pruned_steps += 1
            weights = {}
            for sequence, pi_of_row in zip(plan["sequences"], pi[place] * np.array(plan["pi"]), strict=True):
                weights.setdefault(tuple(sequence), []).append(1 / pi_of_row if pi_of_row else 0.0)
            weighted = [row for row in mine if row["weight"]]
            assert weighted, "no row of a pruned step has a gradient: the test is empty"
            for row in weighted:
                of_same = weights[tuple(row["sequence"])]
                assert min(abs(row["weight"] / weight - 1) for weight in of_same if weight) < 1e-12
        length = np.array(plan["arguments"]["length"])
        tokens = FORGETTING * tokens + (length / pi[place]).sum()
        prompts = FORGETTING * prompts + (1 / pi[np.unique(place)]).sum()
        completions = FORGETTING * completions + (1 / pi[place]).sum()
    assert not received
    assert pruned_steps > 1


@pytest.mark.long
def test_a_multi_turn_agent_loop_has_its_prompts_pruned(verl_run, tmp_path):
    """Tokens between the turns are no response tokens, in the constants neither."""
    data = data_of(tmp_path / "data", PROMPTS)
    run = run_logged(verl_run, tmp_path, *PRUNED, *agent(tmp_path, "TwoTurnAgentLoop"), *data, steps=4)
    assert [len(line["rows"]) for line in run.prompts] == [8, 11, 11, 11]
    assert all(m["training/num_turns/mean"] == 4 for m in run.metrics)
    for line, plan in zip(run.prompts, lines_of(run.folder / "plans.jsonl"), strict=True):
        shown = [len(text.encode()) for text in Rollouts(run, line).text]
        assert all(length < text for length, text in zip(plan["arguments"]["length"], shown, strict=True))
    check_constants(run)


@pytest.mark.long
def test_sessions_with_several_outputs_have_their_prompts_pruned(verl_run, tmp_path):
    """A prompt counts for its sessions, whatever outputs they leave."""
    data = data_of(tmp_path / "data", PROMPTS)
    run = run_logged(verl_run, tmp_path, *PRUNED, *agent(tmp_path, "SeveralOutputsAgentLoop"), *data, steps=4)
    assert [m["dppo/completions"] for m in run.metrics] == [PROMPTS * COMPLETIONS * 3 / 2] * 4
    check_constants(run)


@pytest.mark.long
def test_prompts_with_their_own_number_of_completions_are_pruned(verl_run, tmp_path):
    """Both constants are those of the prompts as they were in past steps."""
    sizes = [4, 12, 6, 10, 8, 8, 5, 11]
    data = data_of(tmp_path / "data", PROMPTS, __rollout_n__=sizes)
    run = run_logged(verl_run, tmp_path, *PRUNED, *data, steps=4)
    for line in run.prompts:
        groups = Counter(Rollouts(run, line).place.tolist())
        assert groups == {k: sizes[line["rows"][k]] for k in np.flatnonzero(line["kept"])}
    check_constants(run)


@pytest.mark.long
def test_a_prompt_whose_rollouts_fail_is_no_visit_and_the_run_goes_on(verl_run, tmp_path):
    from end_to_end.agent_loops import FAILING_INDEX

    data = data_of(tmp_path / "data", PROMPTS)
    run = verl_run(*PRUNED, *agent(tmp_path, "FailingAgentLoop"), *data, steps=4)
    assert len(run.metrics) == 4
    assert len(run.updates) == 4 * MINI_BATCHES
    failed = 0
    for line, metrics in zip(run.prompts, run.metrics, strict=True):
        for k, row in enumerate(line["rows"]):
            assert (line["visits"][k] == 0) == (row == FAILING_INDEX)
            if row == FAILING_INDEX:
                assert line["pi"][k] == 1, "never seen, so never skipped"
                failed += line["kept"][k]
        assert metrics["dppo/prompts/kept"] == PROMPTS
        lost = sum(row == FAILING_INDEX for row in line["rows"])
        assert metrics["dppo/completions"] == (PROMPTS - lost) * COMPLETIONS
    assert failed > 1


# ---- other settings --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_both_budgets_choose_themselves_and_resume(verl_run, tmp_path_factory):
    """The share of prompts starts at 1 and moves after five steps in which all prompts were known."""
    data = data_of(tmp_path_factory.mktemp("data"), PROMPTS)
    auto = (*DPPO, "algorithm.dppo.prompt.keep=auto", "algorithm.dppo.completion.keep=auto", *data)
    run = verl_run(*auto, "trainer.save_freq=8", steps=10)
    keep = [m["dppo/prompts/keep"] for m in run.metrics]
    assert keep[:6] == [1.0] * 6
    assert all(abs(b - a) <= 0.02 + 1e-9 for a, b in pairwise(keep))
    assert all(0.5 <= value <= 1 for value in keep)
    resumed = verl_run(
        *auto,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint(run, 8)}",
        steps=10,
    )
    assert [m["training/global_step"] for m in resumed.metrics] == [9, 10]
    assert resumed.metrics[0]["dppo/prompts/keep"] == keep[8]
    assert resumed.prompts[0] == run.prompts[8]
    state = json.loads((checkpoint(run, 8) / "dppo.json").read_text())
    assert state["prompts"]["budget"]["steps"] == 7, "the first step knew no prompt"


@pytest.mark.long
def test_the_threshold_rule_gives_prompts_two_probabilities(verl_run, tmp_path):
    data = data_of(tmp_path / "data", PROMPTS)
    run = run_logged(verl_run, tmp_path, *PRUNED, "algorithm.dppo.prompt.rule=threshold", *data, steps=3)
    check_what_the_loss_received(run)
    several = 0
    for line in run.prompts[1:]:
        pi, mini_batch = np.array(line["pi"]), np.array(line["mini_batch"])
        for k in range(MINI_BATCHES):
            values = np.unique(pi[mini_batch == k].round(9))
            assert values.size <= 2
            assert pi[mini_batch == k].sum() == pytest.approx(PROMPTS / MINI_BATCHES)
            several += values.size == 2
    assert several, "all prompts are alike: the test is empty"
