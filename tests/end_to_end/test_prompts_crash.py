"""A training that is killed again and again, at any moment, and resumed each time: it ends where it would have."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from end_to_end.conftest import DPPO, PROMPTS
from end_to_end.test_prompts import data_of

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]

ROWS, STEPS = 19, 24
TRAINING = (
    *DPPO,
    "algorithm.dppo.prompt.keep=0.7",
    "algorithm.dppo.completion.keep=0.5",
    "algorithm.dppo.completion.probe_every=5",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
    "trainer.save_freq=1",
)
# After which event of an attempt, and which time that it happens, the clock of a kill starts, and the longest that it
# then takes, in seconds. The fourth and fifth attempt end before a step of theirs does.
ANY_TIME, STEP_TIME, PART_OF_SAVE = "logged", 6.0, 0.3
KILLS = (
    (ANY_TIME, 1, STEP_TIME),
    ("save: weights", 2, PART_OF_SAVE),
    (ANY_TIME, 1, STEP_TIME),
    ("rollout", 1, 1.0),
    ("start", 1, 25.0),
    (ANY_TIME, 1, STEP_TIME),
    ("save: history", 2, PART_OF_SAVE),
    (ANY_TIME, 1, STEP_TIME),
    ("save: state", 2, PART_OF_SAVE),
    ("update", 2, 1.0),
)
TOKEN = "TEST_KILLED_TOGETHER"


class KilledError(Exception):
    """The run did not come to its end."""


def new_folder(parent, name):
    folder = parent / name
    folder.mkdir()
    return folder


def lines_of(path):
    """Return the lines of a file that may end in half of one."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def processes_of(token):
    """Return the ids of all processes with the token in their environment: those that Ray started for a run, too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{TOKEN}={token}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # gone, or somebody else's
            continue
    return found


def kill_all(token):
    """Kill a run's processes without a chance to clean up, and wait until none of them is left."""
    deadline = time.monotonic() + 60
    while left := processes_of(token):
        assert time.monotonic() < deadline, f"processes {left} do not die"
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def killed(folder, event, occurrence, delay):
    """Return a stand-in for `subprocess.run` that kills the run so many seconds after an event."""

    def has_happened():
        if event == "start":
            return True
        if event == "logged":
            return len(lines_of(folder / "metrics.jsonl")) >= occurrence
        return sum(line["phase"] == event for line in lines_of(folder / "phases.jsonl")) >= occurrence

    def launch(command, env, **_):
        token = str(folder)
        env = {**env, TOKEN: token, "TEST_PHASES": str(folder / "phases.jsonl"), "TEST_SLOW_SAVE": str(PART_OF_SAVE)}
        with open(folder / "output.log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
            try:
                while not has_happened() and process.poll() is None:
                    time.sleep(0.01)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=delay)
                ended = process.poll()
            finally:
                kill_all(token)
                process.wait()
        assert ended is None, f"the run ended by itself with {ended}:\n{(folder / 'output.log').read_text()[-6000:]}"
        raise KilledError

    return launch


def last_saved(checkpoints):
    """Return the step of the last checkpoint that verl marked as complete, 0 where there is none."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def test_a_training_killed_ten_times_ends_like_one_that_never_was(verl_run, tmp_path):
    data = data_of(tmp_path / "data", ROWS)
    whole = verl_run(*TRAINING, *data, steps=STEPS, folder=new_folder(tmp_path, "whole"))
    assert [line["step"] for line in whole.prompts] == list(range(1, STEPS + 1))
    checkpoints = tmp_path / "checkpoints"
    resumed = (f"trainer.default_local_dir={checkpoints}", "trainer.resume_mode=auto")
    rng = np.random.default_rng(0)
    fell, without_progress, halves = Counter(), 0, 0
    for turn, (event, occurrence, longest) in enumerate(KILLS):
        folder = new_folder(tmp_path, f"attempt_{turn}")
        before = last_saved(checkpoints)
        with pytest.raises(KilledError):
            verl_run(
                *TRAINING,
                *data,
                *resumed,
                steps=STEPS,
                folder=folder,
                launch=killed(folder, event, occurrence, rng.uniform(0, longest)),
            )
        phases, lines = lines_of(folder / "phases.jsonl"), lines_of(folder / "prompts.jsonl")
        after = last_saved(checkpoints)
        without_progress = without_progress + 1 if after == before else 0
        halves += any(int(path.name.rsplit("_", 1)[1]) > after for path in checkpoints.glob("global_step_*"))
        where = phases[-1] if phases else {"phase": "start"}
        fell[where["phase"]] += 1
        print(f"kill {turn + 1}: resumed at {before}, saved {after}, killed in {where}", flush=True)
        if turn == 4:
            assert without_progress >= 2, "the fourth and fifth attempt made progress"
        assert [line["step"] for line in lines] == list(range(before + 1, before + 1 + len(lines)))
        assert lines == whole.prompts[before : before + len(lines)]
    print(f"kills by phase: {dict(fell)}; left half of a checkpoint: {halves}", flush=True)
    before = last_saved(checkpoints)
    assert 0 < before < STEPS
    last = verl_run(*TRAINING, *data, *resumed, steps=STEPS, folder=new_folder(tmp_path, "last"))
    assert last.prompts == whole.prompts[before:]
    assert last.updates[-1] == whole.updates[-1]
    assert halves > 0, "no kill left half of a checkpoint: none fell into a save"
