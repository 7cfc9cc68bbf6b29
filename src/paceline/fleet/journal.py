"""The journal of a rollout: what responses have so far, so that a restarted driver goes on from there.

A binary file of frames, one for all that responses have grown by since the last one: eight bytes a token and a few for
each growth. Invariants: what is read back of a response is a prefix of its tokens, whatever was torn or lost; a journal
of another job is never used. A response is known by its dice key and the tokens that it was given, `generated`
included: what follows them is always the same. The journal saves work and is not the result: while the disk is full the
rollout goes on and frames wait in memory, up to a limit. What is safe elsewhere is dropped (`drop`): when more than
half of the file is of no use, what is needed is copied to a file that takes its place, a little with every write, so
that the driver never waits for long. A driver that is killed meanwhile has the old file, which was written to the end.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from paceline.control.events import Keep, Kept
from paceline.control.packed import TOKEN_BYTES, Packed
from paceline.engine.keys import prompt_group
from paceline.errors import RecordError
from paceline.record.append import AppendFile
from paceline.types import RolloutRequest

MOST_WAITING_BYTES = 1 << 28
"""Frames that the disk does not take wait in memory up to so much; then the journal ends where it is."""
SLACK_BYTES = 1 << 26
"""What is no longer needed is left in the file up to so much."""
_COPIED_BYTES = 1 << 21
"""About as much is read at a time where a file is written anew: some 10 ms of work. And twice what has been written
meanwhile, or the copy would not catch up."""

Name = tuple[int, int]
"""Key, and digest of the tokens that the response was given."""

_MAGIC = b"paceline journal 2\n"
_FRAME = struct.Struct("=II")  # bytes of what follows, and their checksum
_ENTRY = struct.Struct("=QQIIIIB")  # key, given, start, tokens, steps, drafts, bytes of the finish reason


class _Entry(NamedTuple):
    """What a response has grown by."""

    name: Name
    start: int
    num_steps: int
    num_draft_tokens: int
    finish_reason: str | None
    packed: Packed
    size: int
    """Bytes in the file."""


@dataclass(slots=True)
class _Known:
    """What the entries so far tell of a response."""

    tokens: bytearray = field(default_factory=bytearray)  # [num_tokens] int32
    logprobs: bytearray = field(default_factory=bytearray)  # [num_tokens] float32
    num_steps: int = 0
    num_draft_tokens: int = 0
    finish_reason: str | None = None

    def take(self, entry: _Entry) -> None:
        """Go on with an entry that connects; any other one is passed over."""
        overlap = len(self.tokens) // TOKEN_BYTES - entry.start
        if overlap < 0 or self.finish_reason is not None:
            return
        if overlap > len(entry.packed) and entry.finish_reason is None:
            return
        fresh = entry.packed.cut(overlap, len(entry.packed))
        self.tokens += fresh.tokens
        self.logprobs += fresh.logprobs
        self.num_steps, self.num_draft_tokens = entry.num_steps, entry.num_draft_tokens
        self.finish_reason = entry.finish_reason

    def freeze(self) -> Kept:
        """As the controller takes it."""
        packed = Packed(bytes(self.tokens), bytes(self.logprobs))
        return Kept(packed, self.num_steps, self.num_draft_tokens, self.finish_reason)


class _Copy:
    """A file that is to take the journal's place, with what is needed of it so far."""

    def __init__(self, path: Path, head: bytes) -> None:
        """path: the journal's. Raises RecordError or OSError if there can be none."""
        self.file = _open(_copy_path(path))
        self._frames = _read_frames(path, head)
        self._num_read = len(head)
        try:
            self.file.cut(0)
            self.file.append(head)
        except BaseException:
            self.discard()
            raise

    def go_on(self, num_bytes: int, end: int, needed: Container[Name]) -> bool:
        """Read about so many bytes of the journal, which has `end`, and copy what is needed; whether that is all.

        Raises RecordError or OSError if it cannot go on.
        """
        entries: list[bytes] = []
        until = min(self._num_read + num_bytes, end)
        while self._num_read < until and (frame := next(self._frames, None)) is not None:
            self._num_read += _FRAME.size + len(frame)
            entries += [piece for name, piece in _split(frame) if name in needed]
        if entries:
            self.file.append(_frame(b"".join(entries)))
        return (
            self._num_read >= end or self._num_read < until
        )  # less: a damaged frame, and nobody can read on

    def discard(self) -> None:
        """It is not wanted any more."""
        self.file.close()
        with contextlib.suppress(OSError):
            self.file.path.unlink()


