"""The Countdown task: problems from reasoning-gym, answers checked by a strict parser of our own.

Model text is never evaluated: an answer is a list of equations over unsigned integers, matched by a
bounded regular expression and replayed with exact integers. (reasoning-gym's own scorer evaluates what it
is given; it never sees model text here.) Train and held-out problems are told apart by a hash of their
content, so no seed can mix them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator

from paceline.config import Section
from paceline.errors import ConfigError, InstallError
from paceline.tasks import Row
from paceline.tasks.traces import ANSWER_MARK, Problem

SOLVED_REWARD = 1.0
FORMAT_REWARD = 0.1
"""For a well-formed answer (as many equations as needed) that is wrong."""

_EQUATION = re.compile(r"([0-9]{1,9})([-+*/])([0-9]{1,9})=([0-9]{1,9})")
_EQUATION_CHARACTERS = 32
_SEED_STRIDE = 10_000_000  # reasoning-gym draws item i from seed + i: seeds must lie further apart than rows
_DRAWS_PER_ROW = 100

Equation = tuple[int, str, int, int]


class CountdownOptions(Section):
    """Limits of reasoning-gym's `countdown` data set, bounds included; the defaults fit the shipped
    policy."""

    min_numbers: int = Field(3, ge=2, le=6)
    """Fewest numbers of a problem."""
    max_numbers: int = Field(3, ge=2, le=6)
    """Most numbers of a problem; the shipped policy has seen 3 and a few of 4."""
    min_value: int = Field(1, ge=1, le=999)
    """Smallest number."""
    max_value: int = Field(30, ge=1, le=999)
    """Largest number."""
    min_target: int = Field(10, ge=1, le=999)
    """Smallest target."""
    max_target: int = Field(200, ge=1, le=999)
    """Largest target."""

    @model_validator(mode="after")
    def _check_order(self) -> CountdownOptions:
        for what in ("numbers", "value", "target"):
            low, high = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if low > high:
                raise ValueError(
                    f"min_{what} = {low} is above max_{what} = {high}: lower one or raise the other"
                )
        return self


class CountdownTask:
    """Countdown as a `Task`; rows have the columns prompt, numbers and target."""

    name = "countdown"

    def __init__(self, options: CountdownOptions) -> None:
        self.options = options

    def train_rows(self, size: int, seed: int) -> list[Row]:
        return self._collect_rows(size, seed, held_out=False)

    def held_out_rows(self, size: int, seed: int) -> list[Row]:
        return self._collect_rows(size, seed, held_out=True)

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return score(completion, row)

    def _collect_rows(self, size: int, seed: int, held_out: bool) -> list[Row]:
        if size < 1 or seed < 0:
            raise ConfigError(
                f"countdown rows: size {size} and seed {seed}: size must be at least 1, seed at least 0"
            )
        rows: dict[tuple[tuple[int, ...], int], Row] = {}
        for draw, problem in enumerate(self._draw_problems(seed)):
            if problem.held_out == held_out:
                row = {"prompt": problem.prompt, "numbers": list(problem.numbers), "target": problem.target}
                rows.setdefault((tuple(sorted(problem.numbers)), problem.target), row)
            if len(rows) == size:
                return list(rows.values())
            if draw >= _DRAWS_PER_ROW * (size + 10):
                break
        raise ConfigError(
            f"countdown: found only {len(rows)} different problems of {size} wanted: widen the ranges of "
            "numbers, values or targets, or ask for fewer rows"
        )

    def _draw_problems(self, seed: int) -> Iterator[Problem]:
        try:
            from reasoning_gym import create_dataset
        except ImportError as error:
            raise InstallError("countdown needs reasoning-gym: pip install 'paceline[trainers]'") from error
        options = self.options.model_dump()
        dataset = create_dataset("countdown", size=_SEED_STRIDE, seed=seed * _SEED_STRIDE, **options)
        for i in range(_SEED_STRIDE):
            try:
                metadata = dataset[i]["metadata"]
            except ValueError as error:
                raise ConfigError(f"countdown: no problem fits {options}: widen the targets") from error
            yield Problem(tuple(metadata["numbers"]), int(metadata["target"]))


def score(response: str, metadata: Mapping[str, Any]) -> float:
    """1.0: the answer reaches the target with every number used once; 0.1: a well-formed answer that does
    not; else 0.

    `metadata` has "numbers" (list of int) and "target" (int). Linear in the length of the response; never
    raises on any text. Differs from reasoning-gym's `score_answer` (1.0, 0.05, 0.01): wants the equations
    one by one.
    """
    numbers = list(metadata["numbers"])
    equations = parse_answer(response, len(numbers) - 1)
    if equations is None:
        return 0.0
    return SOLVED_REWARD if _replay(equations, numbers, metadata["target"]) else FORMAT_REWARD


def parse_answer(response: str, count: int) -> list[Equation] | None:
    """The `count` equations (a, operator, b, result) after the last answer mark, nothing after them; None
    otherwise."""
    start = response.rfind(ANSWER_MARK)
    if start < 0 or len(response) - start > len(ANSWER_MARK) + count * _EQUATION_CHARACTERS:
        return None
    parts = response[start + len(ANSWER_MARK) :].split(",")
    matches = [_EQUATION.fullmatch(part) for part in parts]
    if len(parts) != count:
        return None
    return [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in matches if m] if all(matches) else None


def _replay(equations: list[Equation], numbers: list[int], target: int) -> bool:
    """Do the equations hold, each eating two of the numbers that are there and leaving its result, the
    last the target?"""
    for a, operator, b, result in equations:
        for operand in (a, b):
            if operand not in numbers:
                return False
            numbers.remove(operand)
        if not _holds(a, operator, b, result):
            return False
        numbers.append(result)
    return numbers == [target]


def _holds(a: int, operator: str, b: int, result: int) -> bool:
    if operator == "/":
        return b != 0 and b * result == a
    return result == (a + b if operator == "+" else a - b if operator == "-" else a * b)
