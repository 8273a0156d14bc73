import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_dppo.pruning import PromptStream


def shuffled(rows, seed=0, log=None):
    """A sampler that gives another permutation on each call, the same ones in every run."""
    rng = np.random.default_rng(seed)

    def next_pass():
        order = rng.permutation(rows)
        if log is not None:
            log.append(order)
        return order

    return next_pass


def stream_of(rows, seed=0, fingerprint="same", log=None):
    return PromptStream(rows, shuffled(rows, seed, log), fingerprint)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 15), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_over_so_many_passes_every_row_is_drawn_so_often_whatever_the_steps(rows, passes, seed):
    rng, log = np.random.default_rng(seed), []
    stream, drawn, steps = stream_of(rows, seed, log=log), [], 0
    while stream.position < passes * rows:
        n = int(rng.integers(0, 2 * rows + 2))
        step = stream.take(min(n, passes * rows - stream.position))
        drawn, steps = [*drawn, *step.tolist()], steps + 1
        assert stream.position == len(drawn)
    assert np.bincount(drawn, minlength=rows).tolist() == [passes] * rows
    assert drawn == np.concatenate(log).tolist(), "not the passes one behind the other"
    assert len(log) == passes


def test_a_step_may_span_several_passes_of_a_data_set_of_one_row():
    log = []
    stream = stream_of(1, log=log)
    assert stream.take(8).tolist() == [0] * 8
    assert stream.position == len(log) == 8
    assert stream.to_come().tolist() == [0]


def test_to_take_nothing_moves_nothing():
    stream = stream_of(4)
    assert stream.take(0).size == 0
    assert stream.position == 0


def test_what_is_to_come_is_what_the_pass_has_not_drawn_and_all_of_the_next_at_its_end():
    stream = stream_of(5)
    assert sorted(stream.to_come()) == [0, 1, 2, 3, 4]
    first = stream.take(3)
    rest = stream.to_come()
    assert sorted([*first, *rest]) == [0, 1, 2, 3, 4]
    assert stream.take(2).tolist() == rest.tolist()
    following = stream.to_come()
    assert sorted(following) == [0, 1, 2, 3, 4]
    assert stream.position == 5, "looking moved the stream"
    assert stream.take(5).tolist() == following.tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.integers(0, 22), st.booleans(), st.integers(0, 100))
def test_a_saved_position_continues_as_if_nothing_had_been(rows, position, looked, seed):
    whole, before, after = (stream_of(rows, seed) for _ in range(3))
    whole.take(position)
    before.take(position)
    if looked:
        before.to_come()
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict() == {"position": position, "rows": rows, "fingerprint": "same"}
    assert after.to_come().tolist() == whole.to_come().tolist()
    assert after.take(3 * rows + 1).tolist() == whole.take(3 * rows + 1).tolist()


@pytest.mark.parametrize("position", [4, 8])
def test_the_end_of_a_pass_is_a_position_like_others(position):
    whole, saved, resumed = stream_of(4), stream_of(4), stream_of(4)
    assert sorted(whole.take(position)) == sorted([0, 1, 2, 3] * (position // 4))
    saved.take(position)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.take(4).tolist() == whole.take(4).tolist()


@pytest.mark.parametrize(
    ("rows", "fingerprint", "position", "expected"),
    [
        (5, "other", 7, 5),  # the second pass was under way
        (6, "same", 7, 6),
        (6, "other", 4, 0),
        (3, "other", 10, 6),
        (8, "other", 10, 16),  # two passes were complete
        (5, "same", 7, 7),
    ],
)
def test_of_another_data_set_or_order_the_interrupted_pass_begins_anew(rows, fingerprint, position, expected):
    saved = stream_of(5)
    saved.take(position)
    resumed = stream_of(rows, fingerprint=fingerprint)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.position == expected
    if expected % rows == 0:
        assert sorted(resumed.take(rows)) == list(range(rows))


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1], [0, 1, 2, 2], [1, 2, 3], []])
def test_a_sampler_that_repeats_or_lacks_rows_is_refused(order):
    with pytest.raises(ValueError, match="pass 0 over the data set does not hold each of its 3 rows once"):
        PromptStream(3, lambda: np.array(order, dtype=int)).take(2)


def test_the_pass_that_is_refused_is_named():
    orders = iter([np.arange(3), np.array([0, 0, 1])])
    stream = PromptStream(3, lambda: next(orders))
    with pytest.raises(ValueError, match="pass 1"):
        stream.take(4)


def test_a_data_set_without_rows_is_refused():
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream(0, lambda: np.arange(0))


@pytest.mark.parametrize("change", [{"position": -1}, {"rows": 0}, {"position": "x"}, {"position": None}])
def test_a_position_that_no_run_left_is_refused(change):
    stream = stream_of(3)
    with pytest.raises((ValueError, TypeError)):
        stream.load_state_dict({"position": 1, "rows": 3, "fingerprint": "same"} | change)
    assert stream.position == 0


@pytest.mark.parametrize("name", ["position", "rows", "fingerprint"])
def test_a_state_that_lacks_a_part_is_refused(name):
    state = stream_of(3).state_dict()
    del state[name]
    with pytest.raises(KeyError, match=name):
        stream_of(3).load_state_dict(state)


def test_a_stream_that_has_gone_on_does_not_take_the_present_pass_for_an_earlier_one():
    stream = stream_of(3)
    early = stream.state_dict()
    stream.take(4)
    stream.load_state_dict(early)
    with pytest.raises(ValueError, match="pass 0 over the data set is over"):
        stream.take(1)
