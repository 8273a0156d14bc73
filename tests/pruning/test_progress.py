from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.pruning import planned_steps


def drawn_by(total, done, drawn, warmup, batch, steady, anneal):
    """What is drawn when a training of `total` steps goes on from `done`, step by step."""
    for step in range(done + 1, total + 1):
        warming, annealed = drawn < warmup, step > total - round(anneal * total)
        drawn += batch if warming or annealed else steady
    return drawn


def first_that_suffices(done, drawn, prompts, warmup, batch, steady, anneal):
    total = done
    while drawn_by(total, done, drawn, warmup, batch, steady, anneal) < prompts:
        total += 1
    return total


plans = st.tuples(
    st.integers(1, 300),  # prompts of all passes
    st.floats(0, 1.5),  # warm-up, in shares of them
    st.integers(1, 20),  # batch size
    st.floats(1, 4),  # steady, in batches
    st.sampled_from([0.0, 0.1, 0.125, 0.3, 0.5, 0.9, 1.0]) | st.floats(0, 1),
).map(lambda p: (p[0], min(round(p[1] * p[0]), p[0]), p[2], round(p[2] * p[3]), p[4]))


@settings(max_examples=400, deadline=None)
@given(plans)
def test_the_steps_are_the_fewest_that_draw_all_prompts(plan):
    assert planned_steps(0, 0, *plan) == first_that_suffices(0, 0, *plan)


@settings(max_examples=400, deadline=None)
@given(plans, st.integers(0, 30), st.integers(0, 300))
def test_what_was_done_and_drawn_before_is_counted(plan, done, drawn):
    total = planned_steps(done, drawn, *plan)
    assert total == first_that_suffices(done, drawn, *plan)
    assert total >= done


@settings(max_examples=400, deadline=None)
@given(plans)
def test_planning_anew_after_each_step_changes_nothing_without_annealing(plan):
    prompts, warmup, batch, steady, _ = plan
    total, done, drawn = planned_steps(0, 0, *plan[:4], 0.0), 0, 0
    while drawn < prompts:
        drawn += batch if drawn < warmup else steady
        done += 1
        assert planned_steps(done, drawn, *plan[:4], 0.0) == total
    assert done == total


@settings(max_examples=400, deadline=None)
@given(plans)
def test_planning_anew_after_each_step_draws_every_prompt_and_ends_at_most_a_step_early(plan):
    """With budgets and shares that are of use: keep >= .5, and at most a fifth annealed."""
    prompts, warmup, batch, steady, anneal = plan
    steady, anneal = min(steady, 2 * batch), anneal / 5
    plan = prompts, warmup, batch, steady, anneal
    total = first = planned_steps(0, 0, *plan)
    done = drawn = 0
    while done < total:
        done += 1
        annealed = done > total - round(anneal * total)
        drawn += batch if drawn < warmup or annealed else steady
        total = planned_steps(done, drawn, *plan)
        assert first - 1 <= total <= first
    assert drawn >= prompts


def test_by_hand():
    # 64 rows, 3 passes, batch 8, keep .5: 8 steps of warm-up, then 128 prompts by 16.
    assert planned_steps(0, 0, 192, 64, 8, 16, 0.0) == 8 + 8
    # The last eighth is annealed: 17 steps, of which 2 draw 8: 8 * 8 + 7 * 16 + 2 * 8 = 192.
    assert planned_steps(0, 0, 192, 64, 8, 16, 0.125) == 17
    assert planned_steps(5, 40, 192, 64, 8, 16, 0.0) == 16
    assert planned_steps(16, 192, 192, 64, 8, 16, 0.0) == 16
    assert planned_steps(0, 0, 5, 5, 8, 16, 0.0) == 1
