"""What is known of each prompt from the rollouts of earlier visits, keyed by an id that outlives the data set's order.

Of every prompt the rewards are remembered as a count, a mean and a variance, older visits counting less. From them
follows the spread: the standard deviation that the rewards of the next visit are expected to have, on which the size
of a group's advantages and so of its gradient depends.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.pruning.prompts import prompt_inclusion

Array = NDArray[np.float64]
Index = NDArray[np.int64]

VERSION = 1
# Of each prompt: 16 bytes, the id apart.
COLUMNS = {
    "count": np.dtype(np.float16),
    "visits": np.dtype(np.uint16),
    "step": np.dtype(np.uint32),
    "mean": np.dtype(np.float32),
    "variance": np.dtype(np.float32),
}
MOST_COUNTED = 60_000.0  # what float16 holds
LARGEST_REWARD = 1e18  # whose square float32 holds
PRIOR_COUNT = 2.0
"""Rewards that the prior is worth: one right and one wrong, where rewards are 0 or 1."""


class PromptHistory:
    """Count, mean and variance of the rewards of each prompt, its visits, and the step of its last one.

    Two rules turn them into the spread. While all rewards ever seen are 0 or 1, the pass rate of a prompt has the
    posterior Beta(1 + right, 1 + wrong), and the spread is sqrt(p (1 - p)) at its mean. From the first other reward on,
    for all prompts, it is the root of (count * variance + 2 * pooled) / (count + 2), `pooled` being the mean variance
    over all prompts: nothing is rounded to right or wrong, and the scale of the rewards does not matter.
    """

    def __init__(self, forgetting: float = 0.7) -> None:
        """Know nothing yet.

        Args:
            forgetting: in [0, 1], how much what was remembered still counts at the next visit. 0 remembers the last
                visit only, 1 all visits alike.

        Raises:
            ValueError: a factor outside [0, 1].
        """
        if not 0 <= forgetting <= 1:
            raise ValueError(f"forgetting={forgetting} must be in [0, 1]")
        self.forgetting = forgetting
        self.binary = True
        self._place: dict[str, int] = {}
        self._columns = {name: np.zeros(0, dtype) for name, dtype in COLUMNS.items()}

    def __len__(self) -> int:
        """Prompts that were ever observed."""
        return len(self._place)

    def observe(self, ids: Sequence[str], rewards: ArrayLike, step: int) -> None:
        """Learn from the groups of one step.

        Args:
            ids: (k,) the prompts. One that occurs twice was visited twice, in this order.
            rewards: (k, G) of their completions; NaN where there is none. A group of nothing but NaN is no visit.
            step: of training, >= 0.

        Raises:
            ValueError: shapes that differ, a reward that is infinite or beyond 1e18, or an id that is empty or holds a
                NUL character. Nothing is learnt then.
        """
        reward = np.asarray(rewards, dtype=np.float64)
        if reward.ndim != 2 or reward.shape[0] != len(ids):
            raise ValueError(f"rewards have shape {reward.shape}, expected ({len(ids)}, G)")
        if (np.abs(reward) > LARGEST_REWARD).any():
            raise ValueError("a reward is infinite, or all but so: the history would be of no use from here on")
        seen = np.isfinite(reward).any(axis=1)
        if not seen.any():
            return
        ids, reward = [ids[k] for k in np.flatnonzero(seen).tolist()], reward[seen]
        there = reward[np.isfinite(reward)]
        place = self._places(ids)
        self.binary = self.binary and bool(np.isin(there, (0.0, 1.0)).all())
        for visit in _occurrences(place):
            self._update(place[visit], reward[visit], step)

    def _places(self, ids: Sequence[str]) -> Index:
        """Return (k,) where each prompt is remembered, after making room for new ones."""
        new = [name for name in dict.fromkeys(ids) if name not in self._place]
        for name in new:
            if not name or "\0" in name:
                raise ValueError(f"{name!r} is no prompt id: it must not be empty or hold a NUL character")
        self._place.update(zip(new, range(len(self._place), len(self._place) + len(new)), strict=True))
        lacking = len(self._place) - self._columns["mean"].size
        if lacking > 0:
            room = max(lacking, self._columns["mean"].size // 2)
            self._columns = {
                name: np.concatenate([column, np.zeros(room, column.dtype)]) for name, column in self._columns.items()
            }
        return np.array([self._place[name] for name in ids], dtype=np.int64)

    def _update(self, place: Index, reward: Array, step: int) -> None:
        """Merge one group into each of some different prompts."""
        columns = self._columns
        there = np.isfinite(reward)
        new = there.sum(axis=1)
        new_mean = np.where(there, reward, 0.0).sum(axis=1) / new
        new_square = np.where(there, (reward - new_mean[:, None]) ** 2, 0.0).sum(axis=1)
        old = self.forgetting * columns["count"][place].astype(np.float64)
        mean, variance = columns["mean"][place].astype(np.float64), columns["variance"][place].astype(np.float64)
        count = old + new
        between = old * new / count * (new_mean - mean) ** 2
        columns["mean"][place] = (old * mean + new * new_mean) / count
        columns["variance"][place] = (old * variance + new_square + between) / count
        columns["count"][place] = np.minimum(count, MOST_COUNTED)
        columns["visits"][place] = np.minimum(columns["visits"][place].astype(np.int64) + 1, np.iinfo(np.uint16).max)
        columns["step"][place] = step

    def _column(self, name: str, ids: Sequence[str]) -> Array:
        """Return (k,) a figure of each prompt, 0 for those never observed."""
        place = np.array([self._place.get(i, -1) for i in ids], dtype=np.int64)
        if not self._place:
            return np.zeros(place.size)
        return np.where(place >= 0, self._columns[name][place], 0).astype(np.float64)

    def visits(self, ids: Sequence[str]) -> Index:
        """Return (k,) how often each prompt was observed."""
        return self._column("visits", ids).astype(np.int64)

    def last_step(self, ids: Sequence[str]) -> Index:
        """Return (k,) the step of the last visit, 0 where there was none."""
        return self._column("step", ids).astype(np.int64)

    def mean(self, ids: Sequence[str]) -> Array:
        """Return (k,) the mean of the remembered rewards, 0 where there are none."""
        return self._column("mean", ids)

    def spread(self, ids: Sequence[str]) -> Array:
        """Return (k,) the expected standard deviation of each prompt's rewards, > 0; see the class for the rule."""
        count = self._column("count", ids)
        if self.binary:
            p = (count * self._column("mean", ids) + PRIOR_COUNT / 2) / (count + PRIOR_COUNT)
            return np.sqrt(p * (1 - p))
        pooled = float(self._columns["variance"][: len(self)].mean(dtype=np.float64))
        variance = (count * self._column("variance", ids) + PRIOR_COUNT * pooled) / (count + PRIOR_COUNT)
        return np.sqrt(variance) if pooled > 0 else np.ones(len(ids))

    def inclusion(self, ids: Sequence[str], keep: float, floor: float = 0.3, rule: str = "beta") -> Array:
        """Return inclusion probabilities: 1 for prompts never seen, `keep` on average for the others.

        The steps of a training need a sum that is a whole number; they use `prompt_inclusion`.

        Args:
            ids: (k,) the prompts.
            keep: in (0, 1], the mean over those that were seen.
            floor: in (0, keep], the smallest.
            rule: `beta` or `threshold`; see `prompt_inclusion`.

        Returns:
            (k,) float64.

        Raises:
            ValueError: a share outside its range, or an unknown rule.
        """
        if not 0 < floor <= keep <= 1:
            raise ValueError(f"0 < floor={floor} <= keep={keep} <= 1 does not hold")
        known = self.visits(ids) > 0
        pi = np.ones(len(ids))
        pi[known] = prompt_inclusion(self.spread(ids)[known], known[known], keep * known.sum(), floor, rule)
        return pi

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and arrays: `id` (n,) bytes, and the columns (n,) in the same order."""
        names = [name.encode() for name in self._place]
        return {
            "version": VERSION,
            "prompts": len(self),
            "forgetting": self.forgetting,
            "binary": self.binary,
            "id": np.array(names, dtype=np.bytes_) if names else np.zeros(0, dtype="S1"),
            **{name: column[: len(self)].copy() for name, column in self._columns.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the forgetting factor stays this object's own.

        Raises:
            KeyError, ValueError: another version, columns of other sizes or types, ids that repeat, or figures that no
                run could have left.
        """
        if state["version"] != VERSION:
            raise ValueError(f"the saved history has version {state['version']}, this one reads {VERSION}")
        names = [name.decode() for name in state["id"].tolist()]
        columns = {name: np.array(state[name]) for name in COLUMNS}
        for name, column in columns.items():
            if column.dtype != COLUMNS[name] or column.shape != (len(names),):
                raise ValueError(f"{name} of the saved history is {column.dtype} {column.shape}, of {len(names)} ids")
        if len(set(names)) < len(names):
            raise ValueError("ids of the saved history repeat")
        finite = all(bool(np.isfinite(column).all()) for column in columns.values())
        if not finite or any(bool((columns[name] < 0).any()) for name in ("count", "variance")):
            raise ValueError("the saved history holds figures that no run leaves")
        self.binary = bool(state["binary"])
        self._place = {name: place for place, name in enumerate(names)}
        self._columns = columns


def _occurrences(place: Index) -> list[Index]:
    """Return index arrays: the first occurrence of every value, then all second ones, and so on."""
    order = np.argsort(place, kind="stable")
    ordered = place[order]
    first = np.searchsorted(ordered, ordered)
    turn = np.arange(place.size) - first
    return [order[turn == k] for k in range(int(turn.max()) + 1)]
