"""The journal: what is read back is a prefix of what was written, whatever happened to the file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.control.events import Keep, Kept
from paceline.errors import RecordError
from paceline.fleet.journal import Journal
from paceline.types import RolloutRequest

REQUESTS = [RolloutRequest((1, 2), 50, key=2**64 - 1), RolloutRequest((1, 3), 50, key=2**64 - 1)]


def keep(index: int, start: int, *tokens: int, reason: str | None = None) -> Keep:
    return Keep(index, start, tokens, tuple(-0.125 * token for token in tokens), start + 1, 2, reason)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    journal = Journal.open(tmp_path / "deep" / "o.progress", "job", resume=False)
    assert journal.find(REQUESTS) == {}
    journal.write([keep(0, 0, 4, 5), keep(1, 0, 6)])
    journal.write([keep(0, 2, 7, 2, reason="stop")])
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
    journal.write([keep(0, 2, 7)])
    journal.close()
    assert read(path)[0].tokens == (4, 5, 7)


def test_lines_that_do_not_connect_or_make_no_sense_are_passed_over(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"key": 1, "torn{"key": 2}\n')
    journal = Journal.open(path, "job", resume=True)
    journal.find(REQUESTS)
    journal.write([keep(1, 5, 9), keep(1, 0, 6, 8)])
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


def test_what_a_response_was_given_is_part_of_its_name(path: Path) -> None:
    """A program that saves tokens itself and gives them as `generated` must not get them a second time."""
    journal = Journal.open(path, "job", resume=True)
    saved = [replace(REQUESTS[0], generated=(4,)), replace(REQUESTS[0], generated=(4, 9))]
    assert journal.find(saved) == {}
    journal.write([keep(0, 0, 5), keep(1, 0, 8)])
    assert journal.find(REQUESTS)[0].tokens == (4, 5, 7, 2)
    journal.close()
    again = Journal.open(path, "job", resume=True)
    found = again.find([*saved, *REQUESTS])
    assert [found[index].tokens for index in range(4)] == [(5,), (8,), (4, 5, 7, 2), (6,)]
    again.close()


@pytest.fixture
def full(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    """A journal whose disk takes five bytes and no more."""
    journal = Journal.open(path, "job", resume=True)
    journal.find(REQUESTS)
    write, taken = os.write, []

    def refuse(fd: int, data: bytes) -> int:
        if taken:
            raise OSError(28, "No space left on device")
        taken.append(write(fd, data[:5]))
        return 5

    monkeypatch.setattr(os, "write", refuse)
    journal.write([keep(1, 1, 7)])
    assert "No space left on device" in str(journal.failure)
    yield journal
    journal.close()


def test_a_full_disk_is_noted_and_nothing_is_left_out(
    full: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.write([keep(1, 2, 8)])
    assert full.failure is not None
    full_bytes = path.read_bytes()
    assert not full_bytes.endswith(b"\n"), "a line is cut in two"
    monkeypatch.undo()
    full.write([keep(1, 3, 9)])
    assert full.failure is None
    full.close()
    assert read(path)[1].tokens == (6, 7, 8, 9)


def test_a_disk_that_stays_full_ends_the_journal(
    full: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.fleet.journal.MOST_WAITING_BYTES", 100)
    full.write([keep(1, 2, 8)])
    monkeypatch.undo()
    full.write([keep(1, 3, 9)])
    assert full.failure is not None, "it says so to the end"
    full.close()
    assert read(path)[1].tokens == (6,)


def test_a_long_journal_is_read_in_linear_time(path: Path) -> None:
    """Ten times the lines take ten times as long, not a hundred."""
    journal = Journal.open(path, "job", resume=False)
    journal.find(REQUESTS)
    times_s = []
    for begin, end in ((0, 3_000), (3_000, 30_000)):
        journal.write([keep(0, start, 1) for start in range(begin, end)])
        journal.close()
        start_s = time.process_time()
        journal = Journal.open(path, "job", resume=True)
        times_s.append(time.process_time() - start_s)
        assert len(journal.find(REQUESTS)[0].tokens) == end
    journal.close()
    assert times_s[1] < 30 * times_s[0]


def test_a_report_is_one_write_and_no_look_at_a_prompt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(path, "job", resume=True)
    journal.find(REQUESTS)
    monkeypatch.delattr("paceline.fleet.journal.prompt_group")
    write, sizes = os.write, []
    monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(len(data)) or write(fd, data))
    journal.write([keep(1, start, 3) for start in range(1, 50)])
    assert len(sizes) == 1
    journal.close()
