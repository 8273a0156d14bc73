"""The prompt level on verl's own data set and sampler, step by step, with rollouts made up here."""

import copy
import json

import numpy as np
import pytest
from omegaconf import OmegaConf
from training.demo_rows import as_verl, demo_rows
from verl.trainer.ppo.utils import create_rl_sampler

from verl_dppo.settings import DPPOSettings
from verl_dppo.training.full_batch import FullBatch
from verl_dppo.training.prompt_level import HISTORY_FILE, PromptLevel, PromptsOfRows

COMPLETIONS = 4


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return demo_rows(tmp_path_factory.mktemp("rows"), 24)


@pytest.fixture
def make(rows, tmp_path):
    """Return a function that builds a level: of the first so many rows of the demo, or of given ones."""

    def make(given=24, batch=8, mini=4, epochs=3, anneal=0.0, **prompt):
        mine = rows[:given] if isinstance(given, int) else given
        config = OmegaConf.create(
            {
                "data": {
                    "train_batch_size": batch,
                    "dataloader_num_workers": 0,
                    "shuffle": True,
                    "seed": 5,
                    "cache_dir": str(tmp_path / "cache"),
                    "filter_overlong_prompts": False,
                },
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini}, "rollout": {"n": COMPLETIONS}},
                "trainer": {"total_epochs": epochs},
            }
        )
        dataset = as_verl(tmp_path / "data", mine, config.data)
        sampler = create_rl_sampler(config.data, dataset)
        settings = DPPOSettings.from_mapping({"anneal_fraction": anneal, "prompt": prompt})
        return PromptLevel(settings, config, dataset, lambda: np.fromiter(sampler, dtype=np.int64))

    return make


def rollouts(reward, length=None, prompt=None, session=None):
    """All completions of a step: (k, G) rewards, or flat ones with the prompt of each."""
    reward = np.asarray(reward, dtype=float)
    if prompt is None:
        prompt = np.repeat(np.arange(reward.shape[0]), reward.shape[1])
    prompt, reward = np.asarray(prompt), reward.ravel()
    n = reward.size
    length = np.full(n, 10.0) if length is None else np.asarray(length, dtype=float).ravel()
    full = FullBatch(
        group=np.unique(prompt, return_inverse=True)[1],
        advantage=reward - reward.mean(),
        length=length,
        prompt_length=np.full(n, 5),
        sequence_length=length.astype(int) + 5,
        reward=reward,
        session=np.arange(n) if session is None else np.asarray(session),
        has_advantage=np.ones(n, dtype=bool),
        sum_sq_one_minus_p=None,
        signature=None,
        mean_negative_log_prob=None,
        verl_metrics={},
    )
    return full, prompt


def draw(level, number, full=False):
    return level.next_batch(full, *(np.random.default_rng([0, number, stage]) for stage in (3, 4)))


def learn(level, number, reward=None, length=None, magnitude=None):
    """Let the level observe made-up rollouts of what it submitted; the same ones in every run."""
    rng, k = np.random.default_rng([1, number]), len(level.submission.ids)
    if reward is None:
        rate = np.array([sum(name.encode()) % 5 / 4 for name in level.submission.ids])
        reward = rng.random((k, COMPLETIONS)) < rate[:, None]
    length = rng.integers(5, 50, np.shape(reward)) if length is None else length
    full, prompt = rollouts(reward, length)
    magnitude = rng.lognormal(size=prompt.size) if magnitude is None else magnitude
    return *level.observe(number, full, prompt, magnitude), full, prompt


def step(level, number, full=False, **rollout):
    draw(level, number, full)
    made = level.submission
    of_rows, figures, *_ = learn(level, number, **rollout)
    return made, of_rows, figures


def after(level, steps, first=1):
    """Take so many steps; return the level."""
    for number in range(first, first + steps):
        step(level, number)
    return level


