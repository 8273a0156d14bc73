import json

import pytest

from verl_dppo.training.state import FILE, read_state, write_state


def test_what_was_written_is_read_and_a_person_can_read_it(tmp_path):
    state = {"budget": {"keep": 0.1 + 0.2, "inflation": [0.5, 1e-17]}, "norms": {"step": []}}
    write_state(tmp_path / "global_step_3", state)
    found = read_state(tmp_path / "global_step_3")
    assert {name: found[name] for name in state} == state
    text = (tmp_path / "global_step_3" / FILE).read_text()
    assert json.loads(text)["version"] == 1
    assert '"inflation": [0.5, 1e-17]' in text
    assert [p.name for p in (tmp_path / "global_step_3").iterdir()] == [FILE], "a partial file was left"


def test_a_checkpoint_without_state_is_none(tmp_path):
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "verl_dppo state", "version": 2}', '{"version": 1}'])
def test_a_file_of_another_kind_is_refused_with_the_way_out(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match="resume with the version"):
        read_state(tmp_path)


def test_a_crash_while_writing_leaves_the_old_state(tmp_path):
    write_state(tmp_path, {"budget": 1})
    with pytest.raises(TypeError):
        write_state(tmp_path, {"budget": object()})
    assert read_state(tmp_path)["budget"] == 1
