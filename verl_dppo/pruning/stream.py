"""The order in which prompts are drawn: passes over the data set, one behind the other without a gap.

A step takes the next prompts, wherever a pass ends: none is lost at the end of a pass, and over E passes every row of
the data set is drawn exactly E times, whatever becomes of it afterwards.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.int64]


class PromptStream:
    """A position in the concatenated passes over `rows` rows."""

    def __init__(self, rows: int, next_pass: Callable[[], Index], fingerprint: str = "") -> None:
        """Start before the first row of the first pass.

        Args:
            rows: of the data set, >= 1.
            next_pass: returns (rows,) a permutation of the rows each time it is called, the same ones in every run.
            fingerprint: of the data set; a saved position means something only for the same one.

        Raises:
            ValueError: a data set without rows.
        """
        if rows < 1:
            raise ValueError("the data set has no prompts")
        self.rows, self.fingerprint = rows, fingerprint
        self.position = 0
        self._next_pass = next_pass
        self._current, self._order = -1, np.zeros(0, dtype=np.int64)

    def take(self, n: int) -> Index:
        """Return the next n rows and move on; a row occurs twice where a pass ends between."""
        parts = []
        while n > 0:
            at = self.position % self.rows
            part = self._pass(self.position // self.rows)[at : at + n]
            parts.append(part)
            self.position, n = self.position + part.size, n - part.size
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def to_come(self) -> Index:
        """Return the rows that this pass has not drawn yet; all rows where a pass is about to begin."""
        return self._pass(self.position // self.rows)[self.position % self.rows :]

    def _pass(self, number: int) -> Index:
        while self._current < number:
            order = self._next_pass()
            if not np.array_equal(np.sort(order), np.arange(self.rows)):
                raise ValueError(
                    f"pass {self._current + 1} over the data set does not hold each of its {self.rows} rows once, "
                    "as pruning of prompts needs it to"
                )
            self._current, self._order = self._current + 1, order
        if number < self._current:
            raise ValueError(f"pass {number} over the data set is over, pass {self._current} has begun")
        return self._order

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it is a position in."""
        return {"position": self.position, "rows": self.rows, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Of another data set, or another order of its rows, the pass begins anew.

        Raises:
            KeyError, TypeError, ValueError: a position that no run could have left.
        """
        position, rows = int(state["position"]), int(state["rows"])
        if position < 0 or rows < 1:
            raise ValueError(f"the saved stream is at position {position} of {rows} rows")
        same = rows == self.rows and state["fingerprint"] == self.fingerprint
        self.position = position if same else position // rows * self.rows
