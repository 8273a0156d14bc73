"""One rank of an enumeration: `python -m engine.measure ENGINE MODEL RESULT`, the cases on standard input.

Every draw goes through verl's own training worker: mini-batches, micro-batches, the loss, backward, the exchange
between ranks. In place of the optimiser's step the gradient is read, so that every draw meets the same parameters.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine.batches import Completions, arrange, batch, completions
from engine.cases import DEALT_PROMPTS, PI, PROMPT_PI, PROMPTS, RESPONSE, Case
from engine.draws import joint_draws, two_level_draws
from engine.reading import GradientReader
from transformers import AutoModelForCausalLM
from verl.workers.utils.losses import ppo_loss

from verl_dppo.training.loss import dppo_loss


class Enumeration(GradientReader):
    """A worker of one precision, and what it does with every draw."""

    def __init__(self, engine: Any, model: Path, dtype: str, rows: Completions) -> None:
        super().__init__(engine, model, dtype)
        self.rows = rows

    def gradient(self, case: Case, drawn: list[tuple[int, ...]]) -> torch.Tensor:
        """Return (mini-batches, parameters): the weighted gradient of what was drawn."""
        return self._train(case, drawn, dppo_loss, weighted=True)

    def full_gradient(self, case: Case, scale: float = 1.0) -> torch.Tensor:
        """Return (mini-batches, parameters): stock verl's, on all rows; the loss scaled, which the gradient is not.

        With token-mean verl divides by the tokens of these rows; in its place is put what the case divides by.
        """
        full = self._train(case, case.members, partial(_scaled_ppo_loss, scale), weighted=False) / scale
        if case.aggregation != "token-mean":
            return full
        counted = [sum(RESPONSE[row] for row in rows) for rows in case.members]
        factor = [mine / constant for mine, constant in zip(counted, case.tokens, strict=True)]
        return full * torch.tensor(factor, dtype=full.dtype)[:, None]

    def _train(
        self, case: Case, drawn: list[tuple[int, ...]], loss: Callable[..., Any], weighted: bool
    ) -> torch.Tensor:
        places = arrange(drawn, case, self.ranks)
        data = batch(places[self.rank], self.rows, case, sum(map(len, places)), drawn if weighted else None)
        return self.train(data, loss, case)

    def measure(self, case: Case) -> dict[str, float]:
        """Return the relative error of the expectation and the engine's own noise, each of the worst mini-batch.

        The noise is what the full batch's gradient changes by where the loss is scaled by the weights that occur, and
        the gradient divided by them: nothing, but for rounding. It is not measured in float64.
        """
        full = self.full_gradient(case)
        scales = [] if case.dtype == "float64" else [1 / pi for pi in sorted(set(PI))]
        expected, chance, draws = torch.zeros_like(full), 0.0, 0
        for probability, drawn in _draws(case):
            expected += probability * self.gradient(case, drawn)
            chance, draws = chance + probability, draws + 1
        return {
            "error": _distance(expected, full),
            "noise": max((_distance(self.full_gradient(case, scale), full) for scale in scales), default=0.0),
            "norm": float(full.norm()),
            "chance": chance,
            "draws": draws,
        }


def _draws(case: Case) -> Iterator[tuple[float, list[tuple[int, ...]]]]:
    if case.two_levels:
        return two_level_draws(case.design, PROMPT_PI, PI, PROMPTS, DEALT_PROMPTS[case.mini_batches])
    return joint_draws(case.design, PI, case.members)


def _of_all_ranks(everywhere: list[Any], name: str) -> dict[str, float]:
    """Return the first rank's figures, but the worst error: model-parallel ranks see their own parameters only."""
    return {**everywhere[0][name], "error": max(measured[name]["error"] for measured in everywhere)}


def _scaled_ppo_loss(scale: float, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict]:
    loss, metrics = ppo_loss(*args, **kwargs)
    return loss * scale, metrics


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).norm(dim=1) / other.norm(dim=1)).max())


def main(engine_name: str, model: str, result: str) -> None:
    engine = import_module(f"engine.{engine_name}")
    cases = [Case(**case) for case in json.load(sys.stdin)]
    torch.manual_seed(0)
    rows = completions(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64))
    measured = {}
    for dtype in dict.fromkeys(case.dtype for case in cases):
        enumeration = Enumeration(engine, Path(model), dtype, rows)
        measured |= {case.name: enumeration.measure(case) for case in cases if case.dtype == dtype}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, measured)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({case.name: _of_all_ranks(everywhere, case.name) for case in cases}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