# ---- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["refill", "shrink"])
def test_in_the_first_pass_nothing_is_skipped_and_completions_are_not_tied_to_their_prompts(make, schedule):
    level, indices = make(schedule=schedule, keep=0.5), []
    for number in (1, 2, 3):
        batch = draw(level, number)
        made = level.submission
        assert batch["index"].tolist() == made.rows.tolist()
        assert made.ids == [level.ids[row] for row in made.rows]
        assert len(made.ids) == made.plan.pi.size == 8
        assert (made.pi == 1).all()
        of_rows, figures, *_ = learn(level, number)
        assert of_rows.mini_batch is None
        assert (of_rows.weight == 1).all()
        assert of_rows.inflation == figures["dppo/prompts/skipped_energy"] == 0
        indices += made.rows.tolist()
    assert sorted(indices) == list(range(24))


@pytest.mark.parametrize(("keep", "drawn"), [(0.9, 9), (0.7, 11), (0.5, 16)])
@pytest.mark.parametrize("rule", ["beta", "threshold"])
def test_refill_draws_more_than_it_keeps_once_prompts_are_known(make, keep, drawn, rule):
    level = after(make(keep=keep, rule=rule), 3)
    batch = draw(level, 4)
    made = level.submission
    assert batch["index"].tolist() == made.rows.tolist()
    assert made.plan.pi.size == drawn == made.plan.drawn.sum()
    assert made.plan.drawn.max() - made.plan.drawn.min() <= 1
    assert np.bincount(made.mini_batch).tolist() == [4, 4]
    assert made.known.all()
    of_rows, figures, *_ = learn(level, 4)
    assert of_rows.weight == pytest.approx(1 / np.repeat(made.pi, COMPLETIONS))
    assert of_rows.mini_batch.tolist() == np.repeat(made.mini_batch, COMPLETIONS).tolist()
    assert of_rows.drawn.tolist() == made.plan.drawn.tolist()
    assert of_rows.tokens_per_prompt == made.tokens_per_prompt
    assert figures["dppo/prompts/drawn"] == drawn
    assert (figures["dppo/prompts/kept"], figures["dppo/prompts/skipped"]) == (8, drawn - 8)
    assert figures["dppo/prompts/total_drawn"] == level.stream.position == 24 + drawn
    assert figures["dppo/prompts/total_skipped"] == drawn - 8
    assert figures["dppo/prompts/pi_min"] >= 0.3


def test_shrink_draws_the_batch_and_keeps_less(make):
    level = after(make(keep=0.5, schedule="shrink"), 3)
    made, of_rows, figures = step(level, 4)
    assert made.plan.pi.size == 8
    assert made.rows.size == 4
    assert np.bincount(made.mini_batch).tolist() == [2, 2]
    assert of_rows.drawn.tolist() == [4, 4]
    assert figures["dppo/prompts/total_skipped"] == 4


@pytest.mark.parametrize("schedule", ["refill", "shrink"])
def test_an_annealed_step_keeps_every_candidate(make, schedule):
    level = after(make(keep=0.5, schedule=schedule), 3)
    made, of_rows, figures = step(level, 4, full=True)
    assert made.known.all()
    assert made.plan.pi.tolist() == [1.0] * 8
    assert of_rows.mini_batch is None
    assert figures["dppo/prompts/keep"] == 1


def test_a_prompt_must_be_visited_as_often_as_warmup_says_before_it_can_be_skipped(make):
    level = make(keep=0.5, warmup_visits=2)
    for number in range(1, 7):
        made, _, _ = step(level, number)
        assert not made.plan.pruned
        assert made.plan.pi.size == 8
    made, _, _ = step(level, 7)
    assert made.plan.pruned
    assert made.plan.pi.size == 16


def test_probabilities_follow_the_spread_that_history_expects(make):
    level = make(keep=0.5, floor=0.1)
    hard = set(level.ids[:12])
    for number in (1, 2, 3):
        draw(level, number)
        reward = [[1, 0, 1, 0] if name in hard else [1, 1, 1, 1] for name in level.submission.ids]
        learn(level, number, reward=reward)
    draw(level, 4)
    made = level.submission
    assert made.spread.min() == pytest.approx(np.sqrt(5 / 6 / 6))
    is_hard = np.isclose(made.spread, 0.5)
    for k in range(2):
        mine = made.plan.mini_batch == k
        assert made.plan.pi[mine & is_hard].min() > made.plan.pi[mine & ~is_hard].max()