class Journal:
    """One file, written by this process alone. Use `open`; close it, or `discard` it once the rollout is complete."""

    def __init__(self, file: AppendFile, job: str) -> None:
        self.path = file.path
        self._file = file
        self._copy: _Copy | None = None
        self._head = _frame(_MAGIC + job.encode())
        self._names: list[Name] = []
        self._sizes: dict[Name, int] = {}  # bytes of each response that is needed
        self._needed_bytes = 0
        self._waiting: deque[bytes] = deque()
        self._has_ended = False
        self._slack_bytes = SLACK_BYTES  # doubled when the disk has no room for a new file
        self.failure: str | None = None
        """Why something is not on the disk; None: all is."""

    @classmethod
    def open(cls, path: Path, job: str, *, resume: bool) -> Self:
        """Open a journal, or begin it anew: without `resume`, or if it is of another job.

        job: names everything that decides the tokens beside key and given tokens. Raises RecordError if the file
        cannot be opened, or another process writes it.
        """
        journal = cls(_open(path), job)
        with contextlib.suppress(OSError):  # of a driver that was killed while it wrote it
            _copy_path(path).unlink()
        num_bytes = journal._survey() if resume else 0
        try:
            journal._file.cut(num_bytes)
        except RecordError as error:
            journal.failure = str(error)
        if not num_bytes:
            journal._append(journal._head)
        return journal

    def find(self, requests: Iterable[RolloutRequest]) -> dict[int, Kept]:
        """A rollout of these requests begins: what is known of them, by their place. Of others nothing is needed."""
        self._names = [_name(request) for request in requests]
        wanted = set(self._names)
        self._sizes = {name: size for name, size in self._sizes.items() if name in wanted}
        self._needed_bytes = sum(self._sizes.values())
        known: dict[Name, _Known] = {}
        for frame in _read_frames(self.path, self._head):
            for entry in _read_entries(frame):
                if entry.name in wanted:
                    known.setdefault(entry.name, _Known()).take(entry)
        return {index: known[name].freeze() for index, name in enumerate(self._names) if name in known}

    def write(self, keeps: Sequence[Keep]) -> None:
        """Append what responses have grown by. A disk that refuses is noted in `failure` and asked again next time."""
        if keeps:
            frame = _frame(b"".join(self._encode(keep) for keep in keeps))
            self._append(frame)
            self._go_on(_COPIED_BYTES + 2 * len(frame))

    def drop(self, indices: Iterable[int]) -> None:
        """These responses of the rollout are safe elsewhere: a restarted driver will not ask for them."""
        for index in indices:
            self._needed_bytes -= self._sizes.pop(self._names[index], 0)
        unneeded_bytes = self._file.size - self._needed_bytes
        if self._copy is None and unneeded_bytes > max(self._needed_bytes, self._slack_bytes):
            self._begin_anew()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._copy is not None:
            self._copy.discard()
            self._copy = None
        self._file.close()

    def discard(self) -> None:
        """The rollout is complete and its responses are safe: remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _encode(self, keep: Keep) -> bytes:
        name, reason = self._names[keep.index], (keep.finish_reason or "").encode()
        head = _ENTRY.pack(
            *name, keep.start, len(keep.packed), keep.num_steps, keep.num_draft_tokens, len(reason)
        )
        entry = b"".join((head, reason, keep.packed.tokens, keep.packed.logprobs))
        self._count(name, len(entry))
        return entry

    def _count(self, name: Name, num_bytes: int) -> None:
        self._sizes[name] = self._sizes.get(name, 0) + num_bytes
        self._needed_bytes += num_bytes

    def _append(self, frame: bytes) -> None:
        """Write what waits and this."""
        if self._has_ended or not self._file.is_open:
            return
        self._waiting.append(frame)
        try:
            while self._waiting:
                self._file.append(self._waiting[0])
                self._waiting.popleft()
            self.failure = None
        except RecordError as error:
            self.failure = str(error)
            if sum(map(len, self._waiting)) > MOST_WAITING_BYTES:  # a frame that is left out would be a gap
                self._has_ended = True
                self._waiting.clear()

    def _survey(self) -> int:
        """Learn what the file has; the length of its whole frames, 0 for a journal that is of no use."""
        num_bytes = 0
        for frame in _read_frames(self.path, self._head):
            num_bytes += _FRAME.size + len(frame)
            for entry in _read_entries(frame):
                self._count(entry.name, entry.size)
        return num_bytes + len(self._head) if num_bytes else 0

    def _begin_anew(self) -> None:
        """Begin to put what is needed into a new file. A disk without room for it is asked again later."""
        try:
            self._copy = _Copy(self.path, self._head)
        except (RecordError, OSError):
            self._slack_bytes *= 2
        self._go_on(_COPIED_BYTES)

    def _go_on(self, num_bytes: int) -> None:
        """Copy so much; when that is all, the new file takes the place of this one."""
        if (copy := self._copy) is None:
            return
        try:
            if not copy.go_on(num_bytes, self._file.size, self._sizes):
                return
            copy.file.rename(self.path)
        except (RecordError, OSError):
            copy.discard()
            self._slack_bytes *= 2
        else:
            self._file.close()
            self._file = copy.file
        self._copy = None


def kept_job(path: Path) -> str | None:
    """The job of a journal; None where there is none, or where it holds nothing of a response. Raises RecordError where
    it cannot be read.
    """
    try:
        head = next(_read_frames(path, b""), b"")
        if head.startswith(_MAGIC) and next(_read_frames(path, _frame(head)), None) is not None:
            return head.removeprefix(_MAGIC).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror}; move it away, or choose another --out"
        ) from error
    return None


def _copy_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _open(path: Path) -> AppendFile:
    remedy = "The rollout goes on; what is missing there would be generated again"
    return AppendFile.open(path, "pieces", remedy, sync_s=None)


def _name(request: RolloutRequest) -> Name:
    assert request.key is not None
    return request.key, prompt_group((*request.prompt, *request.generated))


def _frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _read_frames(path: Path, head: bytes) -> Iterator[bytes]:
    """What is in the frames behind the first, if that is `head`; up to the first that is torn or damaged.

    The file may grow meanwhile.
    """
    with path.open("rb", buffering=0) as file:  # nothing is read ahead: a torn end may become another one
        if file.read(len(head)) != head:
            return
        end = len(head)
        while len(found := file.read(_FRAME.size)) == _FRAME.size:
            size, checksum = _FRAME.unpack(found)
            end += _FRAME.size + size
            if end > os.fstat(file.fileno()).st_size or zlib.crc32(payload := file.read(size)) != checksum:
                return
            yield payload


def _split(frame: bytes) -> Iterator[tuple[Name, bytes]]:
    """The entries of a frame as they are, with the response of each."""
    place = 0
    while place < len(frame):
        key, given, _, count, _, _, num_reason = _ENTRY.unpack_from(frame, place)
        begin, place = place, place + _ENTRY.size + num_reason + 2 * count * TOKEN_BYTES
        yield (key, given), frame[begin:place]


def _read_entries(frame: bytes) -> Iterator[_Entry]:
    place = 0
    while place < len(frame):
        key, given, start, count, num_steps, num_drafts, num_reason = _ENTRY.unpack_from(frame, place)
        reason_at = place + _ENTRY.size
        tokens_at = reason_at + num_reason
        logprobs_at = tokens_at + count * TOKEN_BYTES
        end = logprobs_at + count * TOKEN_BYTES
        reason = frame[reason_at:tokens_at].decode() or None
        packed = Packed(frame[tokens_at:logprobs_at], frame[logprobs_at:end])
        yield _Entry((key, given), start, num_steps, num_drafts, reason, packed, end - place)
        place = end
