"""What a run knows besides its weights, kept in verl's checkpoint folder as JSON that a person can read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

FILE = "dppo.json"
FORMAT, VERSION = "verl_dppo state", 1


class Stateful(Protocol):
    """A part of the run that a checkpoint holds: its state is plain numbers, strings, lists and mappings."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; an exception of Python's own where it is none."""


def save_state(folder: str | os.PathLike[str], parts: Mapping[str, Stateful]) -> None:
    """Write the state of the parts into a checkpoint folder; a crash on the way leaves no half of a file.

    Args:
        folder: the checkpoint's folder, made where it is not there yet.
        parts: by the names under which they are read again.
    """
    state = {name: part.state_dict() for name, part in parts.items()}
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(_readable({"format": FORMAT, "version": VERSION, **state}) + "\n")
    os.replace(partial, path)


def _readable(value: Any, indent: str = "") -> str:
    """Return JSON with one name on each line, and lists of numbers on one line."""
    if not isinstance(value, Mapping):
        return json.dumps(value)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(name)}: {_readable(item, inner)}" for name, item in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def load_state(
    folder: str | os.PathLike[str], parts: Mapping[str, Stateful], optional: frozenset[str] = frozenset()
) -> set[str]:
    """Let the parts continue from what `save_state` wrote.

    Args:
        folder: the checkpoint's folder.
        parts: by the names under which they were saved.
        optional: names of those that may be missing, because not every run has them.

    Returns:
        The names of the parts that were found: none where the folder has no such file, as after a run without DPPO.

    Raises:
        ValueError: a file of another format or version, one that is not readable, or states that the parts refuse.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return set()
    try:
        state = json.loads(path.read_text())
        found = (state["format"], state["version"])
        if found != (FORMAT, VERSION):
            raise ValueError(f"its format and version are {found}, not {(FORMAT, VERSION)}")
        found_parts = {name for name in parts if name in state or name not in optional}
        for name in found_parts:
            parts[name].load_state_dict(state[name])
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        way_out = "resume with the version of verl_dppo that wrote it, or delete the file to start its estimates afresh"
        raise ValueError(f"{path} cannot be used: {type(error).__name__}: {error}; {way_out}") from error
    return found_parts
