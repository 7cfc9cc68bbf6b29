"""A ladder as a file: what each drafter was measured to gain, and how often its tokens were right so far.

Written by `paceline ladder --out` and into the run folder of a training run that has several drafters. Invariant: a
file of another version is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import RecordError
from paceline.record.whole_file import read_json, write_json

LADDER_VERSION = 1
FILE_NAME = "ladder.json"
"""In a run folder."""


class Rungs(msgspec.Struct, frozen=True):
    """One drafter."""

    drafter: str
    speedup: tuple[float, ...]  # [num_rates] over plain decoding; not falling
    draft_s: float = 0.0
    """Seconds of a draft token of all responses; 0: not known."""
    lone_draft_s: float = 0.0
    """The same of one response; 0: not known."""


class Ladder(msgspec.Struct, frozen=True):
    """Speed-up of every drafter as a function of its acceptance rate, measured on one engine."""

    batch: int
    """Responses that ran at once."""
    rates: tuple[float, ...]  # ascending
    drafters: tuple[Rungs, ...]


class Tried(msgspec.Struct, frozen=True):
    """How often a drafter's tokens were right; older steps count less."""

    right: float = 0.0
    tried: float = 0.0


class LadderFile(msgspec.Struct, frozen=True, kw_only=True):
    """A ladder and what is known of its drafters' acceptance."""

    version: int = LADDER_VERSION
    ladder: Ladder | None
    """None: not measured yet."""
    tried: dict[str, Tried] = {}
    """By drafter; what was never used is not there."""


def write_ladder(file: LadderFile, path: Path) -> None:
    """Write the file, whole or not at all. Raises RecordError when it cannot be written."""
    write_json(file, path)


def read_ladder(path: Path, drafters: Sequence[str] | None = None) -> LadderFile:
    """Read the file. drafters: those that there are, by name; None: any.

    Raises RecordError when it is missing, damaged, of another version or of other drafters.
    """
    file = read_json(path, LadderFile, LADDER_VERSION, "ladder", "paceline ladder --out")
    if drafters is not None and file.ladder is not None:
        measured = [one.drafter for one in file.ladder.drafters]
        if set(measured) != set(drafters):
            raise RecordError(
                f"{path} is the ladder of {', '.join(measured)}, the drafters are {', '.join(drafters)}: give those, "
                "or measure the ladder of these"
            )
    return file
