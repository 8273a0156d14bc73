"""Worked solutions, the responses of the warm start.

A careful solution copies what is left of the expression after every step; a brief one does not, and has to find
the next term by itself. Their lengths differ by a factor of up to two for the same problem.

    12 + 19 - 5 =        12 + 19 = 31        12 + 19 = 31
                         31 - 5              31 - 5 = 26
                         31 - 5 = 26         answer: 26
                         answer: 26
"""

import random
from collections.abc import Callable

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__}


SLIPS = (-10, -2, -1, 1, 2, 10)


def solution(expression: str, careful: bool, slip_rate: float = 0.0, rng: random.Random | None = None) -> str:
    """Return the working, one line per partial sum, and the line `answer: N`.

    With probability `slip_rate` a partial sum is off by one of `SLIPS`, and the working goes on from there.
    """
    first, *rest = expression.split(" ")
    total = int(first)
    lines = []
    while rest:
        sign, term, *rest = rest
        result = OPERATIONS[sign](total, int(term))
        if slip_rate and rng and rng.random() < slip_rate:
            result += rng.choice(SLIPS)
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
        if careful and rest:
            lines.append(" ".join([str(total), *rest]))
    return "\n".join([*lines, f"answer: {total}"])


def sample_solution(expression: str, brief_share: float, slip_rate: float, rng: random.Random) -> str:
    """Return a brief solution with probability `brief_share`, else a careful one."""
    return solution(expression, rng.random() >= brief_share, slip_rate, rng)
