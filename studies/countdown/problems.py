"""CountDown: reach a target with each of three numbers once, in reverse Polish notation.

A problem is the prompt `3 7 12 = 33`. `12 3 7 * +` answers it, as does whatever else evaluates to
the target in exact fractions.
"""

import operator
import zlib
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement, permutations, product
from typing import NamedTuple

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
LARGEST = 20  # numbers are 1 to 20
TARGETS = 100  # targets are 1 to 99
BUCKETS = 20  # of problems by their hash: one of the test, one of validation, the rest to train on
# Disjoint problems: models are trained on the first, settings are chosen on the second.
SIZES = {"train": 14_000, "validation": 200, "test": 200}


class Problem(NamedTuple):
    """Numbers and the target that they are to reach."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        """The problem as the model reads it."""
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
                second = stack.pop()
                first = stack.pop()
                stack.append(OPERATORS[word](first, second))
            else:
                stack.append(Fraction(int(word)))
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return stack[0] if len(stack) == 1 else None


def expressions(numbers: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Every expression of three numbers in reverse Polish notation, each once."""
    for a, b, c in dict.fromkeys(permutations(map(str, numbers))):
        for first_operator, second_operator in product(OPERATORS, repeat=2):
            yield a, b, first_operator, c, second_operator
            yield a, b, c, first_operator, second_operator


def problems() -> dict[Problem, list[str]]:
    """Every problem of three numbers, with all of its answers."""
    solutions: dict[Problem, list[str]] = {}
    for numbers in combinations_with_replacement(range(1, LARGEST + 1), 3):
        for words in expressions(numbers):
            target = value(words)
            if target is not None and target.denominator == 1 and 1 <= target < TARGETS:
                problem = Problem(numbers, int(target))
                solutions.setdefault(problem, []).append(" ".join(words))
    return solutions


def split(problems: Iterable[Problem]) -> dict[str, list[Problem]]:
    """All problems as train, validation and test, by a hash of the prompt."""
    pools: dict[str, list[Problem]] = {name: [] for name in SIZES}
    for problem in problems:
        bucket = zlib.crc32(problem.prompt.encode()) % BUCKETS
        if bucket == 0:
            pools["test"].append(problem)
        elif bucket == 1:
            pools["validation"].append(problem)
        else:
            pools["train"].append(problem)
    return pools
