"""The journal: what is read back is a prefix of what was written, whatever happened to the file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.control.events import Keep, Kept
from paceline.control.packed import Packed
from paceline.errors import RecordError
from paceline.fleet.fleet import Fleet
from paceline.fleet.journal import Journal, kept_job
from paceline.types import RolloutRequest

REQUESTS = [RolloutRequest((1, 2), 50, key=2**64 - 1), RolloutRequest((1, 3), 50, key=2**64 - 1)]


def pack(*tokens: int) -> Packed:
    return Packed.of(tokens, [-0.125 * token for token in tokens])


def keep(index: int, start: int, *tokens: int, reason: str | None = None) -> Keep:
    return Keep(index, start, pack(*tokens), start + 1, 2, reason)


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


def read_frozen(path: Path) -> dict[int, Kept]:
    """What is in the file, while another journal writes it."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    return read(copy)


def test_what_was_kept_is_found_by_key_and_prompt(path: Path) -> None:
    assert read(path) == {
        0: Kept(pack(4, 5, 7, 2), 3, 2, "stop"),
        1: Kept(pack(6), 1, 2, None),
    }


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_end_is_passed_over_and_cut_off(path: Path, cut: int) -> None:
    os.truncate(path, path.stat().st_size - cut)
    journal = Journal.open(path, "job", resume=True)
    assert journal.find(REQUESTS)[0] == Kept(pack(4, 5), 1, 2, None)
    journal.write([keep(0, 2, 7)])
    journal.close()
    assert read(path)[0].packed == pack(4, 5, 7)


def test_growths_that_do_not_connect_are_passed_over(path: Path) -> None:
    journal = Journal.open(path, "job", resume=True)
    journal.find(REQUESTS)
    journal.write([keep(1, 5, 9), keep(1, 0, 6, 8)])
    journal.close()
    assert read(path)[1].packed == pack(6, 8)


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
    assert journal.find(REQUESTS)[0].packed == pack(4, 5, 7, 2)
    journal.close()
    again = Journal.open(path, "job", resume=True)
    found = again.find([*saved, *REQUESTS])
    assert [found[index].packed for index in range(4)] == [pack(5), pack(8), pack(4, 5, 7, 2), pack(6)]
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
    assert read_frozen(path)[1].packed == pack(6), "what is there is whole"
    monkeypatch.undo()
    full.write([keep(1, 3, 9)])
    assert full.failure is None
    full.close()
    assert read(path)[1].packed == pack(6, 7, 8, 9)


