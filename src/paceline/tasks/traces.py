"""Countdown problems and the search traces that a policy is pretrained on; standard library alone.

A problem is written `24,3,29:21 ` (numbers, target, one blank) and answered by a depth-first search in text:

    29-24=5|3,5;3*5=15x3+5=8x5-3=2x<24/3=8|29,8;29*8=232x29-8=21>ans24/3=8,29-8=21

`a?b=v|…;` combines two numbers and opens a node with the numbers that are left, `a?b=v` followed by `x`
is a leaf that misses the target, `<` goes back, `>` marks success, and the answer repeats the successful
equations in order. Pairs and operators are tried in random order, so the lengths have the long tail of
real reasoning: half of the three-number traces are below about 100 tokens and one in a hundred above 400.
Called by the Countdown task and by pretraining.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from random import Random

ANSWER_MARK = "ans"
LARGEST_VALUE = 999
"""The search leaves out every equation whose result is larger."""
HELD_OUT_ONE_IN = 8
"""One problem in so many is held out, chosen by its content."""


@dataclass(frozen=True, slots=True)
class ProblemRange:
    """What is drawn: the same six limits as reasoning-gym's `countdown` data set, bounds included."""

    min_numbers: int = 3
    max_numbers: int = 3
    min_value: int = 1
    max_value: int = 30
    min_target: int = 10
    max_target: int = 200


@dataclass(frozen=True, slots=True)
class Problem:
    """Reach `target` with + - * / from all of `numbers`, each used once."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        """`24,3,29:21 `, ended by one blank."""
        return f"{','.join(map(str, self.numbers))}:{self.target} "

    @property
    def held_out(self) -> bool:
        """True for the problems that neither pretraining nor RL may see; the order of the numbers does
        not matter."""
        content = f"{sorted(self.numbers)}:{self.target}".encode()
        return (
            int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % HELD_OUT_ONE_IN == 0
        )


def draw_problem(rng: Random, ranges: ProblemRange) -> Problem:
    """One solvable problem from the distribution of reasoning-gym 0.1.25's `countdown`, without its
    symbolic algebra.

    A chain of random operators runs from left to right over random numbers; a division picks a divisor
    among the numbers that are left or falls back to a subtraction; the chain is kept if its value lies in
    the target range.
    """
    while True:
        count = rng.randint(ranges.min_numbers, ranges.max_numbers)
        numbers = [rng.randint(ranges.min_value, ranges.max_value) for _ in range(count)]
        value = numbers[0]
        for i in range(1, count):
            value = _extend_chain(value, numbers, i, rng)
        if ranges.min_target <= value <= ranges.max_target:
            rng.shuffle(numbers)
            return Problem(tuple(numbers), value)


def _extend_chain(value: int, numbers: list[int], i: int, rng: Random) -> int:
    operator = rng.choice("+-*/")
    if operator == "+":
        return value + numbers[i]
    if operator == "*":
        return value * numbers[i]
    if operator == "/":
        divisors = [n for n in numbers[i:] if value % n == 0]
        if divisors:
            numbers[i] = rng.choice(divisors)
            return value // numbers[i]
    return value - numbers[i]


def list_equations(a: int, b: int) -> list[tuple[int, str]]:
    """Every (result, equation) of two numbers that stays a non-negative integer up to LARGEST_VALUE."""
    large, small = (a, b) if a >= b else (b, a)
    found = [(a + b, f"{a}+{b}={a + b}"), (a * b, f"{a}*{b}={a * b}")]
    found.append((large - small, f"{large}-{small}={large - small}"))
    if small > 1 and large % small == 0:
        found.append((large // small, f"{large}/{small}={large // small}"))
    elif small == 0 and large > 1:
        found.append((0, f"0/{large}=0"))
    return [(value, text) for value, text in found if value <= LARGEST_VALUE]


def write_trace(problem: Problem, rng: Random, max_tokens: int) -> str | None:
    """A search trace with its answer, or None if the search fails or takes more than `max_tokens` tokens.

    Tokens are those of the Countdown tokenizer: one per character, one for the answer mark.
    """
    search = _Search(problem.target, rng, max_tokens)
    solution = search.visit(list(problem.numbers))
    if solution is None:
        return None
    trace = "".join(search.text) + ANSWER_MARK + ",".join(solution)
    return trace if len(trace) - len(ANSWER_MARK) + 1 <= max_tokens else None


class _Search:
    """One depth-first search; `text` grows as it goes, `left` counts the characters that it may still
    write."""

    def __init__(self, target: int, rng: Random, max_tokens: int) -> None:
        self.text: list[str] = []
        self._target = target
        self._rng = rng
        self._left = max_tokens

    def visit(self, numbers: list[int]) -> list[str] | None:
        pairs = list(combinations(range(len(numbers)), 2))
        self._rng.shuffle(pairs)
        for i, j in pairs:
            rest = [n for k, n in enumerate(numbers) if k != i and k != j]
            equations = list_equations(numbers[i], numbers[j])
            self._rng.shuffle(equations)
            for value, equation in equations:
                solution = self._try_equation(value, equation, rest)
                if solution is not None or self._left < 0:
                    return solution
        return None

    def _try_equation(self, value: int, equation: str, rest: list[int]) -> list[str] | None:
        if not rest:
            self._write(equation + (">" if value == self._target else "x"))
            return [equation] if value == self._target else None
        numbers = [*rest, value]
        self._write(f"{equation}|{','.join(map(str, numbers))};")
        solution = None if self._left < 0 else self.visit(numbers)
        if solution is None:
            self._write("<")
            return None
        return [equation, *solution]

    def _write(self, text: str) -> None:
        self.text.append(text)
        self._left -= len(text)


def stream_examples(seed: int, ranges: ProblemRange, max_tokens: int) -> Iterator[tuple[Problem, str]]:
    """Endless (problem, trace) pairs for pretraining, held-out problems left out; the same for the same
    arguments."""
    rng = Random(seed)
    while True:
        problem = draw_problem(rng, ranges)
        if problem.held_out:
            continue
        trace = write_trace(problem, rng, max_tokens)
        if trace is not None:
            yield problem, trace
