"""The trainer's checkpoints: which are complete, which is the newest, and how many stay.

The trainer writes a checkpoint file by file, and asks the disk to keep nothing. So one counts once it is sealed: all of
it has reached the disk, and then a file says so. Which is the newest its number tells, as a clock may be set back.
Invariant: whenever process or machine end, the newest sealed checkpoint can be loaded, and no older one was removed
before it was sealed.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

from paceline.record.append import sync

SEAL = "complete"
"""In a checkpoint's folder."""
STATE = "trainer_state.json"
"""What the trainer writes last."""
_NAME = "checkpoint-"


def checkpoint_at(folder: Path, updates: int) -> Path:
    """Where the trainer keeps its state after so many optimizer updates."""
    return folder / f"{_NAME}{updates}"


def step_of(checkpoint: Path) -> int:
    """Optimizer updates made before a checkpoint; -1 if its name does not tell."""
    number = checkpoint.name.removeprefix(_NAME)
    return int(number) if number.isdigit() else -1


def is_complete(checkpoint: Path) -> bool:
    """Whether it was sealed."""
    return (checkpoint / SEAL).is_file()


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete one; None before the first.

    Where none was ever sealed, as in runs that began before there were seals, the newest that the trainer seems to have
    written to its end, which is sealed now.
    """
    found = _checkpoints(folder)
    if sealed := list(filter(is_complete, found)):
        return sealed[-1]
    if whole := list(filter(_is_written, found)):
        seal(whole[-1])
        return whole[-1]
    return None


def seal(checkpoint: Path) -> None:
    """All of it has been written: ask the disk to keep it, and say so. Raises OSError where the disk refuses."""
    for path in [*checkpoint.rglob("*"), checkpoint]:
        sync(path)
    (checkpoint / SEAL).touch()
    sync(checkpoint)
    sync(checkpoint.parent)


def remove(checkpoint: Path) -> None:
    """Remove it; cut short, this leaves nothing that looks complete."""
    (checkpoint / SEAL).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the newest complete ones, and what is incomplete and older. Nobody may be writing one."""
    found = _checkpoints(folder)
    kept = list(filter(is_complete, found))[-count:]
    for checkpoint in found:
        if checkpoint not in kept and kept and step_of(checkpoint) < step_of(kept[-1]):
            remove(checkpoint)


def _checkpoints(folder: Path) -> list[Path]:
    """In order; folders with other names are not the trainer's."""
    return sorted((path for path in folder.glob(f"{_NAME}*") if step_of(path) >= 0), key=step_of)


def _is_written(checkpoint: Path) -> bool:
    with suppress(OSError, ValueError):
        return isinstance(json.loads((checkpoint / STATE).read_bytes()), dict)
    return False
