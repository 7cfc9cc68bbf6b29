"""Files that grow: whatever the disk refuses and wherever a file is torn, what was written before is whole."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.commands.rollout.responses import ResponseFile, ResponseLine, encode_line
from paceline.control.events import Keep
from paceline.control.packed import Packed
from paceline.errors import RecordError
from paceline.fleet.journal import Journal
from paceline.record import Header, Machine, Note, RecordReader, RecordWriter
from paceline.record.append import AppendFile, read_lines
from paceline.record.decisions import DecisionHeader, DecisionReader, DecisionWriter, DrafterLine
from paceline.types import RolloutRequest

REAL_WRITE, REAL_TRUNCATE = os.write, os.ftruncate


@contextmanager
def disk_of(room: int, *, cuts: bool = True, at_most: int = 1 << 20) -> Iterator[None]:
    """A disk that takes so many more bytes, a few at a time, and maybe refuses to give any back."""
    left = room

    def write(fd: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = REAL_WRITE(fd, data[: min(left, at_most)])
        left -= count
        return count

    def truncate(fd: int, size: int) -> None:
        nonlocal left
        if not cuts:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left += max(os.fstat(fd).st_size - size, 0)
        REAL_TRUNCATE(fd, size)

    os.write, os.ftruncate = write, truncate  # type: ignore[assignment]
    try:
        yield
    finally:
        os.write, os.ftruncate = REAL_WRITE, REAL_TRUNCATE


def try_to(do: Callable[[], None]) -> str | None:
    """Why it could not be done."""
    try:
        do()
    except RecordError as error:
        return str(error)
    return None


PIECES = st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=6)


@given(PIECES, st.integers(0, 40), st.integers(1, 5), st.booleans())
def test_a_piece_is_whole_or_not_there(pieces: list[bytes], room: int, at_most: int, cuts: bool) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        done: list[bytes] = []
        with AppendFile.open(path, "pieces", "Tidy up.") as file:
            with disk_of(room, cuts=cuts, at_most=at_most):
                for piece in pieces:
                    failure = try_to(lambda piece=piece: file.append(piece))  # type: ignore[misc]
                    if failure is None:
                        done.append(piece)
                        continue
                    assert f"cannot write to {path}" in failure
                    assert f"the {len(done)} pieces that this process has written" in failure
                    assert failure.endswith("are whole. Tidy up.")
                    if cuts:
                        assert path.read_bytes() == b"".join(done)
            assert path.read_bytes().startswith(b"".join(done))
            assert file.size == len(b"".join(done))
            file.append(b"later")
        assert path.read_bytes() == b"".join([*done, b"later"]), (
            "a torn end that could not be cut off is gone"
        )


def test_a_disk_that_does_not_keep_what_it_took_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    file = AppendFile.open(tmp_path / "file", "pieces", "Tidy up.")
    file.append(b"a")
    monkeypatch.undo()
    file.sync()
    file.append(b"b")
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        RecordError, match=r"of the 2 pieces .*, the last 1 may be missing or damaged\. .*Tidy up"
    ):
        file.close()
    assert not file.is_open
    file.close()
    with AppendFile.open(tmp_path / "file", "pieces", "Tidy up.", sync_s=None) as again:
        again.append(b"b")
    with pytest.raises(RecordError, match="Input/output error"):
        AppendFile.open(tmp_path / "other", "pieces", "Tidy up.", sync_s=0.0).append(b"c")


def test_one_process_writes_a_file_and_the_lock_ends_with_it(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from paceline.record.append import AppendFile;"
        "file = AppendFile.open(Path(sys.argv[1]), 'pieces', ''); file.append(b'theirs\\n');"
        "print('ready', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "file"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(RecordError, match="is being written by another process"):
            AppendFile.open(path, "pieces", "")
        other.kill()
    with AppendFile.open(path, "pieces", "") as file:
        file.append(b"ours\n")
    assert list(read_lines(path)) == [b"theirs\n", b"ours\n"]


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="Not a directory; choose another place"):
        AppendFile.open(tmp_path / "file" / "run" / "deep", "pieces", "")
    with pytest.raises(FileExistsError):
        AppendFile.create(tmp_path / "file", "pieces", "")


# -- all that are written so: torn at every byte, and continued

Appender = Callable[[Path, list[int]], None]
Finder = Callable[[Path], list[int]]
HEADER = Header(Machine("cpu", 1, 2), {}, 0.0, {}, "m", "t")


def append_responses(folder: Path, numbers: list[int]) -> None:
    file, _ = ResponseFile.resume(folder / "o.jsonl")
    with file:
        for number in numbers:
            line = ResponseLine("a", number, 1, 2, (3,), (4,), "x", (-0.5,), "stop", "p", "f", {}, 0, 0, 1)
            file.append(encode_line(line, {}))


def find_responses(folder: Path) -> list[int]:
    file, known = ResponseFile.resume(folder / "o.jsonl")
    file.close()
    return [sample for _, sample in known]


def append_notes(folder: Path, numbers: list[int]) -> None:
    if (folder / "record.jsonl").exists():
        writer = RecordWriter.resume(folder, machine=HEADER.machine, versions={})
    else:
        writer = RecordWriter.create(folder, HEADER)
    with writer:
        for number in numbers:
            writer.write(Note(t_s=float(number), text="note"))


def find_notes(folder: Path) -> list[int]:
    with RecordReader(folder) as reader:
        return [int(event.t_s) for event in reader if isinstance(event, Note)]


def append_growths(folder: Path, numbers: list[int]) -> None:
    journal = Journal.open(folder / "journal", "job", resume=True)
    journal.find([RolloutRequest((1,), 99, key=5)])
    for number in numbers:
        journal.write([Keep(0, number, Packed.of((number,), (-0.5,)), 1, 0, None)])
    journal.close()


def find_growths(folder: Path) -> list[int]:
    journal = Journal.open(folder / "journal", "job", resume=True)
    found = journal.find([RolloutRequest((1,), 99, key=5)])
    journal.close()
    return list(found[0].packed.unpack()[0]) if found else []


@pytest.mark.parametrize(
    ("append", "find", "first"),
    [
        pytest.param(append_responses, find_responses, 0, id="responses"),
        pytest.param(append_growths, find_growths, 0, id="journal"),
        pytest.param(append_notes, find_notes, len(msgspec.json.encode(HEADER)) + 1, id="record"),
    ],
)
def test_torn_anywhere_it_is_continued_from_the_last_whole_piece(
    append: Appender, find: Finder, first: int, tmp_path: Path
) -> None:
    append(tmp_path, [0, 1, 2])
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    seen = set()
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        found = find(tmp_path)
        assert found == list(range(len(found)))
        seen.add(len(found))
        append(tmp_path, list(range(len(found), 4)))
        assert find(tmp_path) == [0, 1, 2, 3]
    assert seen == {0, 1, 2}


def test_a_decision_log_torn_anywhere_has_what_came_before(tmp_path: Path) -> None:
    writer = DecisionWriter.create(tmp_path, DecisionHeader(kind="engine", settings={}))
    ends = [writer.path.stat().st_size]
    lines = [DrafterLine(floor=number / 8) for number in range(3)]
    for line in lines:
        writer.write(line)
        ends.append(writer.path.stat().st_size)
    writer.close()
    whole = writer.path.read_bytes()
    for size in range(ends[0], len(whole)):
        writer.path.write_bytes(whole[:size])
        with DecisionReader(writer.path) as reader:
            found = list(reader)
            assert found == lines[: sum(end <= size for end in ends[1:])]
            assert reader.torn == (size not in ends)


@pytest.mark.parametrize(("append", "find"), [(append_responses, find_responses), (append_notes, find_notes)])
def test_a_disk_that_fills_up_anywhere_loses_nothing_written(
    append: Appender, find: Finder, tmp_path: Path
) -> None:
    append(tmp_path, [0, 1])
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    for room in range(300):
        path.write_bytes(whole)
        with disk_of(room):
            failure = try_to(lambda: append(tmp_path, [2]))
        assert failure is None or "No space left on device" in failure
        assert find(tmp_path) == ([0, 1] if failure else [0, 1, 2])
    assert failure is None
