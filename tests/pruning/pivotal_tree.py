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


class ScriptedGenerator:
    """Stands in for numpy's generator where a test must take one named branch of a draw."""

    def __init__(self, *draws: list[float]) -> None:
        self.draws = [np.array(luck) for luck in draws]

    def random(self, size: int) -> np.ndarray:
        luck = self.draws.pop(0)
        assert size == luck.size, "the draw asked for another number of random numbers than the tree has fights"
        return luck


def pivotal_tree(pi: np.ndarray) -> Iterator[tuple[float, list[float], frozenset[int]]]:
    """Yield (probability, random numbers that lead there, kept set) for every path of the draw.

    Each fight of a and b ends with (a + b, 0) or (0, a + b) where a + b < 1, with (1, a + b - 1) or (a + b - 1, 1)
    where it is not; probabilities follow from E[kept] = pi. Low luck is the first contender's win.
    """
    contenders = [i for i, p in enumerate(pi) if 0 < p < 1]
    certain = frozenset(i for i, p in enumerate(pi) if p >= 1)
    if not contenders:
        yield 1.0, [], certain
        return

    def fight(at: int, champion: int, a: float, luck: list[float], kept: frozenset[int], probability: float):
        if at == len(contenders):
            if a < 1e-9 or a > 1 - 1e-9:
                yield probability, [0.5, *luck], kept | ({champion} if a > 0.5 else set())
            else:
                yield probability * a, [0.0, *luck], kept | {champion}
                yield probability * (1 - a), [1 - 1e-12, *luck], kept
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
        for chance, drawn, (left, now_kept) in zip((first, 1 - first), (0.0, 1 - 1e-12), outcomes, strict=True):
            if chance > 1e-15:
                yield from fight(at + 1, left, rest, [*luck, drawn], now_kept, probability * chance)

    yield from fight(1, contenders[0], pi[contenders[0]], [], certain, 1.0)
