"""Decision trees: of any draw, by taking both sides of its decisions; of the pivotal design, from its definition."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class _Coins:
    """Uniform random numbers that can only be asked whether they are below given chances."""

    def __init__(self, generator: "_DecidedGenerator", size: int) -> None:
        self.generator, self.size = generator, size

    def __lt__(self, chance) -> np.ndarray:
        return np.array([self.generator.decide(c) for c in np.broadcast_to(chance, self.size)], dtype=bool)


class _DecidedGenerator:
    """Stands in for numpy's generator: follows decisions where it has them, says yes beyond, and keeps account."""

    def __init__(self, decisions: list[bool]) -> None:
        self.given, self.decisions, self.probability = decisions, [], 1.0

    def random(self, size: int) -> _Coins:
        return _Coins(self, size)

    def decide(self, chance: float) -> bool:
        assert 0 <= chance <= 1, f"a decision with chance {chance}"
        if not 1e-14 < chance < 1 - 1e-14:  # certain but for rounding
            return chance > 0.5
        at = len(self.decisions)
        self.decisions.append(self.given[at] if at < len(self.given) else True)
        self.probability *= chance if self.decisions[at] else 1 - chance
        return self.decisions[at]


def every_path(drawing: Callable[[_DecidedGenerator], T]) -> Iterator[tuple[float, T]]:
    """Yield (probability, result) for every path through the decisions `rng.random(n) < chance` of drawing(rng)."""
    decisions: list[bool] = []
    while True:
        generator = _DecidedGenerator(decisions)
        result = drawing(generator)
        yield generator.probability, result
        decisions = generator.decisions
        while decisions and not decisions[-1]:
            decisions.pop()
        if not decisions:
            return
        decisions[-1] = False


def pivotal_tree(pi: np.ndarray) -> Iterator[tuple[float, frozenset[int]]]:
    """Yield (probability, kept set) for every path of the ordered pivotal draw, apart from the product's code.

    Each fight of a and b ends with (a + b, 0) or (0, a + b) where a + b < 1, with (1, a + b - 1) or (a + b - 1, 1)
    where it is not; probabilities follow from E[kept] = pi.
    """
    contenders = [i for i, p in enumerate(pi) if 0 < p < 1]
    certain = frozenset(i for i, p in enumerate(pi) if p >= 1)
    if not contenders:
        yield 1.0, certain
        return

    def fight(at: int, champion: int, a: float, kept: frozenset[int], probability: float):
        if at == len(contenders):
            if a < 1e-9 or a > 1 - 1e-9:
                yield probability, kept | ({champion} if a > 0.5 else set())
            else:
                yield probability * a, kept | {champion}
                yield probability * (1 - a), kept
            return
        challenger, b = contenders[at], pi[contenders[at]]
        total = a + b
        if total < 1 - 1e-9:
            first, outcomes = a / total, ((champion, kept), (challenger, kept))
            rest = total
        elif total < 1 + 1e-9:
            first, outcomes = a / total, ((challenger, kept | {champion}), (challenger, kept | {challenger}))
            rest = 0.0
        else:
            first = (1 - b) / (2 - total)
            outcomes = ((challenger, kept | {champion}), (champion, kept | {challenger}))
            rest = total - 1
        for chance, (left, now_kept) in zip((first, 1 - first), outcomes, strict=True):
            if chance > 1e-15:
                yield from fight(at + 1, left, rest, now_kept, probability * chance)

    yield from fight(1, contenders[0], pi[contenders[0]], certain, 1.0)
