"""The trainer's checkpoints: complete or not, by number and never by time."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.training.checkpoints import (
    STATE,
    checkpoint_at,
    is_complete,
    keep_newest,
    latest_checkpoint,
    remove,
    seal,
    step_of,
)
from paceline.training.step_runner import StepRunner


def write(folder: Path, updates: int, *, is_sealed: bool = True) -> Path:
    made = checkpoint_at(folder, updates)
    (made / "nested").mkdir(parents=True)
    (made / STATE).write_text("{}")
    (made / "nested" / "model.safetensors").write_bytes(b"weights")
    if is_sealed:
        seal(made)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_before_the_first_there_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for state in ("", '{"global_step": 3', "3"):
        (write(tmp_path, 3, is_sealed=False) / STATE).write_text(state)
        assert latest_checkpoint(tmp_path) is None
        remove(checkpoint_at(tmp_path, 3))


def test_a_run_from_before_there_were_seals_goes_on(tmp_path: Path) -> None:
    """And none of its checkpoints goes before a newer one is complete."""
    for updates in (190, 200):
        write(tmp_path, updates, is_sealed=False)
    (write(tmp_path, 210, is_sealed=False) / STATE).write_text("")
    newest = latest_checkpoint(tmp_path)
    assert newest == checkpoint_at(tmp_path, 200)
    assert is_complete(newest)
    write(tmp_path, 5)
    keep_newest(tmp_path, 1)
    assert names(tmp_path) == ["checkpoint-200", "checkpoint-210"]


def test_the_newest_is_the_complete_one_with_the_highest_number(tmp_path: Path) -> None:
    for updates in (5, 40, 9):
        write(tmp_path, updates)
    torn = write(tmp_path, 50, is_sealed=False)
    (torn / STATE).write_text("")
    (tmp_path / "checkpoint-notes").mkdir()
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert step_of(newest) == 40
    assert not is_complete(torn)


def test_what_is_kept_are_the_newest_complete_ones(tmp_path: Path) -> None:
    for updates in (10, 30, 20):
        write(tmp_path, updates)
    write(tmp_path, 25, is_sealed=False)
    keep_newest(tmp_path, 2)
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-30"]
    for own in ("checkpoint-10-best", "checkpoint-mine"):
        (tmp_path / own).mkdir()
        seal(tmp_path / own)
    keep_newest(tmp_path, 5)
    assert names(tmp_path) == ["checkpoint-10-best", "checkpoint-20", "checkpoint-30", "checkpoint-mine"]


def test_a_clock_that_was_set_back_costs_no_checkpoint(tmp_path: Path) -> None:
    """Older checkpoints have times that lie ahead."""
    ahead_s = time.time() + 3600.0
    for updates in (10, 20):
        os.utime(write(tmp_path, updates), (ahead_s, ahead_s))
    forgotten: list[int] = []
    journals: Any = SimpleNamespace(forget=forgotten.append)
    runner = StepRunner.__new__(StepRunner)
    runner.recipe = SimpleNamespace(batch=SimpleNamespace(updates=2), output=SimpleNamespace(keep=2))  # type: ignore[assignment]
    runner._journals = journals
    args = SimpleNamespace(output_dir=str(tmp_path))
    for updates in (30, 40):
        write(tmp_path, updates, is_sealed=False)
        runner.trainer = SimpleNamespace(args=args, state=SimpleNamespace(global_step=updates))
        runner.note_checkpoint()
    assert names(tmp_path) == ["checkpoint-30", "checkpoint-40"]
    assert latest_checkpoint(tmp_path) == checkpoint_at(tmp_path, 40)
    assert forgotten == [15, 20]


def test_what_the_disk_refuses_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write(tmp_path, 10, is_sealed=False)

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="No space"):
            seal(made)
    assert not is_complete(made)

    def refuse_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse_folders)
    seal(made)
    assert is_complete(made)
