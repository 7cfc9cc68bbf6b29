"""GSM8K: grade-school questions from a JSON-lines file, answers compared by math-verify.

Model text never reaches the algebra as it is: the final answer is cut out, bounded in length and
restricted to plain numbers, fractions and percent, so that no power tower or factorial can hang a thread
(math-verify's own time-outs use signals and work in the main thread only; they are off). Questions are
split into train and held-out by their content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from pydantic import Field

from paceline.config import Section
from paceline.errors import ConfigError, InstallError
from paceline.tasks import Row

DEFAULT_TEMPLATE = (
    "{question}\nThink step by step, then give the final answer as a number on the last line after '####'.\n"
)
GOLD_MARK = "####"
_MAX_READ_CHARACTERS = 4096
_MAX_ANSWER_CHARACTERS = 64
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]{0,40}\}){1,64})\}")
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")
_PLAIN = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:/0*[1-9][0-9]*)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[0-9]{1,16})\}\{([0-9]{1,16})\}")
_verify_lock = Lock()


class GSM8KOptions(Section):
    """Where the questions are and how they are asked."""

    prompts: Path
    """JSON-lines file, one {"question": text, "answer": text ending in "#### number"} a line."""
    template: str = DEFAULT_TEMPLATE
    """Prompt text; `{question}` is replaced."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the questions that is never trained on."""


class GSM8KTask:
    """GSM8K as a `Task`; rows have the columns prompt and gold. ConfigError if the file or template
    cannot be used."""

    name = "gsm8k"

    def __init__(self, options: GSM8KOptions) -> None:
        if "{question}" not in options.template:
            raise ConfigError(f"gsm8k: template {options.template!r} lacks '{{question}}': add it")
        self.options = options
        self._train, self._held_out = _split(read_questions(options.prompts), options)

    def train_rows(self, size: int, seed: int) -> list[Row]:
        return self._pick(self._train, size, seed, "train")

    def held_out_rows(self, size: int, seed: int) -> list[Row]:
        return self._pick(self._held_out, size, seed, "held-out")

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        return score(completion, row["gold"])

    def _pick(self, rows: list[Row], size: int, seed: int, split: str) -> list[Row]:
        if not 1 <= size <= len(rows):
            raise ConfigError(
                f"gsm8k: {size} {split} rows wanted, {self.options.prompts} has {len(rows)}: "
                "ask for at least 1 and at most that many, or change held_out_share"
            )
        return [dict(row) for row in Random(seed).sample(rows, size)]


def read_questions(path: Path) -> list[tuple[str, str]]:
    """(question, gold answer) of every line that is not blank. ConfigError names the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"gsm8k: cannot read {path}: {error}: give a JSON-lines file as 'prompts'"
        ) from error
    questions = [_read_line(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f"gsm8k: {path} has no questions: give a JSON-lines file with at least one")
    return questions


def _read_line(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        record = json.loads(line)
        question, answer = record["question"], record["answer"]
        if not isinstance(question, str):
            raise TypeError(f"question is {question!r}")
        return question, extract_gold(answer)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'gsm8k: {path}, line {number}: wants {{"question": text, "answer": text with "#### number"}} '
            f"({type(error).__name__}: {error}): correct or remove the line"
        ) from error


def extract_gold(answer: str) -> str:
    """The number after the last "####", thousands separators removed. ValueError: there is none."""
    _, mark, tail = answer.rpartition(GOLD_MARK)
    gold = _normalize(tail) if mark else None
    if gold is None:
        raise ValueError(f"no number after {GOLD_MARK!r} in {answer[-40:]!r}")
    return gold


def _split(questions: list[tuple[str, str]], options: GSM8KOptions) -> tuple[list[Row], list[Row]]:
    parts: tuple[list[Row], list[Row]] = ([], [])
    for question, gold in dict(questions).items():
        digest = hashlib.blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        held_out = int.from_bytes(digest, "little") / 2**64 < options.held_out_share
        parts[held_out].append({"prompt": options.template.replace("{question}", question), "gold": gold})
    return parts


def extract_answer(completion: str) -> str | None:
    """The final answer of a completion as a plain number or fraction: after the last "####", in the last
    \\boxed{}, or the last number, in this order; None if there is none. Reads the last 4096
    characters."""
    text = completion[-_MAX_READ_CHARACTERS:]
    _, mark, tail = text.rpartition(GOLD_MARK)
    if mark:
        return _normalize(tail.strip().partition("\n")[0])
    boxes = _BOXED.findall(text)
    if boxes:
        return _normalize(boxes[-1])
    numbers = _NUMBER.findall(text)
    return _normalize(numbers[-1]) if numbers else None


def _normalize(text: str) -> str | None:
    if len(text) > _MAX_ANSWER_CHARACTERS:
        return None
    text = _FRACTION.sub(r"\1\2/\3", text.strip().removesuffix("."))
    text = re.sub(r"[\s,$\\%€£]", "", text)
    return text if _PLAIN.fullmatch(text) else None


def score(completion: str, gold: str) -> float:
    """1.0 if math-verify finds the completion's final answer equal to the gold number, else 0.0. Never
    raises on any text."""
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    return 1.0 if answer == gold or _verify(gold, answer) else 0.0


@lru_cache(maxsize=65536)
def _verify(gold: str, answer: str) -> bool:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise InstallError("gsm8k needs math-verify: pip install 'paceline[trainers]'") from error
    with _verify_lock:  # the grammar's caches are shared between threads
        sides = [parse(f"${side}$", parsing_timeout=None) for side in (gold, answer)]
        return bool(verify(sides[0], sides[1], timeout_seconds=None))
