"""The journal: what is read back is a prefix of what was written, whatever happened to the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import RecordError
from paceline.fleet.events import Keep, Kept
from paceline.fleet.journal import Journal
from paceline.types import RolloutRequest

REQUESTS = [RolloutRequest((1, 2), 50, key=2**64 - 1), RolloutRequest((1, 3), 50, key=2**64 - 1)]


def keep(index: int, start: int, *tokens: int, reason: str | None = None) -> Keep:
    return Keep(index, start, tokens, tuple(-0.125 * token for token in tokens), start + 1, 2, reason)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    journal = Journal.open(tmp_path / "deep" / "o.progress", "job", resume=False)
    journal.write(REQUESTS[0], keep(0, 0, 4, 5))
    journal.write(REQUESTS[1], keep(1, 0, 6))
    journal.write(REQUESTS[0], keep(0, 2, 7, 2, reason="stop"))
    journal.close()
    return journal.path


def read(path: Path, job: str = "job") -> dict[int, Kept]:
    journal = Journal.open(path, job, resume=True)
    found = journal.find(REQUESTS)
    journal.close()
    return found


def test_what_was_kept_is_found_by_key_and_prompt(path: Path) -> None:
    assert read(path) == {
        0: Kept((4, 5, 7, 2), (-0.5, -0.625, -0.875, -0.25), 3, 2, "stop"),
        1: Kept((6,), (-0.75,), 1, 2, None),
    }


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_passed_over_and_cut_off(path: Path, cut: int) -> None:
    os.truncate(path, path.stat().st_size - cut)
    journal = Journal.open(path, "job", resume=True)
    assert journal.find(REQUESTS)[0] == Kept((4, 5), (-0.5, -0.625), 1, 2, None)
    journal.write(REQUESTS[0], keep(0, 2, 7))
    journal.close()
    assert read(path)[0].tokens == (4, 5, 7)


def test_lines_that_do_not_connect_or_make_no_sense_are_passed_over(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"key": 1, "torn{"key": 2}\n')
    journal = Journal.open(path, "job", resume=True)
    journal.write(REQUESTS[1], keep(1, 5, 9))
    journal.write(REQUESTS[1], keep(1, 0, 6, 8))
    journal.close()
    assert read(path)[1].tokens == (6, 8)


def test_a_journal_of_another_job_is_begun_anew(path: Path) -> None:
    assert read(path, "another job") == {}
    assert read(path) == {}


def test_without_resume_it_begins_anew(path: Path) -> None:
    Journal.open(path, "job", resume=False).close()
    assert read(path) == {}


def test_two_processes_cannot_write_one(path: Path) -> None:
    journal = Journal.open(path, "job", resume=True)
    with pytest.raises(RecordError, match="written by another process"):
        Journal.open(path, "job", resume=True)
    journal.discard()
    assert not path.exists()
    journal.close()


def test_a_full_disk_is_noted_and_nothing_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path, "job", resume=True)
    write = os.write

    def refuse(fd: int, data: bytes) -> int:
        write(fd, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    journal.write(REQUESTS[1], keep(1, 1, 7))
    assert "No space left on device" in str(journal.failure)
    monkeypatch.setattr(os, "write", write)
    journal.write(REQUESTS[1], keep(1, 2, 8))  # beyond a gap
    assert journal.failure is None
    journal.close()
    assert read(path)[1].tokens == (6,)