def test_without_a_prompt_level_every_completion_weighs_one():
    of_rows = PromptsOfRows.all_of(np.array([0, 0, 1, 2]))
    assert of_rows.weight.tolist() == [1] * 4
    assert of_rows.mini_batch is None
    assert of_rows.drawn.tolist() == [3]


# ---- denominators ---------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_prompt_are_the_mean_of_past_steps_each_prompt_counted_by_its_weight(make):
    level, sums = make(keep=0.5), np.zeros(2)
    for number in range(1, 9):
        draw(level, number)
        made = level.submission
        expected = sums[0] / sums[1] if number > 1 else 1.0
        assert made.tokens_per_prompt == pytest.approx(expected, rel=1e-12)
        length = np.random.default_rng(number).integers(1, 90, (made.rows.size, COMPLETIONS))
        of_rows, *_ = learn(level, number, length=length)
        assert of_rows.tokens_per_prompt == made.tokens_per_prompt, "the step's own tokens entered"
        tokens, weight = length.sum(axis=1), 1 / made.pi
        sums = 0.9 * sums + [(tokens * weight).sum(), weight.sum()]
    assert made.plan.pruned


def test_a_step_without_any_token_leaves_a_denominator_above_zero(make):
    level = make()
    step(level, 1, length=np.zeros((8, COMPLETIONS)))
    draw(level, 2)
    assert level.submission.tokens_per_prompt == pytest.approx(1 / 8)


# ---- what rollouts may look like -------------------------------------------------------------------------------------


def test_outputs_of_a_session_are_one_reward_to_the_history_and_all_of_its_tokens_count(make):
    level = make(batch=2, mini=2)
    draw(level, 1)
    # Prompt 0: sessions of 3, 1 and 1 outputs with rewards 1, 0, 0. Prompt 1: two sessions, both right.
    prompt, session = [0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 2, 3, 4]
    full, prompt = rollouts([1, 1, 1, 0, 0, 1, 1], np.arange(1, 8), prompt, session)
    level.observe(1, full, prompt, np.ones(7))
    one, other = level.submission.ids
    assert level.history.mean([one, other]) == pytest.approx([1 / 3, 1])
    assert level.history.state_dict()["count"].tolist() == [3, 2]
    draw(level, 2)
    assert level.submission.tokens_per_prompt == pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 7) / 2)


def test_rewards_find_their_prompt_in_whatever_order_rows_come(make):
    level = make(batch=2, mini=2)
    draw(level, 1)
    full, prompt = rollouts([1, 0, 0, 1, 1], prompt=[1, 0, 0, 1, 1], session=[4, 1, 0, 3, 2])
    level.observe(1, full, prompt, np.ones(5))
    assert level.history.mean(level.submission.ids).tolist() == [0, 1]


@pytest.mark.parametrize("lost", [0, 3, 7])
def test_a_prompt_that_lost_all_its_rollouts_was_not_visited(make, lost):
    level = make(keep=0.5)
    draw(level, 1)
    reward = np.tile([1.0, 0, 1, 0], (8, 1))
    full, prompt = rollouts(np.delete(reward, lost, axis=0))
    prompt = np.where(prompt >= lost, prompt + 1, prompt)
    length = full.length.sum()
    level.observe(1, full, prompt, np.ones(prompt.size))
    ids = level.submission.ids
    assert level.history.visits(ids).tolist() == [int(k != lost) for k in range(8)]
    draw(level, 2)
    assert level.submission.tokens_per_prompt == pytest.approx(length / 7)
    for number in (2, 3):
        learn(level, number)
        draw(level, number + 1)
    # In the second pass it is the one that cannot be skipped.
    made, missed = level.submission, ids[lost]
    assert level._is_known.sum() == 23
    drawn = [level.ids[row] for row in level.stream._order[: made.known.size]]
    assert made.known.tolist() == [name != missed for name in drawn]


