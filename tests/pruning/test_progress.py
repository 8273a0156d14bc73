from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.pruning import planned_steps


def drawn_by(total, done, drawn, warmup, batch, next_step, steady, anneal):
    """What is drawn when a training of `total` steps goes on from `done`, step by step."""
    for step in range(done + 1, total + 1):
        warming, annealed = drawn < warmup, step > total - round(anneal * total)
        usual = next_step if step == done + 1 else batch if warming else steady
        drawn += batch if annealed else usual
    return drawn


def first_that_suffices(done, drawn, prompts, warmup, *sizes):
    total = done
    while drawn_by(total, done, drawn, warmup, *sizes) < prompts:
        total += 1
    return total


def plan_of(prompts, warmup, batch, steady, anneal, drawn=0):
    """Arguments where the next step is like the others: a whole batch while prompts are unknown, more then."""
    return prompts, warmup, batch, (batch if drawn < warmup else steady), steady, anneal


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
    assert planned_steps(0, 0, *plan_of(*plan)) == first_that_suffices(0, 0, *plan_of(*plan))


@settings(max_examples=400, deadline=None)
@given(plans, st.integers(0, 30), st.integers(0, 300), st.floats(0, 1))
def test_what_was_done_and_drawn_before_and_what_the_next_step_draws_is_counted(plan, done, drawn, share):
    prompts, warmup, batch, steady, anneal = plan
    plan = prompts, warmup, batch, round(batch + share * (steady - batch)), steady, anneal
    total = planned_steps(done, drawn, *plan)
    assert total == first_that_suffices(done, drawn, *plan)
    assert total >= done


@settings(max_examples=400, deadline=None)
@given(plans)
def test_planning_anew_after_each_step_changes_nothing_without_annealing(plan):
    prompts, warmup, batch, steady, _ = plan
    plan = prompts, warmup, batch, steady, 0.0
    total, done, drawn = planned_steps(0, 0, *plan_of(*plan)), 0, 0
    while drawn < prompts:
        drawn += batch if drawn < warmup else steady
        done += 1
        assert planned_steps(done, drawn, *plan_of(*plan, drawn)) == total
    assert done == total


@settings(max_examples=400, deadline=None)
@given(plans, st.randoms(use_true_random=False))
def test_the_last_step_is_known_to_be_the_last_whatever_steps_draw(plan, sizes):
    """Rollouts fail, so that prompts stay unknown and a step draws less than was planned for."""
    prompts, warmup, batch, steady, _ = plan
    done = drawn = 0
    while True:
        next_step = sizes.randint(batch, max(batch, steady))
        total = planned_steps(done, drawn, prompts, warmup, batch, next_step, steady, 0.0)
        if total == done:
            break
        done, drawn = done + 1, drawn + next_step
        assert (total == done) == (drawn >= prompts)
    assert drawn >= prompts


@settings(max_examples=400, deadline=None)
@given(plans)
def test_planning_anew_after_each_step_draws_every_prompt_and_ends_at_most_a_step_early(plan):
    """With budgets and shares that are of use: keep >= .5, and at most a fifth annealed."""
    prompts, warmup, batch, steady, anneal = plan
    steady, anneal = min(steady, 2 * batch), anneal / 5
    plan = prompts, warmup, batch, steady, anneal
    total = first = planned_steps(0, 0, *plan_of(*plan))
    done = drawn = 0
    while done < total:
        done += 1
        annealed = done > total - round(anneal * total)
        drawn += batch if drawn < warmup or annealed else steady
        total = planned_steps(done, drawn, *plan_of(*plan, drawn))
        assert first - 1 <= total <= first
    assert drawn >= prompts


def test_by_hand():
    # 64 rows, 3 passes, batch 8, keep .5: 8 steps of warm-up, then 128 prompts by 16.
    assert planned_steps(0, 0, 192, 64, 8, 8, 16, 0.0) == 8 + 8
    # The last eighth is annealed: 17 steps, of which 2 draw 8: 8 * 8 + 7 * 16 + 2 * 8 = 192.
    assert planned_steps(0, 0, 192, 64, 8, 8, 16, 0.125) == 17
    assert planned_steps(5, 40, 192, 64, 8, 8, 16, 0.0) == 16
    assert planned_steps(16, 192, 192, 64, 8, 16, 16, 0.0) == 16
    assert planned_steps(0, 0, 5, 5, 8, 8, 16, 0.0) == 1
