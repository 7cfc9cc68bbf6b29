"""The trainer's checkpoints: which are complete, which is the newest, and how many stay.

The trainer writes a checkpoint file by file, and asks the disk to keep nothing. So one counts once it is sealed: all of
it has reached the disk, and then a file says so. Which is the newest its number tells, as a clock may be set back.
Invariant: whenever process or machine end, the newest sealed checkpoint can be loaded, and no older one was removed
before it was sealed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SEAL = "complete"
"""In a checkpoint's folder."""
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
    """The newest complete one; None before the first."""
    return max(filter(is_complete, folder.glob(f"{_NAME}*")), key=step_of, default=None)


def seal(checkpoint: Path) -> None:
    """All of it has been written: ask the disk to keep it, and say so. Raises OSError where the disk refuses."""
    for path in [*checkpoint.rglob("*"), checkpoint]:
        _sync(path)
    (checkpoint / SEAL).touch()
    _sync(checkpoint)
    _sync(checkpoint.parent)


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the newest complete ones, and what is incomplete. Nobody may be writing one."""
    found = sorted(folder.glob(f"{_NAME}*"), key=step_of)
    kept = list(filter(is_complete, found))[-count:]
    for path in found:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