def test_of_a_pruned_step_the_energy_of_lost_prompts_is_not_taken_for_zero(make):
    level = after(make(keep=0.5), 3)
    draw(level, 4)
    made = level.submission
    gone = 2
    full, prompt = rollouts(np.tile([1.0, 0, 1, 0], (7, 1)))
    prompt = np.where(prompt >= gone, prompt + 1, prompt)
    magnitude = np.random.default_rng(0).lognormal(size=prompt.size)
    _, figures = level.observe(4, full, prompt, magnitude)
    pi = np.delete(made.pi, gone)
    energy = (magnitude.reshape(7, COMPLETIONS) ** 2).sum(axis=1)
    whole = (energy / pi).sum()
    assert figures["dppo/prompts/variance_inflation"] == pytest.approx((energy / pi * (1 / pi - 1)).sum() / whole)
    assert figures["dppo/prompts/skipped_energy"] == pytest.approx((energy * (1 / pi - 1)).sum() / whole)
    ranks = []
    for v in (np.delete(made.spread[made.plan.kept], gone), energy):
        ranks.append([(v < x).sum() + (v == x).sum() / 2 for x in v])
    assert figures["dppo/prompts/rank_correlation"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


# ---- small data sets and duplicates ---------------------------------------------------------------------------------


def test_a_prompt_drawn_twice_in_a_step_has_two_weights_and_one_history(make):
    level = make(given=3, batch=4, mini=2, keep=0.5)
    made, _, _ = step(level, 1)
    repeated = [name for name in set(made.ids) if made.ids.count(name) == 2]
    assert len(repeated) == 1
    assert level.history.visits(repeated).tolist() == [2]
    assert len(level.history) == 3
    draw(level, 2)
    made = level.submission
    assert len(made.ids) == 4
    of_rows, _, _, prompt = learn(level, 2)
    assert of_rows.weight.tolist() == (1 / made.pi)[prompt].tolist()
    assert of_rows.weight.size == 4 * COMPLETIONS
    assert np.unique(prompt).size == 4, "copies of a prompt were taken for one"


@pytest.mark.parametrize("schedule", ["refill", "shrink"])
@pytest.mark.parametrize("given", [1, 3, 5])
def test_a_data_set_of_fewer_rows_than_the_batch_is_passed_over_several_times_in_a_step(make, given, schedule):
    level, log = make(given=given, keep=0.7, schedule=schedule, epochs=20), []
    take = level.stream.take
    level.stream.take = lambda n: log.append(take(n)) or log[-1]
    kept = {"refill": 8, "shrink": 6}[schedule]
    for number in range(1, 9):
        made, _, _ = step(level, number)
        assert made.rows.size == (8 if number == 1 else kept)
        for k, drawn in enumerate(made.plan.drawn):
            assert made.plan.pi[made.plan.mini_batch == k].sum() == pytest.approx((made.mini_batch == k).sum())
            assert (made.plan.mini_batch == k).sum() == drawn
    counts = np.bincount(np.concatenate(log), minlength=given)
    assert counts.max() - counts.min() <= 1
    assert len(level.history) == given


def test_of_one_prompt_all_draws_have_the_same_weight(make):
    level = after(make(given=1, keep=0.8), 1)
    made, of_rows, _ = step(level, 2)
    assert made.plan.pi == pytest.approx(0.8)
    assert of_rows.weight == pytest.approx(1.25)


def test_rows_with_the_same_prompt_are_known_together(make, rows):
    level = make(given=[*rows[:8], *copy.deepcopy(rows[:8])], batch=8, keep=0.5)
    made, _, _ = step(level, 1)
    of_row = level._is_known[level._code]
    assert [bool(known) for known in of_row] == [name in made.ids for name in level.ids]
    assert of_row.sum() >= 8
    assert len(level.history) == len(set(made.ids))


# ---- stopping and going on ------------------------------------------------------------------------------------------


def saved(level, folder):
    level.save(folder)
    return json.loads(json.dumps(level.state_dict()))


def resumed(level, state, folder):
    level.load_state_dict(state)
    return level.load(folder)


def same_history(one, other):
    a, b = one.history.state_dict(), other.history.state_dict()
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
@pytest.mark.parametrize("prompt", [{"keep": 0.6}, {"keep": 0.6, "schedule": "shrink"}, {"keep": "auto"}])
def test_a_run_that_stopped_goes_on_exactly_also_at_the_end_of_a_pass(make, tmp_path, stop, prompt):
    whole = after(make(**prompt), stop)
    state = saved(whole, tmp_path / "checkpoint")
    again = make(**prompt)
    again.history.observe(["of another run"], [[0.5]], 1)
    message = resumed(again, state, tmp_path / "checkpoint")
    seen = int((whole.history.visits(whole.ids) > 0).sum())
    assert f"{seen} of the 24 prompts of the data set are remembered, 0 that are remembered are not in it" in message
    assert "begins anew" not in message
    assert same_history(whole, again)
    if stop == 3:
        assert whole.stream.position == 24
    for number in range(stop + 1, stop + 6):
        batches = [draw(level, number) for level in (whole, again)]
        assert batches[0]["index"].tolist() == batches[1]["index"].tolist()
        one, other = whole.submission, again.submission
        assert one.plan.pi.tolist() == other.plan.pi.tolist()
        assert one.plan.kept.tolist() == other.plan.kept.tolist()
        assert one.tokens_per_prompt == other.tokens_per_prompt
        assert one.epoch == other.epoch
        figures = [learn(level, number)[1] for level in (whole, again)]
        assert figures[0] == figures[1]
        assert whole.planned_steps(number) == again.planned_steps(number)
    assert same_history(whole, again)
    assert saved(whole, tmp_path / "a") == saved(again, tmp_path / "b")


def test_of_a_reordered_data_set_all_prompts_are_remembered_and_the_pass_begins_anew(make, rows, tmp_path):
    level = after(make(keep=0.5), 4)
    state = saved(level, tmp_path / "checkpoint")
    assert 24 < state["stream"]["position"] < 48
    again = make(given=rows[::-1], keep=0.5)
    message = resumed(again, state, tmp_path / "checkpoint")
    assert "24 of the 24 prompts" in message
    assert "begins anew" in message
    assert again.stream.position == 24
    assert again.history.spread(level.ids).tolist() == level.history.spread(level.ids).tolist()
    draw(again, 5)
    assert again.submission.known.all()
    assert again.submission.epoch == 1


def test_of_a_changed_data_set_what_is_remembered_counts_and_the_message_says_how_much(make, rows, tmp_path):
    level = after(make(given=16, keep=0.5), 2)
    state = saved(level, tmp_path / "checkpoint")
    again = make(given=rows[4:24], keep=0.5)
    message = resumed(again, state, tmp_path / "checkpoint")
    assert "12 of the 20 prompts of the data set are remembered, 4 that are remembered are not in it" in message
    assert "begins anew" in message
    draw(again, 3)
    made = again.submission
    assert made.plan.pi.size == round(8 / (1 - 12 / 20 * 0.5))
    old = set(level.ids)
    assert made.known.sum() == sum(again.ids[row] in old for row in again.stream._order[: made.known.size])
    assert again.stream.state_dict()["rows"] == 20


def test_a_history_of_another_moment_is_refused(make, tmp_path):
    level = after(make(), 2)
    early = saved(level, tmp_path / "checkpoint")
    late = saved(after(level, 1, first=3), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=rf"{HISTORY_FILE} and dppo\.json beside it were not written together"):
        resumed(make(), early, tmp_path / "checkpoint")
    resumed(make(), late, tmp_path / "checkpoint")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:99])])
