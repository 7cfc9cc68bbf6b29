"""The journal of a rollout: what responses have so far, so that a restarted driver goes on from there.

One JSON line per growth of a response, appended as workers report it. Invariants: what is read back of a response is a
prefix of its tokens, whatever was torn or lost; a journal of another job is never used. A response is known by its
dice key and its prompt. The journal saves work and is not the result: when the disk is full the rollout goes on
without, and lines that no longer connect are passed over when it is read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec

from paceline.engine.keys import prompt_group
from paceline.errors import RecordError
from paceline.fleet.events import Keep, Kept
from paceline.types import RolloutRequest

Name = tuple[int, int]
"""Key, and digest of the prompt."""


class _Head(msgspec.Struct, frozen=True):
    """The first line."""

    job: str


class _Line(msgspec.Struct, frozen=True):
    key: int
    prompt: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_steps: int
    num_draft_tokens: int
    finish_reason: str | None = None


_encoder = msgspec.json.Encoder()
_heads = msgspec.json.Decoder(_Head)
_lines = msgspec.json.Decoder(_Line)


class Journal:
    """One file, written by this process alone. Use `open`; close it, or `discard` it once the rollout is complete."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._kept: dict[Name, Kept] = {}
        self.failure: str | None = None
        """Why the last line could not be written; None: it was."""

    @classmethod
    def open(cls, path: Path, job: str, *, resume: bool) -> Self:
        """Open a journal, or begin it anew: without `resume`, or if it is of another job.

        job: names everything that decides the tokens beside key and prompt. Raises RecordError if the file cannot be
        opened, or another process writes it.
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
        """What is known of the requests, by their place."""
        names = (self._name(request) for request in requests)
        return {index: self._kept[name] for index, name in enumerate(names) if name in self._kept}

    def write(self, request: RolloutRequest, keep: Keep) -> None:
        """Append what a response has grown by. A disk that refuses is noted in `failure` and asked again next time."""
        key, prompt = self._name(request)
        line = _Line(
            key,
            prompt,
            keep.start,
            keep.tokens,
            keep.logprobs,
            keep.num_steps,
            keep.num_draft_tokens,
            keep.finish_reason,
        )
        self._append(_encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """The rollout is complete and its responses are safe: remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        begin = os.fstat(self._fd).st_size
        done = 0
        try:
            while done < len(line):
                done += os.write(self._fd, line[done:])
            self.failure = None
        except OSError as error:
            self.failure = f"cannot write to {self.path}: {error.strerror}"
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, begin)

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
                        self._take(_lines.decode(text))
                except msgspec.MsgspecError:
                    if number == 0:
                        return 0
                num_bytes += len(text)
        return num_bytes

    def _take(self, line: _Line) -> None:
        name = line.key, line.prompt
        known = self._kept.get(name, Kept((), ()))
        overlap = len(known.tokens) - line.start
        if overlap < 0 or known.finish_reason is not None or len(line.tokens) != len(line.logprobs):
            return
        if overlap > len(line.tokens) and line.finish_reason is None:
            return
        self._kept[name] = Kept(
            known.tokens + line.tokens[overlap:],
            known.logprobs + line.logprobs[overlap:],
            line.num_steps,
            line.num_draft_tokens,
            line.finish_reason,
        )

    @staticmethod
    def _name(request: RolloutRequest) -> Name:
        assert request.key is not None
        return request.key, prompt_group(request.prompt)