def test_a_disk_that_stays_full_ends_the_journal(
    full: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.fleet.journal.MOST_WAITING_BYTES", 50)
    full.write([keep(1, 2, 8)])
    monkeypatch.undo()
    full.write([keep(1, 3, 9)])
    assert full.failure is not None, "it says so to the end"
    full.close()
    assert read(path)[1].packed == pack(6)


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
        assert len(journal.find(REQUESTS)[0].packed) == end
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


def test_whatever_is_cut_off_or_damaged_a_prefix_is_left(path: Path) -> None:
    whole = path.read_bytes()
    tokens = {0: (4, 5, 7, 2), 1: (6,)}
    best = read(path)
    for cut in range(len(whole)):
        for content in (whole[:cut], whole[:cut] + bytes([whole[cut] ^ 64]) + whole[cut + 1 :]):
            path.write_bytes(content)
            found = read(path)
            assert found != best
            for index, kept in found.items():
                mine, logprobs = kept.packed.unpack()
                assert mine == tokens[index][: len(mine)]
                assert logprobs == tuple(-0.125 * token for token in mine)
                assert kept.finish_reason is None or len(mine) == 4
            journal = Journal.open(path, "job", resume=True)
            journal.find(REQUESTS)
            journal.write([keep(1, len(found[1].packed) if 1 in found else 0, 9, reason="stop")])
            journal.close()
            assert read(path)[1].packed.unpack()[0] == (*tokens[1], 9)[-2 if 1 in found else -1 :]


@pytest.fixture
def long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Three responses of 1000 tokens each, one of them finished."""
    monkeypatch.setattr("paceline.fleet.journal.SLACK_BYTES", 4000)
    journal = Journal.open(tmp_path / "long", "job", resume=False)
    journal.find([RolloutRequest((1,), 2000, key=key) for key in range(3)])
    for start in range(0, 1000, 10):
        journal.write([keep(index, start, *range(start, start + 10)) for index in range(3)])
    journal.write([keep(2, 1000, 5, reason="stop")])
    return journal


def find_long(path: Path) -> dict[int, Kept]:
    journal = Journal.open(path, "job", resume=True)
    found = journal.find([RolloutRequest((1,), 2000, key=key) for key in range(3)])
    journal.close()
    return found


@pytest.mark.parametrize("refused", ["open", "write"])
def test_without_room_for_a_new_file_the_old_one_stays(
    long: Journal, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    before = long.path.stat().st_size
    monkeypatch.setattr(os, refused, refuse)
    long.drop([0, 2])
    monkeypatch.undo()
    assert [path.name for path in long.path.parent.iterdir()] == ["long"]
    assert long.path.stat().st_size == before
    long.write([keep(1, 1000, 7)])
    long.close()
    assert len(find_long(long.path)[1].packed) == 1001


def test_what_a_resumed_rollout_does_not_ask_for_is_dropped(long: Journal) -> None:
    """A driver that was killed has left what is safe elsewhere in the file."""
    before = long.path.stat().st_size
    long.close()
    journal = Journal.open(long.path, "job", resume=True)
    assert list(journal.find([RolloutRequest((1,), 2000, key=1)])) == [0]
    journal.drop([])
    assert journal.path.stat().st_size < 0.4 * before
    journal.write([keep(0, 1000, 7)])
    journal.close()
    assert {index: len(kept.packed) for index, kept in find_long(long.path).items()} == {1: 1001}


def test_what_is_safe_elsewhere_is_dropped(long: Journal) -> None:
    before = long.path.stat().st_size
    long.drop([2])
    assert long.path.stat().st_size == before, "less than half"
    long.drop([0, 0])
    assert long.path.stat().st_size < 0.4 * before
    long.write([keep(1, 1000, 7)])
    long.drop([])
    with pytest.raises(RecordError, match="written by another process"):
        Journal.open(long.path, "job", resume=True)
    long.close()
    found = find_long(long.path)
    assert list(found) == [1]
    assert found[1].packed.unpack()[0] == (*range(1000), 7)
    assert [one.name for one in long.path.parent.iterdir()] == ["long"]


def test_a_driver_is_killed_at_any_time_while_the_file_is_written_anew(
    long: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It copies a little with every write, so a driver with gigabytes does not wait either."""
    monkeypatch.setattr("paceline.fleet.journal._COPIED_BYTES", 300)
    new, before, sizes = long.path.with_name("long.new"), long.path.stat().st_size, []
    long.drop([0, 2])
    for number in range(1000):
        if not new.exists():
            break
        sizes.append(new.stat().st_size)
        killed = tmp_path / str(number)
        killed.mkdir()
        for file in (long.path, new):
            (killed / file.name).write_bytes(file.read_bytes())
        assert find_long(killed / "long")[1].packed.unpack()[0] == tuple(range(1000 + number))
        assert not (killed / "long.new").exists(), "of no use to anyone"
        long.write([keep(1, 1000 + number, 1000 + number)])
    assert number > 20
    assert max(after - size for size, after in pairwise(sizes)) < 1000
    assert long.path.stat().st_size < before
    long.write([keep(1, 1000 + number, 7)])
    long.close()
    found = find_long(long.path)
    assert list(found) == [1]
    assert found[1].packed.unpack()[0] == (*range(1000 + number), 7)


def test_a_rollout_may_end_while_the_file_is_written_anew(
    long: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.fleet.journal._COPIED_BYTES", 300)
    long.drop([0, 2])
    assert len(list(long.path.parent.iterdir())) == 2
    long.close()
    assert [one.name for one in long.path.parent.iterdir()] == ["long"]
    assert len(find_long(long.path)[1].packed) == 1000


@pytest.mark.parametrize("refused", ["write", "replace"])
def test_a_disk_that_fills_up_while_the_file_is_written_anew_keeps_the_old_one(
    long: Journal, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr("paceline.fleet.journal._COPIED_BYTES", 300)
    long.drop([0, 2])
    assert long._copy is not None

    def refuse(*arguments: object) -> None:
        raise RecordError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(long._copy.file, "append" if refused == "write" else "rename", refuse)
        for start in range(1000, 1200):
            long.write([keep(1, start, start)])
    assert long.failure is None
    assert [one.name for one in long.path.parent.iterdir()] == ["long"]
    long.close()
    assert find_long(long.path)[1].packed.unpack()[0] == tuple(range(1200))


def test_a_disk_without_room_for_both_keeps_the_old_one(
    long: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, write = long.path.stat().st_size, os.write

    def refuse(fd: int, data: bytes) -> int:
        if len(data) > 1000:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)
    long.drop([0, 2])
    assert long.path.stat().st_size == before
    assert long.failure is None
    long.write([keep(1, 1000, 7)])
    long.discard()
    assert not list(long.path.parent.iterdir())


def test_eight_bytes_a_token_and_a_few_a_growth(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "o", "job", resume=False)
    journal.find(REQUESTS)
    before = journal.path.stat().st_size
    journal.write([keep(0, 0, *range(100)), keep(1, 0, *range(100))])
    journal.close()
    assert journal.path.stat().st_size - before <= 2 * (8 * 100 + 40)


def test_whose_journal_it_is_can_be_told_where_it_holds_something(path: Path) -> None:
    assert kept_job(path) == "job"
    assert kept_job(path.with_name("nowhere")) is None
    Journal.open(path, "other", resume=False).close()
    assert kept_job(path) is None, "nothing of a response"
    path.write_bytes(b"something else")
    assert kept_job(path) is None
    path.unlink()
    path.mkdir()
    with pytest.raises(RecordError, match="cannot read"):
        kept_job(path)


def test_keys_with_a_sign_are_no_keys_of_a_fleet() -> None:
    """They are 64 bits there, as in an engine."""
    fleet = Fleet.__new__(Fleet)
    fleet._num_rollouts, fleet._is_closed = 0, False
    fleet._actors, fleet.max_model_len = SimpleNamespace(vocab_size=64), 50  # type: ignore[assignment]
    assert fleet._resolve(0, RolloutRequest((1, 2), 9, key=-7)).key == 2**64 - 7