def test_a_history_that_is_missing_or_torn_is_refused_with_its_path(make, tmp_path, damage):
    state = saved(after(make(), 1), tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint" / HISTORY_FILE)
    with pytest.raises(ValueError, match=str(tmp_path / "checkpoint" / HISTORY_FILE)):
        resumed(make(), state, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "change",
    [
        {"kept": -1},
        {"plan": {}},
        {"tokens": float("nan")},
        {"tokens": -1.0},
        {"prompts": float("inf")},
        {"stream": {"position": -1, "rows": 24, "fingerprint": ""}},
        {"budget": {}},
        {"history": {}},
    ],
)
def test_a_state_that_no_run_left_is_refused(make, tmp_path, change):
    state = saved(after(make(), 1), tmp_path / "checkpoint")
    with pytest.raises((ValueError, KeyError)):
        make().load_state_dict(state | change)


# ---- the whole training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "anneal", "steps"),
    [
        ({"keep": 0.5}, 0.0, 3 + 3),  # 24 prompts by 8, then 48 by 16
        ({"keep": 0.5}, 0.2, 7),  # 24 by 8, three steps by 16, one annealed of 8: 80; six would draw 64
        ({"keep": 1.0}, 0.0, 9),
        ({"keep": 0.5, "schedule": "shrink"}, 0.0, 9),
        ({"keep": 0.5, "warmup_visits": 2}, 0.0, 6 + 2),
        ({"keep": "auto"}, 0.0, 9),
    ],
)
def test_the_planned_steps_draw_all_passes_and_no_step_is_spare(make, prompt, anneal, steps):
    level = make(anneal=anneal, **prompt)
    total = level.planned_steps(0)
    assert total == steps
    for number in range(1, total + 1):
        assert level.stream.position < 3 * 24 or anneal
        step(level, number, full=number > total - round(anneal * total))
        if prompt["keep"] != "auto":
            assert level.planned_steps(number) == total
    assert level.stream.position >= 3 * 24


