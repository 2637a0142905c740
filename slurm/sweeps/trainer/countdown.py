"""CountDown: reach a target with each of three numbers once, in reverse Polish notation.

A problem is the prompt `3 7 12 = 33`. `12 3 7 * +` answers it, as does whatever else evaluates to
the target in exact fractions.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path

from calibeval.io import InputError, json_lines

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True)
class Problem:
    """Numbers and the target that they are to reach."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))} = {self.target}"

    def solved_by(self, answer: str) -> bool:
        """Whether an answer uses each number once and evaluates to the target."""
        words = answer.split()
        used = sorted(word for word in words if word not in OPERATORS)
        return used == sorted(map(str, self.numbers)) and value(words) == self.target


def value(words: Sequence[str]) -> Fraction | None:
    """What an expression in reverse Polish notation evaluates to; None if it is none."""
    stack: list[Fraction] = []
    try:
        for word in words:
            if word in OPERATORS:
                b, a = stack.pop(), stack.pop()
                stack.append(OPERATORS[word](a, b))
            else:
                stack.append(Fraction(int(word)))
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return stack[0] if len(stack) == 1 else None


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Every expression of three numbers in reverse Polish notation, each once."""
    for a, b, c in dict.fromkeys(permutations(map(str, numbers))):
        for one, two in product(OPERATORS, repeat=2):
            yield a, b, one, c, two
            yield a, b, c, one, two


def read(path: Path) -> list[Problem]:
    """The problems of a file of JSON lines; what is none raises `InputError` with its line."""
    found = {}
    for number, row in json_lines(path):
        numbers, target = row.get("numbers"), row.get("target")
        if not isinstance(numbers, list) or not all(type(x) is int for x in [*numbers, target]):
            expected = '{"numbers": [3, 7, 12], "target": 33}'
            raise InputError(f"{path}, line {number}: found {row}, expected {expected}")
        found[Problem(tuple(numbers), target)] = None
    if not found:
        raise InputError(f"{path}: no problem in it")
    return [*found]
