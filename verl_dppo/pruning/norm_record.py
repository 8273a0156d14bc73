"""Gradient norms that were measured during the run: what they say of the magnitudes, and the norm model they give."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_dppo.pruning.norm_model import NormModel, fit_norm_model

Array = NDArray[np.float64]

COLUMNS = ("step", "sum_sq_one_minus_p", "length", "prompt_length", "scale", "magnitude", "norm", "weight")


class NormRecord:
    """The last `window` completions whose gradient norm was measured.

    The columns, one entry for each: `step`; `sum_sq_one_minus_p`, 0 where the rollout gave no log-probs; `length` and
    `prompt_length` in tokens; `scale`, |A| times the factor of the aggregation mode; `magnitude`, what the draw took
    for the norm; `norm`, what was measured; `weight`, 1/pi, because only drawn completions are measured.
    """

    def __init__(self, window: int = 128) -> None:
        """Start empty."""
        self.window = window
        self.columns: dict[str, Array] = {name: np.zeros(0) for name in COLUMNS}

    def observe(self, step: int, **columns: ArrayLike) -> None:
        """Add the completions that were measured in a step: (k,) for every other name of COLUMNS.

        Those whose norm or magnitude is not a positive number are left out: they have no logarithm to compare.
        """
        new = {name: np.asarray(columns[name], dtype=np.float64) for name in COLUMNS if name != "step"}
        usable = np.all([np.isfinite(new[name]) & (new[name] > 0) for name in ("norm", "magnitude")], axis=0)
        new["step"] = np.full(usable.size, float(step))
        for name in COLUMNS:
            self.columns[name] = np.concatenate([self.columns[name], new[name][usable]])[-self.window :]

    def model(self) -> NormModel:
        """Return the norm model that the record supports; with an empty one, the prior."""
        c = self.columns
        known = (c["sum_sq_one_minus_p"] > 0) & (c["length"] > 0) & (c["prompt_length"] > 0) & (c["scale"] > 0)
        surprise, length, prompt = (c[name][known] for name in ("sum_sq_one_minus_p", "length", "prompt_length"))
        return fit_norm_model(surprise, length, prompt, c["norm"][known] / c["scale"][known], c["step"][known])

    def figures(self) -> dict[str, float]:
        """Compare magnitudes with norms, over all drawn completions by their weights; empty before there are 3.

        Returns:
            `correlation` of their logarithms, steps centred apart; `residual_std`, the standard deviation of log norm
            over magnitude, in nats; `second_moment_ratio`, sum of norm^2 / pi over the least that any probabilities of
            the same sum reach: how much the mismatch costs.
        """
        c = self.columns
        if c["norm"].size < 3:
            return {}
        weight = c["weight"] / c["weight"].sum()
        _, step = np.unique(c["step"], return_inverse=True)
        total = np.bincount(step, weight)

        def centred(values: Array) -> Array:
            return values - (np.bincount(step, weight * values) / total)[step]

        truth, guess = centred(np.log(c["norm"])), centred(np.log(c["magnitude"]))
        spread = np.sqrt((weight * truth**2).sum() * (weight * guess**2).sum())
        residual = truth - guess
        norm, magnitude = np.exp(truth), np.exp(guess)
        best = (weight * norm).sum() ** 2
        return {
            "correlation": float((weight * truth * guess).sum() / spread) if spread > 0 else 0.0,
            "residual_std": float(np.sqrt((weight * residual**2).sum())),
            "second_moment_ratio": float((weight * norm**2 / magnitude).sum() * (weight * magnitude).sum() / best),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the columns as lists of numbers."""
        return {name: column.tolist() for name, column in self.columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: columns of different lengths.
        """
        columns = {name: np.array(state[name], dtype=np.float64) for name in COLUMNS}
        if len({column.size for column in columns.values()}) != 1:
            raise ValueError(f"the saved norms have columns of lengths {[column.size for column in columns.values()]}")
        positive = [columns[name] for name in ("magnitude", "norm", "weight")]
        if not all(column.ndim == 1 and np.isfinite(column).all() for column in columns.values()):
            raise ValueError("the saved norms are not lists of finite numbers")
        if not all((column > 0).all() for column in positive):
            raise ValueError("the saved norms hold a magnitude, norm or weight that is not positive")
        self.columns = {name: column[-self.window :] for name, column in columns.items()}
