import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.pruning import PromptHistory
from verl_dppo.pruning.history import COLUMNS

MOST_BYTES = 16  # of one prompt, its id apart


def seen(visits, forgetting=0.5):
    """A history of `visits`: pairs of ids and rewards, one for each step from 1."""
    history = PromptHistory(forgetting)
    for step, (ids, rewards) in enumerate(visits, start=1):
        history.observe(ids, rewards, step)
    return history


def same_state(one, other):
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(
        np.array_equal(a[key], b[key]) and np.asarray(a[key]).dtype == np.asarray(b[key]).dtype for key in a
    )


def random_visits(seed, steps=6, binary=False, completions=4, pool=9):
    """Groups of several prompts in every step, some twice, some rewards missing."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = [f"p{k}" for k in rng.integers(0, pool, 5)]
        rewards = (rng.random((5, completions)) < 0.6).astype(float) if binary else rng.normal(size=(5, completions))
        rewards[rng.random(rewards.shape) < 0.15] = np.nan
        yield ids, rewards


# ---- the rules, by hand ---------------------------------------------------------------------------------------------


def test_the_spread_of_pass_rates_is_that_of_the_beta_posterior_mean():
    history = seen([(["a", "b", "c"], [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])])
    # Beta(1 + 3, 1 + 1), Beta(1, 5), Beta(5, 1), and Beta(1, 1) of a prompt never seen.
    p = np.array([4 / 6, 1 / 6, 5 / 6, 1 / 2])
    assert history.spread(["a", "b", "c", "never"]) == pytest.approx(np.sqrt(p * (1 - p)), rel=1e-7)
    assert history.mean(["a", "b", "c"]) == pytest.approx([0.75, 0, 1])


def test_an_older_visit_counts_by_the_forgetting_factor():
    history = seen([(["a"], [[1, 1, 1, 0]]), (["a"], [[1, 0, 0, 0]])], forgetting=0.5)
    p = (0.5 * 3 + 1 + 1) / (0.5 * 4 + 4 + 2)
    assert history.spread(["a"])[0] == pytest.approx(np.sqrt(p * (1 - p)), rel=1e-7)


def test_other_rewards_are_judged_by_their_variance_shrunk_to_the_pooled_one():
    history = seen([(["a", "b"], [[-1, 1, 1, 1], [0.25, 0.25, 0.25, 0.25]])])
    pooled = (0.75 + 0) / 2
    expected = [(4 * 0.75 + 2 * pooled) / 6, 2 * pooled / 6, pooled]
    assert history.spread(["a", "b", "never"]) == pytest.approx(np.sqrt(expected), rel=1e-7)


def test_the_first_reward_that_is_neither_0_nor_1_changes_the_rule_for_all_prompts():
    history = seen([(["a", "b"], [[1, 1, 1, 0], [1, 0, 1, 0]])])
    assert history.binary
    of_beta = history.spread(["a"])[0]
    history.observe(["c"], [[0.5, 0.5, 0.5, 0.5]], 2)
    assert not history.binary
    pooled = (3 / 16 + 1 / 4 + 0) / 3
    assert history.spread(["a"])[0] == pytest.approx(np.sqrt((4 * 3 / 16 + 2 * pooled) / 6), rel=1e-7)
    assert history.spread(["a"])[0] != pytest.approx(of_beta, rel=1e-3)
    history.observe(["a"], [[1, 0, 1, 0]], 3)
    assert not history.binary, "one group of zeros and ones made it forget the others"


@pytest.mark.parametrize("rewards", [[[0.5] * 4] * 3, [[-1.0] * 4] * 3, [[1e-30, 3e-30, 0, 0]] * 3])
def test_where_no_reward_varies_all_prompts_are_alike(rewards):
    history = seen([(["a", "b", "c"], rewards)])
    spread = history.spread(["a", "b", "c", "never"])
    assert spread == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-6, 0.01, 3.0, 1e6]),
    st.sampled_from([-2.0, 0.0, 1.0, 5.0]),
    st.sampled_from(["beta", "threshold"]),
)
def test_neither_the_scale_nor_the_zero_of_rewards_changes_who_is_included(seed, scale, shift, rule):
    visits = list(random_visits(seed))
    ids = sorted({name for names, _ in visits for name in names})
    plain = seen(visits).inclusion(ids, 0.7, 0.3, rule)
    scaled = seen([(names, scale * (rewards + shift)) for names, rewards in visits]).inclusion(ids, 0.7, 0.3, rule)
    assert scaled == pytest.approx(plain, abs=1e-4)


# ---- against a reference that keeps every reward ---------------------------------------------------------------------


def remembered(visits, name, forgetting):
    """Weighted count, mean and variance of all rewards of a prompt, and its visits."""
    groups = [
        row[~np.isnan(row)]
        for ids, rewards in visits
        for k, row in enumerate(np.asarray(rewards, dtype=float))
        if ids[k] == name and not np.isnan(row).all()
    ]
    weight = np.concatenate([np.full(g.size, forgetting ** (len(groups) - 1 - v)) for v, g in enumerate(groups)])
    value = np.concatenate(groups)
    mean = (weight * value).sum() / weight.sum()
    return weight.sum(), mean, (weight * (value - mean) ** 2).sum() / weight.sum(), len(groups)


@pytest.mark.parametrize("forgetting", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("binary", [True, False])
def test_count_mean_variance_and_visits_are_those_of_all_rewards_with_older_ones_discounted(forgetting, binary):
    for seed in range(8):
        visits = list(random_visits(seed, binary=binary))
        history = seen(visits, forgetting)
        state = history.state_dict()
        names = [name.decode() for name in state["id"]]
        expected = np.array([remembered(visits, name, forgetting) for name in names])
        assert state["count"].astype(float) == pytest.approx(expected[:, 0], rel=1e-3)  # float16
        assert state["mean"].astype(float) == pytest.approx(expected[:, 1], rel=2e-3, abs=2e-3)
        assert state["variance"].astype(float) == pytest.approx(expected[:, 2], rel=4e-3, abs=2e-3)
        assert history.visits(names).tolist() == expected[:, 3].tolist()
        assert history.mean(names) == pytest.approx(expected[:, 1], rel=2e-3, abs=2e-3)


def test_a_factor_of_0_remembers_the_last_visit_only_and_1_all_alike():
    visits = [(["a"], [[0, 0, 0, 0.5]]), (["a"], [[1, 1, 1, 0]])]
    assert seen(visits, 0.0).mean(["a"])[0] == pytest.approx(0.75)
    assert seen(visits, 1.0).mean(["a"])[0] == pytest.approx(3.5 / 8)


# ---- what a step may look like --------------------------------------------------------------------------------------


def test_a_missing_reward_does_not_count_and_a_group_without_any_is_no_visit():
    holes = seen([(["a", "b"], [[1, np.nan, 0, np.nan], [np.nan] * 4])])
    without = seen([(["a"], [[1, 0]])])
    assert same_state(holes, without)
    assert holes.visits(["a", "b"]).tolist() == [1, 0]
    history = PromptHistory()
    history.observe(["a"], [[np.nan, np.nan]], 1)
    history.observe([], np.zeros((0, 4)), 2)
    assert len(history) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_prompt_that_occurs_several_times_in_a_call_was_visited_in_that_order(seed, binary, forgetting):
    visits = list(random_visits(seed, binary=binary, pool=3))
    at_once, one_by_one = PromptHistory(forgetting), PromptHistory(forgetting)
    for step, (ids, rewards) in enumerate(visits):
        at_once.observe(ids, rewards, step)
        for name, row in zip(ids, rewards, strict=True):
            one_by_one.observe([name], row[None], step)
    assert same_state(at_once, one_by_one)


def test_visits_and_last_step_are_those_of_each_prompt():
    history = seen([(["a", "b"], np.eye(2)), (["c"], [[1, 0]]), (["b"], [[1, 1]])])
    assert history.visits(["a", "b", "c", "never"]).tolist() == [1, 2, 1, 0]
    assert history.last_step(["a", "b", "c", "never"]).tolist() == [1, 3, 2, 0]
    assert len(history) == 3
    assert PromptHistory().visits(["a"]).tolist() == [0]


def test_nothing_is_mixed_up_while_the_history_grows():
    history, rng = PromptHistory(), np.random.default_rng(0)
    truth = {}
    for step in range(40):
        ids = [f"{step}-{k}" for k in range(rng.integers(1, 30))]
        means = rng.random(len(ids))
        truth.update(zip(ids, means, strict=True))
        history.observe(ids, means[:, None].repeat(2, axis=1), step)
    names = list(truth)
    rng.shuffle(names)
    assert history.mean(names) == pytest.approx([truth[name] for name in names], rel=1e-6)


def test_what_the_small_types_cannot_hold_does_no_harm():
    many = seen([(["a"], np.ones((1, 70_000))), (["a"], np.zeros((1, 60_000)))], forgetting=1.0)
    assert many.mean(["a"])[0] == pytest.approx(0.5, abs=1e-3)
    assert np.isfinite(many.state_dict()["count"]).all()
    assert 0 < many.spread(["a"])[0] <= 0.5
    PromptHistory().load_state_dict(many.state_dict())
    # From 2048 on, float16 does not count by ones: the mean must still follow.
    single = PromptHistory(1.0)
    for step in range(3000):
        single.observe(["a"], [[step % 2]], step)
    assert single.mean(["a"])[0] == pytest.approx(0.5, abs=1e-3)
    for step in range(3000):
        single.observe(["a"], [[1]], step)
    assert single.mean(["a"])[0] > 0.8
    single._columns["visits"][:] = 65_535
    single.observe(["a"], [[1]], 1)
    assert single.visits(["a"]).tolist() == [65_535]


@pytest.mark.parametrize(
    ("ids", "rewards"),
    [
        (["new", "a"], [[1, 0], [np.inf, 0]]),
        (["new", "a"], [[1, -np.inf], [np.nan, 0]]),
        (["new", "a"], [[1e19, 0], [0, 0]]),
        (["new", ""], [[1, 0], [0.5, 0]]),
        (["new", "x\0"], [[1, 0], [0.5, 0]]),
        (["new"], [[1, 0], [1, 0]]),
        (["new"], [1, 0]),
    ],
)
def test_what_cannot_be_learnt_is_refused_and_nothing_is_learnt(ids, rewards):
    history = seen([(["a"], [[1, 0]])])
    before = seen([(["a"], [[1, 0]])])
    with pytest.raises(ValueError, match=r"infinite|no prompt id|shape"):
        history.observe(ids, rewards, 2)
    assert same_state(history, before)
    assert history.binary
    assert history.spread(["new", "a"]) == pytest.approx(before.spread(["new", "a"]))


def test_the_largest_rewards_that_are_taken_leave_finite_figures():
    history = seen([(["a"], [[-1e18, 1e18]]), (["a"], [[1e18, 1e18]])])
    assert np.isfinite(history.spread(["a", "never"])).all()
    PromptHistory().load_state_dict(history.state_dict())


@pytest.mark.parametrize("forgetting", [-0.1, 1.1, float("nan")])
def test_a_forgetting_factor_outside_its_range_is_refused(forgetting):
    with pytest.raises(ValueError, match="forgetting"):
        PromptHistory(forgetting)


# ---- inclusion ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.floats(0.05, 1),
    st.floats(0.01, 1),
    st.sampled_from(["beta", "threshold"]),
)
def test_unseen_prompts_are_certain_and_the_others_share_the_keep_above_the_floor(seed, binary, keep, part, rule):
    floor = keep * part
    history = seen(random_visits(seed, binary=binary))
    ids = [f"p{k}" for k in range(12)]
    visited = history.visits(ids) > 0
    pi = history.inclusion(ids, keep, floor, rule)
    assert (pi[~visited] == 1).all()
    assert pi[visited].sum() == pytest.approx(keep * visited.sum(), rel=1e-9)
    assert (pi >= floor).all()
    assert (pi <= 1).all()


def test_a_prompt_that_varies_more_is_included_more_surely():
    history = seen([(["easy", "even", "hard"], [[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 1]])])
    easy, even, hard = history.inclusion(["easy", "even", "hard"], 0.6, 0.1)
    assert easy < hard < even


def test_of_prompts_that_were_never_seen_all_are_certain():
    assert PromptHistory().inclusion(["a", "b"], 0.5).tolist() == [1, 1]


@pytest.mark.parametrize(("keep", "floor"), [(0.5, 0.6), (0.5, 0.0), (1.1, 0.3), (0.0, 0.0)])
def test_shares_outside_their_range_are_refused(keep, floor):
    with pytest.raises(ValueError, match="floor"):
        seen([(["a"], [[1, 0]])]).inclusion(["a"], keep, floor)


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="neyman"):
        seen([(["a"], [[1, 0]])]).inclusion(["a"], 0.5, 0.3, "neyman")


# ---- state ----------------------------------------------------------------------------------------------------------


def test_a_prompt_takes_at_most_16_bytes_beyond_its_id():
    assert sum(dtype.itemsize for dtype in COLUMNS.values()) <= MOST_BYTES
    state = seen([([f"{k}" for k in range(1000)], np.eye(1000, 4))]).state_dict()
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray) and name != "id"}
    assert sum(column.nbytes for column in arrays.values()) <= MOST_BYTES * 1000


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("stop", [0, 3, 6])
def test_continuing_from_a_saved_state_equals_not_having_stopped_to_the_bit(binary, stop):
    visits = list(random_visits(1, binary=binary))
    whole, before = PromptHistory(), PromptHistory()
    for step, (ids, rewards) in enumerate(visits):
        whole.observe(ids, rewards, step)
        if step < stop:
            before.observe(ids, rewards, step)
    after = PromptHistory()
    after.load_state_dict(before.state_dict())
    assert same_state(after, before)
    for step, (ids, rewards) in list(enumerate(visits))[stop:]:
        after.observe(ids, rewards, step)
    assert same_state(after, whole)
    ids = [f"p{k}" for k in range(12)]
    assert after.inclusion(ids, 0.6).tolist() == whole.inclusion(ids, 0.6).tolist()


def test_a_saved_state_stands_apart_from_the_history_that_left_it():
    history = seen([(["a"], [[1, 0]])])
    state = history.state_dict()
    loaded = PromptHistory()
    loaded.load_state_dict(state)
    history.observe(["a"], [[1, 1]], 2)
    loaded.observe(["a", "b"], [[0, 0], [0, 0]], 2)
    assert state["mean"].tolist() == [0.5]
    assert history.mean(["a"])[0] != loaded.mean(["a"])[0]


def test_the_forgetting_factor_is_that_of_the_run_not_of_the_state():
    loaded = PromptHistory(0.25)
    loaded.load_state_dict(seen([(["a"], [[1, 0]])], forgetting=1.0).state_dict())
    assert loaded.forgetting == 0.25


def test_ids_of_any_script_and_length_come_back():
    ids = ["é", "日本", "x" * 200, "a"]
    loaded = PromptHistory()
    loaded.load_state_dict(seen([(ids, np.eye(4))]).state_dict())
    assert loaded.visits(ids).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"mean": np.zeros(2)}, "mean"),
        ({"count": np.zeros(3, np.float16)}, "count"),
        ({"visits": np.zeros((2, 1), np.uint16)}, "visits"),
        ({"id": np.array([b"a", b"a"])}, "repeat"),
        ({"id": np.array([b"a", b"\xff"])}, "utf-8"),
        ({"mean": np.array([0, np.nan], np.float32)}, "no run leaves"),
        ({"variance": np.array([0, np.inf], np.float32)}, "no run leaves"),
        ({"variance": np.array([0, -1], np.float32)}, "no run leaves"),
        ({"count": np.array([-1, 2], np.float16)}, "no run leaves"),
    ],
)
def test_a_state_that_no_run_left_is_refused_and_changes_nothing(change, message):
    history = seen([(["a"], [[1, 0.5]])])
    before = seen([(["a"], [[1, 0.5]])])
    state = seen([(["b", "c"], [[1, 0], [1, 1]])]).state_dict()
    with pytest.raises(ValueError, match=message):
        history.load_state_dict(state | change)
    assert same_state(history, before)


@pytest.mark.parametrize("name", ["version", "id", "binary", *COLUMNS])
def test_a_state_that_lacks_a_part_is_refused(name):
    state = seen([(["b", "c"], [[1, 0], [1, 1]])]).state_dict()
    del state[name]
    with pytest.raises(KeyError, match=name):
        PromptHistory().load_state_dict(state)
