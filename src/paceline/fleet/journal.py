"""The journal of a rollout: what responses have so far, so that a restarted driver goes on from there.

One JSON line per growth of a response, appended as workers report it. Invariants: what is read back of a response is a
prefix of its tokens, whatever was torn or lost; a journal of another job is never used. A response is known by its
dice key and the tokens that it was given, `generated` included: what follows them is always the same. The journal
saves work and is not the result: while the disk is full the rollout goes on and lines wait in memory, up to a limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from paceline.control.events import Keep, Kept
from paceline.engine.keys import prompt_group
from paceline.errors import RecordError
from paceline.types import RolloutRequest

MOST_WAITING_BYTES = 1 << 28
"""Lines that the disk does not take wait in memory up to so much; then the journal ends where it is."""

Name = tuple[int, int]
"""Key, and digest of the tokens that the response was given."""


class _Head(msgspec.Struct, frozen=True):
    """The first line."""

    job: str


class _Line(msgspec.Struct, frozen=True):
    key: int
    given: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_steps: int
    num_draft_tokens: int
    finish_reason: str | None = None


@dataclass(slots=True)
class _Known:
    """What the lines so far tell of a response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_draft_tokens: int = 0
    finish_reason: str | None = None

    def take(self, line: _Line) -> None:
        """Go on with a line that connects; any other one is passed over."""
        overlap = len(self.tokens) - line.start
        if overlap < 0 or self.finish_reason is not None or len(line.tokens) != len(line.logprobs):
            return
        if overlap > len(line.tokens) and line.finish_reason is None:
            return
        self.tokens += line.tokens[overlap:]
        self.logprobs += line.logprobs[overlap:]
        self.num_steps, self.num_draft_tokens = line.num_steps, line.num_draft_tokens
        self.finish_reason = line.finish_reason

    def freeze(self) -> Kept:
        """As the controller takes it."""
        return Kept(
            tuple(self.tokens),
            tuple(self.logprobs),
            self.num_steps,
            self.num_draft_tokens,
            self.finish_reason,
        )


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(_Head)
_lines = msgspec.json.Decoder(_Line)


class Journal:
    """One file, written by this process alone. Use `open`; close it, or `discard` it once the rollout is complete."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._kept: defaultdict[Name, _Known] = defaultdict(_Known)
        self._names: list[Name] = []
        self._waiting = bytearray()
        self._has_ended = False
        self.failure: str | None = None
        """Why something is not on the disk; None: all is."""

    @classmethod
    def open(cls, path: Path, job: str, *, resume: bool) -> Self:
        """Open a journal, or begin it anew: without `resume`, or if it is of another job.

        job: names everything that decides the tokens beside key and given tokens. Raises RecordError if the file
        cannot be opened, or another process writes it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordError(f"cannot write to {path}: {error.strerror}; choose another output") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise RecordError(f"{path} is being written by another process: wait for it") from error
        journal = cls(path, fd)
        num_bytes = journal._read(job) if resume else 0
        with contextlib.suppress(OSError):
            os.ftruncate(fd, num_bytes)
        if not num_bytes:
            journal._kept.clear()
            journal._append(_encoder.encode(_Head(job)) + b"\n")
        return journal

    def find(self, requests: Iterable[RolloutRequest]) -> dict[int, Kept]:
        """A rollout of these requests begins: what is known of them, by their place."""
        self._names = [self._name(request) for request in requests]
        return {
            index: self._kept[name].freeze() for index, name in enumerate(self._names) if name in self._kept
        }

    def write(self, keeps: Iterable[Keep]) -> None:
        """Append what responses have grown by. A disk that refuses is noted in `failure` and asked again next time."""
        self._append(b"".join(self._encode(keep) for keep in keeps))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """The rollout is complete and its responses are safe: remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _encode(self, keep: Keep) -> bytes:
        line = _Line(
            *self._names[keep.index],
            keep.start,
            keep.tokens,
            keep.logprobs,
            keep.num_steps,
            keep.num_draft_tokens,
            keep.finish_reason,
        )
        return _encoder.encode(line) + b"\n"

    def _append(self, lines: bytes) -> None:
        """Write what waits and these. A line may be cut in two for a time, for the next call goes on where it ends."""
        if self._has_ended:
            return
        self._waiting += lines
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting)]
            self.failure = None
        except OSError as error:
            self.failure = f"cannot write to {self.path}: {error.strerror}"
            if len(self._waiting) > MOST_WAITING_BYTES:  # a line that is left out would be a gap
                self._has_ended = True
                self._waiting.clear()

    def _read(self, job: str) -> int:
        """Take in the file; returns the length of its whole lines, 0 for a journal that is of no use."""
        num_bytes = 0
        with self.path.open("rb") as lines:
            for number, text in enumerate(lines):
                if not text.endswith(b"\n"):
                    break
                try:
                    if number == 0:
                        if _heads.decode(text).job != job:
                            return 0
                    else:
                        line = _lines.decode(text)
                        self._kept[line.key, line.given].take(line)
                except msgspec.MsgspecError:
                    if number == 0:
                        return 0
                num_bytes += len(text)
        return num_bytes

    @staticmethod
    def _name(request: RolloutRequest) -> Name:
        assert request.key is not None
        return request.key, prompt_group((*request.prompt, *request.generated))
