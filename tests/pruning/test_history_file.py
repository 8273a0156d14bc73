import json

import numpy as np
import pytest

from verl_dppo.pruning import PromptHistory, history_file, load_history, save_history
from verl_dppo.pruning.history import COLUMNS


def some_history(seed=0, prompts=5):
    rng, history = np.random.default_rng(seed), PromptHistory()
    history.observe([f"id{k}" for k in range(prompts)], rng.random((prompts, 4)), 3)
    history.observe(["id1", "id0"], rng.random((2, 4)), 7)
    return history


def state_of(history):
    return {name: np.asarray(value).tolist() for name, value in history.state_dict().items()}


def test_what_was_saved_is_loaded_to_the_bit_and_has_one_checksum(tmp_path):
    saved, loaded = some_history(), PromptHistory()
    checksum = save_history(tmp_path / "h.npz", saved)
    assert load_history(tmp_path / "h.npz", loaded) == checksum
    assert state_of(loaded) == state_of(saved)
    assert [p.name for p in tmp_path.iterdir()] == ["h.npz"], "a partial file was left"


def test_an_empty_history_can_be_saved_and_loaded(tmp_path):
    loaded = some_history()
    assert save_history(tmp_path / "h.npz", PromptHistory()) == load_history(tmp_path / "h.npz", loaded)
    assert len(loaded) == 0


def test_plain_numpy_reads_it_without_pickle(tmp_path):
    save_history(tmp_path / "h.npz", some_history())
    with np.load(tmp_path / "h.npz", allow_pickle=False) as file:
        header = json.loads(str(file["header"]))
        arrays = {name: file[name] for name in file.files if name != "header"}
    assert header == {
        "format": "verl_dppo prompt history",
        "version": 1,
        "prompts": 5,
        "forgetting": 0.7,
        "binary": False,
    }
    assert arrays["id"].tolist() == [b"id0", b"id1", b"id2", b"id3", b"id4"]
    assert arrays["visits"].tolist() == [2, 2, 1, 1, 1]
    assert arrays["step"].tolist() == [7, 7, 3, 3, 3]
    assert {name: array.dtype for name, array in arrays.items() if name != "id"} == COLUMNS


def test_a_prompt_takes_at_most_16_bytes_of_the_file_beyond_its_id(tmp_path):
    ids = [f"{k:016d}" for k in range(2000)]
    history = PromptHistory()
    history.observe(ids, np.eye(2000, 4), 1)
    save_history(tmp_path / "h.npz", history)
    with np.load(tmp_path / "h.npz", allow_pickle=False) as file:
        assert sum(file[name].nbytes for name in file.files if name not in ("id", "header")) <= 16 * 2000
    assert (tmp_path / "h.npz").stat().st_size <= (16 + 16) * 2000 + 4096


def test_a_crash_in_the_middle_of_writing_leaves_the_old_file(tmp_path, monkeypatch):
    old = save_history(tmp_path / "h.npz", some_history(0))
    write = np.savez

    def torn(file, **arrays):
        write(file, **arrays)
        file.truncate(200)
        raise KeyboardInterrupt

    monkeypatch.setattr(history_file.np, "savez", torn)
    with pytest.raises(KeyboardInterrupt):
        save_history(tmp_path / "h.npz", some_history(1))
    monkeypatch.undo()
    loaded = PromptHistory()
    assert load_history(tmp_path / "h.npz", loaded) == old
    assert state_of(loaded) == state_of(some_history(0))
    new = save_history(tmp_path / "h.npz", some_history(1))  # over what the crash left
    assert load_history(tmp_path / "h.npz", loaded) == new
    assert [p.name for p in tmp_path.iterdir()] == ["h.npz"]


def refused(path):
    """Load it into a history that has seen something; return the message."""
    history = some_history(9)
    with pytest.raises(ValueError, match="is no prompt history that can be used") as error:
        load_history(path, history)
    assert state_of(history) == state_of(some_history(9)), "a file that was refused changed the history"
    return str(error.value)


def test_a_torn_file_is_refused_wherever_it_ends(tmp_path):
    save_history(tmp_path / "h.npz", some_history())
    content, path = (tmp_path / "h.npz").read_bytes(), tmp_path / "torn.npz"
    for end in [*range(0, len(content), 41), len(content) - 1]:
        path.write_bytes(content[:end])
        assert str(path) in refused(path)