@pytest.mark.parametrize("stop", [0, 3, 6, 7])
def test_a_run_that_stopped_has_the_same_plan_also_where_annealing_has_begun(make, tmp_path, stop):
    level = make(keep=0.5, anneal=0.25, epochs=4)
    total = level.planned_steps(0)
    assert total == 9
    for number in range(1, stop + 1):
        step(level, number, full=number > total - 2)
        assert level.planned_steps(number) == total
    state = saved(level, tmp_path / "checkpoint")
    again = make(keep=0.5, anneal=0.25, epochs=4)
    again.planned_steps(0)
    resumed(again, state, tmp_path / "checkpoint")
    assert again.planned_steps(stop) == total
    longer = make(keep=0.5, anneal=0.25, epochs=9)
    resumed(longer, state, tmp_path / "checkpoint")
    assert longer.planned_steps(stop) > total


def test_with_auto_the_plan_follows_the_share_that_is_kept(make):
    level = make(keep="auto", epochs=10)
    assert level.keep == 1
    assert level.planned_steps(0) == 30
    after(level, 3)
    assert level.controller.steps == 0, "it learnt from prompts that were not known"
    after(level, 2, first=4)
    assert level.controller.steps == 2
    level.controller.keep = 0.5
    assert level.keep == 0.5
    assert level.planned_steps(5) == 5 + (240 - 40) // 16 + 1
    draw(level, 6)
    assert level.submission.plan.pi.size == 16


@pytest.mark.parametrize("schedule", ["refill", "shrink"])
def test_over_all_passes_every_row_is_drawn_equally_often_whatever_is_skipped(make, schedule):
    level, log = make(keep=0.6, schedule=schedule, epochs=4), []
    take = level.stream.take
    level.stream.take = lambda n: log.append(take(n)) or log[-1]
    after(level, level.planned_steps(0))
    assert np.bincount(np.concatenate(log)[: 4 * 24]).tolist() == [4] * 24
    assert level.kept < level.stream.position
