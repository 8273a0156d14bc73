"""Every keep-set of a few completions with its exact probability, under two designs. Apart from the product's draws."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from math import prod


def poisson(pi: dict[int, float]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (probability, kept rows) for independent draws, the empty one included."""
    for kept in product([False, True], repeat=len(pi)):
        chance = prod(p if k else 1 - p for p, k in zip(pi.values(), kept, strict=True))
        if chance:
            yield chance, tuple(row for row, k in zip(pi, kept, strict=True) if k)


def fixed_size(pi: dict[int, float]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (probability, kept rows) for the pivotal method, rows met in their order; sum(pi) is whole.

    Two undecided rows fight until one is decided; the chances follow from E[kept] = pi.
    """
    chance_of: dict[tuple[int, ...], float] = defaultdict(float)

    def fight(chance: float, now: dict[int, float]) -> None:
        undecided = [row for row, p in now.items() if 1e-9 < p < 1 - 1e-9]
        if not undecided:
            chance_of[tuple(row for row, p in now.items() if p > 0.5)] += chance
            return
        first, second = undecided[:2]
        total = now[first] + now[second]
        loser, winner = max(total - 1, 0.0), min(total, 1.0)
        wins = (now[first] - loser) / (winner - loser)
        fight(chance * wins, {**now, first: winner, second: loser})
        fight(chance * (1 - wins), {**now, first: loser, second: winner})

    fight(1.0, pi)
    yield from ((chance, kept) for kept, chance in chance_of.items())


DESIGNS = {"poisson": poisson, "fixed_size": fixed_size}


def joint_draws(
    design: str, pi: list[float], members: list[list[int]]
) -> Iterator[tuple[float, list[tuple[int, ...]]]]:
    """Yield (probability, kept rows of each mini-batch): dealt first, drawn from independently."""
    yield from _independent([list(DESIGNS[design]({row: pi[row] for row in rows})) for rows in members])


def two_level_draws(
    design: str, prompt_pi: list[float], pi: list[float], prompts: list[list[int]], dealt: list[list[int]]
) -> Iterator[tuple[float, list[tuple[int, ...]]]]:
    """Yield the same where prompts are drawn first, and completions of those that are kept independently.

    Args:
        design: of the draw of prompts in a mini-batch.
        prompt_pi: of each prompt.
        pi: of each row, once its prompt is kept.
        prompts: rows of each.
        dealt: prompts of each mini-batch.
    """

    def outcomes(of_mini_batch: list[int]) -> Iterator[tuple[float, tuple[int, ...]]]:
        for chance, kept_prompts in DESIGNS[design]({q: prompt_pi[q] for q in of_mini_batch}):
            for of_rows, kept in poisson({row: pi[row] for q in kept_prompts for row in prompts[q]}):
                yield chance * of_rows, kept

    yield from _independent([list(outcomes(of_mini_batch)) for of_mini_batch in dealt])


def _independent(
    separate: list[list[tuple[float, tuple[int, ...]]]],
) -> Iterator[tuple[float, list[tuple[int, ...]]]]:
    for outcome in product(*separate):
        yield prod(chance for chance, _ in outcome), [kept for _, kept in outcome]