@pytest.mark.parametrize("flipped", [1, 255])
def test_a_damaged_byte_is_refused_or_makes_no_difference(tmp_path, flipped):
    save_history(tmp_path / "h.npz", some_history())
    content, path = (tmp_path / "h.npz").read_bytes(), tmp_path / "damaged.npz"
    refusals = 0
    for at in range(flipped % 3, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= flipped
        path.write_bytes(damaged)
        loaded, message = some_history(9), None
        try:
            load_history(path, loaded)
        except ValueError as error:
            message = str(error)
            refusals += 1
        assert message is None or str(path) in message
        assert state_of(loaded) == state_of(some_history(0 if message is None else 9))
    assert refusals > len(content) / 6


def arrays_of(history):
    state = history.state_dict()
    return {name: state[name] for name in ("id", *COLUMNS)}


HEADER = {"format": "verl_dppo prompt history", "version": 1, "prompts": 5, "forgetting": 0.5, "binary": False}


@pytest.mark.parametrize(
    "header",
    [
        HEADER | {"version": 2},
        HEADER | {"format": "something else"},
        {name: value for name, value in HEADER.items() if name != "format"},
        {name: value for name, value in HEADER.items() if name != "binary"},
        [],
        "text",
        None,
        7,
    ],
)
def test_a_header_of_something_else_is_refused(tmp_path, header):
    np.savez(tmp_path / "h.npz", header=np.array(json.dumps(header)), **arrays_of(some_history()))
    assert str(tmp_path / "h.npz") in refused(tmp_path / "h.npz")


def test_a_header_that_is_not_json_is_refused(tmp_path):
    np.savez(tmp_path / "h.npz", header=np.array("{"), **arrays_of(some_history()))
    refused(tmp_path / "h.npz")


@pytest.mark.parametrize("change", [{"id": np.arange(5)}, {"id": np.array([[b"a"]] * 5)}, {"mean": np.zeros(5)}])
def test_columns_of_another_kind_are_refused(tmp_path, change):
    np.savez(tmp_path / "h.npz", header=np.array(json.dumps(HEADER)), **(arrays_of(some_history()) | change))
    refused(tmp_path / "h.npz")


@pytest.mark.parametrize("missing", ["id", "mean", "header"])
def test_a_file_without_a_part_is_refused(tmp_path, missing):
    arrays = {"header": np.array(json.dumps(HEADER)), **arrays_of(some_history())}
    del arrays[missing]
    np.savez(tmp_path / "h.npz", **arrays)
    assert missing in refused(tmp_path / "h.npz")


def test_pickled_objects_are_never_loaded(tmp_path):
    arrays = arrays_of(some_history()) | {"mean": np.array([{}] * 5, dtype=object)}
    np.savez(tmp_path / "h.npz", header=np.array(json.dumps(HEADER)), **arrays)
    assert "pickle" in refused(tmp_path / "h.npz")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x80\x04N."])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "h.npz").write_bytes(content)
    refused(tmp_path / "h.npz")


def test_a_single_array_is_refused(tmp_path):
    with open(tmp_path / "h.npz", "wb") as file:
        np.save(file, np.zeros(3))
    refused(tmp_path / "h.npz")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.npz"):
        load_history(tmp_path / "nothing.npz", PromptHistory())


def test_the_checksum_differs_when_one_value_differs(tmp_path):
    checksums = set()
    base = some_history().state_dict()
    changed = [base]
    for name in COLUMNS:
        for k in range(5):
            column = base[name].copy()
            column[k] = column[k] + 1 if name in ("visits", "step") else np.nextafter(column[k], column.dtype.type(9))
            changed.append(base | {name: column})
    changed.append(base | {"id": np.array([b"id0", b"id1", b"id2", b"id3", b"id5"])})
    changed.append(base | {"id": base["id"][::-1]})
    for state in changed:
        history = PromptHistory()
        history.load_state_dict(state)
        checksums.add(save_history(tmp_path / "h.npz", history))
    assert len(checksums) == len(changed)
