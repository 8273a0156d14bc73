"""The prompt history as a file: npz without pickle, a JSON header beside plain arrays.

Two lines of numpy read it:

    file = np.load("dppo_prompts.npz")
    print(file["header"], file["id"][:5], file["mean"][:5])
"""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from verl_dppo.pruning.history import COLUMNS, PromptHistory

FORMAT = "verl_dppo prompt history"
ARRAYS = ("id", *COLUMNS)
# What numpy, zipfile and json make of a file that is torn, damaged or something else.
UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    OSError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
)


def save_history(path: str | os.PathLike[str], history: PromptHistory) -> int:
    """Write the history; a crash on the way leaves no half of a file.

    Returns:
        A checksum of its arrays, by which a reader can tell that it is this very file.
    """
    state = history.state_dict()
    arrays = {name: state.pop(name) for name in ARRAYS}
    header = json.dumps({"format": FORMAT, **state})
    partial = Path(path).with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, header=np.array(header), **arrays)
    os.replace(partial, path)
    return _checksum(arrays)


def load_history(path: str | os.PathLike[str], history: PromptHistory) -> int:
    """Let the history continue from what `save_history` wrote, and return the same checksum.

    Raises:
        ValueError: a file that is not one, or is damaged, or of another version.
        FileNotFoundError: no such file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ARRAYS}
            header: dict[str, Any] = json.loads(str(file["header"]))
        if header.pop("format") != FORMAT:
            raise ValueError("it holds something else")
        history.load_state_dict({**header, **arrays})
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        # numpy would advise to load what needs pickle unsafely.
        what = "it holds something else" if "pickle" in str(error) else error
        raise ValueError(f"{path} is no prompt history that can be used: {what}") from error
    return _checksum(arrays)


def _checksum(arrays: dict[str, Any]) -> int:
    total = 0
    for name in ARRAYS:
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).tobytes(), total)
    return total
