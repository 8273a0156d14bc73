"""What a run knows besides its weights, kept in verl's checkpoint folder as JSON that a person can read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "dppo.json"
FORMAT, VERSION = "verl_dppo state", 1


def write_state(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write the state into a checkpoint folder; a crash on the way leaves no half of a file.

    Args:
        folder: the checkpoint's folder, made where it is not there yet.
        state: plain numbers, strings, lists and mappings.
    """
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


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read what `write_state` wrote; None where the folder has no such file, as after a run without DPPO.

    Raises:
        ValueError: a file of another format or version, or one that is no JSON.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    way_out = "resume with the version of verl_dppo that wrote it, or delete the file to start its estimates afresh"
    try:
        state = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not readable: {error}; {way_out}") from error
    found = (state.get("format"), state.get("version")) if isinstance(state, dict) else (None, None)
    if found != (FORMAT, VERSION):
        raise ValueError(f"{path} has format and version {found}, this is {(FORMAT, VERSION)}; {way_out}")
    return state
