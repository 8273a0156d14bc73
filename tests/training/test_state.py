import json

import numpy as np
import pytest

from verl_dppo.pruning import KeepController, NormRecord, PromptKeepController
from verl_dppo.training.state import FILE, load_state, save_state


def parts(seed=0):
    """A budget and a record that a few steps have left."""
    rng, budget, norms = np.random.default_rng(seed), KeepController(), NormRecord()
    for step in range(6):
        budget.observe(*rng.uniform(1, 2, 2), 100 * rng.uniform(1, 2), 0.6, rng.random(19))
        columns = ("sum_sq_one_minus_p", "length", "prompt_length", "scale", "magnitude", "norm", "weight")
        norms.observe(step, **{name: rng.uniform(1, 2, 3) for name in columns})
    return {"budget": budget, "norms": norms}


def fresh():
    return {"budget": KeepController(), "norms": NormRecord()}


def test_what_was_saved_is_loaded_exactly_and_a_person_can_read_it(tmp_path):
    saved, loaded = parts(), fresh()
    save_state(tmp_path / "global_step_3", saved)
    assert load_state(tmp_path / "global_step_3", loaded) == {"budget", "norms"}
    assert loaded["norms"].state_dict() == saved["norms"].state_dict() != NormRecord().state_dict()
    ours, theirs = (part["budget"].state_dict() for part in (loaded, saved))
    sums = np.array(ours.pop("update_time_sums")) / theirs.pop("update_time_sums")
    assert ours == theirs != KeepController().state_dict()
    assert sums == pytest.approx(sums[0])
    lines = (tmp_path / "global_step_3" / FILE).read_text().splitlines()
    assert '"version": 1,' in lines[2]
    assert sum("inflation" in line for line in lines) == 1
    assert len(lines) < 30
    assert [p.name for p in (tmp_path / "global_step_3").iterdir()] == [FILE], "a partial file was left"


def test_a_checkpoint_without_state_leaves_the_parts_as_they_are(tmp_path):
    loaded = fresh()
    assert load_state(tmp_path, loaded) == set()
    assert loaded["budget"].state_dict() == KeepController().state_dict()


def test_of_a_state_without_prompts_the_other_parts_are_loaded(tmp_path):
    """As one is that was saved with prompt pruning off, or before there was any."""
    saved, loaded = parts(), {**fresh(), "prompts": PromptKeepController()}
    save_state(tmp_path, saved)
    assert load_state(tmp_path, loaded, optional=frozenset({"prompts"})) == {"budget", "norms"}
    assert loaded["norms"].state_dict() == saved["norms"].state_dict()
    assert loaded["budget"].state_dict()["keep"] == saved["budget"].keep
    assert loaded["prompts"].state_dict() == PromptKeepController().state_dict()
    with pytest.raises(ValueError, match="KeyError: 'prompts'"):
        load_state(tmp_path, loaded)


def test_an_optional_part_that_is_there_is_loaded_or_refused_as_any_other(tmp_path):
    moved, loaded, optional = PromptKeepController(), {"prompts": PromptKeepController()}, frozenset({"prompts"})
    moved.keep = 0.75
    save_state(tmp_path, {**parts(), "prompts": moved})
    assert load_state(tmp_path, loaded, optional) == {"prompts"}
    assert loaded["prompts"].keep == 0.75
    (tmp_path / FILE).write_bytes(damaged(lambda s: s.update(prompts={"keep": 0.75})))
    with pytest.raises(ValueError, match=r"KeyError: 'weighted'.*resume with the version"):
        load_state(tmp_path, loaded, optional)


def damaged(change):
    state = {name: part.state_dict() for name, part in parts().items()}
    state = {"format": "verl_dppo state", "version": 1, **state}
    change(state)
    return json.dumps(state).encode()


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"{", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (damaged(lambda s: s.update(version=2)), "format and version are"),
        (damaged(lambda s: s.pop("format")), "format"),
        (damaged(lambda s: s.pop("budget")), "KeyError: 'budget'"),
        (damaged(lambda s: s["budget"].pop("keep")), "KeyError: 'keep'"),
        (damaged(lambda s: s["budget"].update(keep=7.0)), "a keep of 7.0"),
        (damaged(lambda s: s["budget"].update(keep=float("nan"))), "a keep of nan"),
        (damaged(lambda s: s["budget"].update(inflation=[1.0])), "1 and 5 figures"),
        (damaged(lambda s: s["budget"].update(weight=-1.0)), "no run leaves"),
        (damaged(lambda s: s["budget"].update(steps=float("inf"))), "no run leaves"),
        (damaged(lambda s: s["budget"].update(inflation=[-1.0] * 19)), "no run leaves"),
        (damaged(lambda s: s["norms"]["norm"].__setitem__(0, -1.0)), "not positive"),
        (damaged(lambda s: s.update(norms=dict.fromkeys(s["norms"], 1.0))), "lists of finite numbers"),
        (damaged(lambda s: s["norms"].update(norm=[1.0])), "columns of lengths"),
        (damaged(lambda s: s["norms"]["norm"].__setitem__(0, float("inf"))), "lists of finite numbers"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name_and_the_way_out(tmp_path, content, names):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match="resume with the version") as refusal:
        load_state(tmp_path, fresh())
    assert names in str(refusal.value)
    assert str(tmp_path / FILE) in str(refusal.value)


def test_a_crash_while_writing_leaves_the_old_state(tmp_path):
    class Broken:
        def state_dict(self):
            return {"keep": object()}

    save_state(tmp_path, parts())
    with pytest.raises(TypeError):
        save_state(tmp_path, {"budget": Broken()})
    assert load_state(tmp_path, fresh())
