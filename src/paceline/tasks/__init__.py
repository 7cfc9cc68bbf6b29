"""Tasks: where prompts come from and how a response is rewarded. `load_task` is the door.

A task hands out rows (dictionaries with a "prompt" text and the columns that its reward reads; a list of
rows is a Hugging Face data set in the making) and scores a completion against its row. Rewards never
raise, whatever the model wrote. Importing this package or loading a task is fast: reasoning-gym and
math-verify are imported at first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from paceline.config import describe_limit
from paceline.errors import ConfigError

Row = dict[str, Any]

TASK_NAMES = ("countdown", "gsm8k")


class Task(Protocol):
    """What a trainer needs to know about a task."""

    @property
    def name(self) -> str:
        """The name that `load_task` knows."""
        ...

    def train_rows(self, size: int, seed: int) -> list[Row]:
        """`size` different rows to train on; the same for the same arguments. ConfigError: not that many
        exist."""
        ...

    def held_out_rows(self, size: int, seed: int) -> list[Row]:
        """`size` different rows that `train_rows` never gives, whatever the seeds. ConfigError as above."""
        ...

    def reward(self, completion: str, row: Mapping[str, Any]) -> float:
        """Reward of a completion (special tokens left out) of this row's prompt, in [0, 1]. Never raises
        on any text."""
        ...


def load_task(name: str, **options: Any) -> Task:
    """The task of that name. ConfigError: an unknown name, an unknown option or a value that cannot work."""
    try:
        if name == "countdown":
            from paceline.tasks.countdown import CountdownOptions, CountdownTask

            return CountdownTask(CountdownOptions(**options))
        if name == "gsm8k":
            from paceline.tasks.gsm8k import GSM8KOptions, GSM8KTask

            return GSM8KTask(GSM8KOptions(**options))
    except ValidationError as error:
        raise ConfigError(_explain(name, error)) from error
    raise ConfigError(f"unknown task {name!r}: choose one of {', '.join(TASK_NAMES)}")


def _explain(name: str, error: ValidationError) -> str:
    first = error.errors()[0]
    option = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"task {name!r} has no option {option!r}: remove it"
    if first["type"] == "missing":
        return f"task {name!r} needs the option {option!r}: give it"
    where = f"option {option!r} = {first['input']!r}" if option else "options"
    return f"task {name!r}: {where}: {describe_limit(first)}"
